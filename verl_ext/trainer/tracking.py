"""verl's tracking on rank 0. A resumed run continues the metrics file and the tracked runs.

    run_ids.json    {"wandb": "dz5g909n"}    the ids of the runs, beside the checkpoints

wandb and swanlab read an id, and whether its run may be continued, from the environment; one that is set there wins.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
from verl.utils.tracking import Tracking

from verl_ext.config.output import METRICS, RUN_IDS
from verl_ext.config.run import RunConfig
from verl_ext.files import atomic_write, write_json
from verl_ext.redaction import redacted, redacted_text
from verl_ext.values import first_line

# tracker: (variable of its run's id, variable that lets a run of that id be continued)
_VARIABLES = {"wandb": ("WANDB_RUN_ID", "WANDB_RESUME"), "swanlab": ("SWANLAB_RUN_ID", "SWANLAB_RESUME")}


def read_run_ids(folder: Path) -> dict[str, str]:
    """What :func:`keep_run_ids` wrote into a run's folder; nothing where it wrote nothing.

    Raises:
        ValueError: the file is no JSON object.
    """
    path = folder / RUN_IDS
    if not path.is_file():
        return {}
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        ids = None
    if not isinstance(ids, dict):
        raise ValueError(f"trainer.default_local_dir: {RUN_IDS} must be a JSON object of run ids; got {path}")
    return ids


def keep_run_ids(folder: Path, earlier: Mapping[str, str], loggers: Mapping[str, Any]) -> None:
    """Write the ids of the runs that verl's ``Tracking.logger`` has begun, and of `earlier` ones that it has not."""
    runs = {
        "wandb": lambda wandb: wandb.run,
        "swanlab": lambda swanlab: swanlab.get_run(),
    }
    begun = {name: getattr(runs[name](loggers[name]), "id", None) for name in _VARIABLES if name in loggers}
    ids = {**earlier, **{name: run_id for name, run_id in begun.items() if run_id}}
    if ids:
        write_json(folder / RUN_IDS, ids)
    else:
        (folder / RUN_IDS).unlink(missing_ok=True)  # of a run that ended before its first checkpoint


@contextmanager
def continued_runs(ids: Mapping[str, str], loggers: Sequence[str]) -> Iterator[None]:
    """The environment in which `loggers` continue the runs of these ids; afterwards it is as it was."""
    variables: dict[str, str] = {}
    for name in _VARIABLES.keys() & ids.keys() & set(loggers):
        run_id, resume = _VARIABLES[name]
        variables |= {run_id: ids[name], resume: "allow"}
    added = {name: value for name, value in variables.items() if not os.environ.get(name)}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


_FILE_PATH = "VERL_FILE_LOGGER_PATH"


def open_tracking(config: RunConfig, first_step: int) -> Tracking:
    """The loggers that `trainer.logger` names.

    verl's ``file`` logger opens its file anew even on resume; the lines up to ``first_step`` are put back here. Unless
    ``VERL_FILE_LOGGER_PATH`` says otherwise it lies beside the checkpoints as ``metrics.jsonl``. wandb and swanlab go
    on with the run that they began before ``first_step``; at step 0 they begin a new one.

    Raises:
        ValueError: a logger cannot begin, for want of a login, a package or a server.
    """
    folder, loggers = Path(config.trainer.default_local_dir), config.trainer.loggers
    kept: list[bytes] = []
    if "file" in loggers:
        path = Path(os.environ.setdefault(_FILE_PATH, str(folder / METRICS)))
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(path, first_step) if first_step else []
        if not first_step:
            _set_aside(path)
        backup = path.with_name(f"{path.name}.before_resume")
        if kept and not backup.exists():
            os.replace(path, backup)  # until they are written again below
    tracking = _started(config, loggers, read_run_ids(folder) if first_step else {})
    if kept:
        tracking.logger["file"].fp.write(b"".join(kept))
        backup.unlink()
    return tracking


def continued_lines(path: Path, first_step: int) -> None:
    """Leave the lines up to `first_step` in a JSONL file of a run that goes on; at step 0 the file is set aside."""
    if not first_step:
        _set_aside(path)
    elif path.is_file():
        kept = _lines_until(path, first_step)
        with atomic_write(path) as partial:
            partial.write_bytes(b"".join(kept))


def _set_aside(path: Path) -> None:
    if path.is_file():  # of a run that ended before its first checkpoint
        os.replace(path, path.with_name(f"{path.name}.before_restart"))


def _started(config: RunConfig, loggers: list[str], ids: dict[str, str]) -> Tracking:
    """verl's tracking, which continues the runs of these ids; the ids of its runs are kept for a resume."""
    trainer = config.trainer
    sys.argv[1:] = map(redacted_text, sys.argv[1:])  # Hydra has read it; trackers upload it
    try:
        with continued_runs(ids, loggers), _without_terminal():
            tracking = Tracking(
                trainer.project_name,
                trainer.experiment_name,
                default_backend=loggers,
                config=redacted(config.values),
            )
    except Exception as error:  # each tracker has exceptions of its own
        raise ValueError(
            f"trainer.logger must name trackers that can begin; got {loggers} ({first_line(error)}); without a login "
            "there are WANDB_MODE=offline and SWANLAB_MODE=offline"
        ) from error
    keep_run_ids(Path(trainer.default_local_dir), ids, tracking.logger)
    return tracking


@contextmanager
def _without_terminal() -> Iterator[None]:
    """A tracker without a login raises instead of asking for one while every other rank waits."""
    terminal = sys.stdin
    with open(os.devnull) as nobody:
        sys.stdin = nobody
        try:
            yield
        finally:
            sys.stdin = terminal


def _lines_until(path: Path, step: int) -> list[bytes]:
    """Lines of steps up to ``step``; those that a kill or a full disk has torn are left out."""
    backup = path.with_name(f"{path.name}.before_resume")
    source = backup if backup.exists() else path  # a resume that was killed at the wrong moment left its backup
    if not source.exists():
        return []
    kept = []
    for line in source.read_bytes().splitlines(keepends=True):
        with suppress(orjson.JSONDecodeError, LookupError, TypeError):
            if orjson.loads(line)["step"] <= step:
                kept.append(line)
    return kept
