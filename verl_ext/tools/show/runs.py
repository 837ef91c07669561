"""A run, read from the files of its folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.curves import Curve, read_curves, read_facts
from verl_ext.checkpoint.layout import METRICS, REPORT, RUN, SPIKES, TRACKER, is_locked

RATE_STEPS = 20  # the number of last logged steps whose mean time gives the time left
_LOSS, _TOKENS = "_loss", "_tokens"


@dataclass(frozen=True)
class ShownRun:
    """The config, metrics and notes of a run.

    Attributes:
        path: the run's folder, or its metrics file.
        curves: the curve of each metric by name, in the order of first appearance.
        torn: the number of the first line of the metrics that cannot be read; None if all can.
        facts: run.json, with secrets masked; {} without it.
        data: data_report.json; {} without it.
        checkpoint: the step of the last checkpoint.
        is_alive: whether a process holds the lock of the run's folder.
    """

    path: Path
    curves: dict[str, Curve]
    torn: int | None
    facts: dict[str, Any]
    data: dict[str, Any]
    checkpoint: int | None
    is_alive: bool

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return run_folder(self.path)

    @property
    def name(self) -> str:
        """The folder's name; its parent's for a folder called `checkpoints`."""
        folder = self.folder.resolve()
        return folder.parent.name if folder.name == "checkpoints" else folder.name

    @property
    def step(self) -> int:
        """The last step of any metric, 0 before the first."""
        return max((curve.steps[-1] for curve in self.curves.values()), default=0)

    @property
    def seconds_left(self) -> float | None:
        """The seconds left by recent steps' mean time; None if unknown."""
        tokens, rates = (self.curves.get(f"train/{name}") for name in ("tokens", "tokens_per_second"))
        if tokens is None or rates is None or "total_steps" not in self.facts:
            return None
        pairs = zip(tokens.values[-RATE_STEPS:], rates.values[-RATE_STEPS:], strict=False)
        seconds = [count / rate for count, rate in pairs if count and rate]
        return (self.facts["total_steps"] - self.step) * sum(seconds) / len(seconds) if seconds else None

    def categories(self) -> list[str]:
        """Return the sorted names of the categories whose losses were logged."""
        names = {key.split("/", 1)[1].removesuffix(_LOSS) for key in self.curves if key.endswith(_LOSS)}
        return sorted(name for name in names if f"train/{name}{_TOKENS}" in self.curves)


def run_folder(path: str | Path) -> Path:
    """Return the folder of a run, which its metrics file names too."""
    return Path(path) if Path(path).is_dir() else Path(path).parent


def is_run(path: str) -> bool:
    """Return whether a path is a run's folder or a metrics file."""
    folder = Path(path)
    if folder.is_file():
        return folder.suffix == ".jsonl" and (folder.name == METRICS or _has_metrics(folder))
    return any((folder / name).is_file() for name in (METRICS, RUN, TRACKER))


def _has_metrics(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return {"step", "data"} == json.loads(file.readline(1 << 20)).keys()
    except (OSError, ValueError, AttributeError):
        return False


def open_run(path: str) -> ShownRun:
    """Read a run.

    Raises:
        UsageError: there is no metrics file.
        DataError: it holds no metrics.
    """
    given, folder = Path(path), run_folder(path)
    file = given if given.is_file() else folder / METRICS
    curves, torn = read_curves(file)
    tracker = folder / TRACKER
    step = tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else ""
    checkpoint = int(step) if step.isdigit() else None
    return ShownRun(
        given, curves, torn, read_facts(folder / RUN), read_facts(folder / REPORT), checkpoint, is_locked(folder)
    )


def read_spike(folder: Path, step: int) -> dict[str, Any] | None:
    """Return the line of spikes.jsonl about a step, or None."""
    path = folder / SPIKES
    for line in path.read_text(encoding="utf-8").split("\n") if path.is_file() else ():
        try:
            spike = json.loads(line)
        except ValueError:
            return None  # the run is still writing this line
        if spike.get("step") == step:
            return spike
    return None
