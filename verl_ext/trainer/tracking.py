"""verl's tracking on rank 0, whose metrics file and tracked runs a resumed run continues."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
from omegaconf import DictConfig, OmegaConf
from verl.utils.tracking import Tracking

from verl_ext.trainer.run_ids import going_on_with, keep_run_ids, read_run_ids

METRICS = "metrics.jsonl"
_FILE_PATH = "VERL_FILE_LOGGER_PATH"


def open_tracking(config: DictConfig, first_step: int) -> Tracking:
    """The loggers that `trainer.logger` names.

    verl's ``file`` logger opens its file anew even on resume; the lines up to ``first_step`` are put back here. Unless
    ``VERL_FILE_LOGGER_PATH`` says otherwise it lies beside the checkpoints as ``metrics.jsonl``. wandb and swanlab go
    on with the run that they began before ``first_step``; at step 0 they begin a new one.

    Raises:
        ValueError: a logger cannot begin, for want of a login, a package or a server.
    """
    trainer, folder = config.trainer, Path(config.trainer.default_local_dir)
    loggers = [trainer.logger] if isinstance(trainer.logger, str) else list(trainer.logger)
    kept: list[bytes] = []
    if "file" in loggers:
        path = Path(os.environ.setdefault(_FILE_PATH, str(folder / METRICS)))
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(path, first_step) if first_step else []
        backup = path.with_name(f"{path.name}.before_resume")
        if kept and not backup.exists():
            os.replace(path, backup)  # until they are written again below
    tracking = _begun(config, loggers, read_run_ids(folder) if first_step else {})
    if kept:
        tracking.logger["file"].fp.write(b"".join(kept))
        backup.unlink()
    return tracking


def _begun(config: DictConfig, loggers: list[str], ids: dict[str, str]) -> Tracking:
    """verl's tracking; its runs go on with `ids`, and theirs are kept for a resume."""
    trainer = config.trainer
    try:
        with going_on_with(ids, loggers), _nobody_to_ask():
            tracking = Tracking(
                trainer.project_name,
                trainer.experiment_name,
                default_backend=loggers,
                config=OmegaConf.to_container(config, resolve=True),
            )
    except Exception as error:  # each tracker has exceptions of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"trainer.logger must name trackers that can begin; got {loggers} ({reason}); without a login there are "
            "WANDB_MODE=offline and SWANLAB_MODE=offline"
        ) from error
    keep_run_ids(Path(trainer.default_local_dir), ids, tracking.logger)
    return tracking


@contextmanager
def _nobody_to_ask() -> Iterator[None]:
    """No terminal to read from: a tracker without a login raises instead of asking, while every other rank waits."""
    terminal = sys.stdin
    with open(os.devnull) as nobody:
        sys.stdin = nobody
        try:
            yield
        finally:
            sys.stdin = terminal


def _lines_until(path: Path, step: int) -> list[bytes]:
    """Metric lines of steps up to ``step``; a torn last line of a killed run is left out."""
    backup = path.with_name(f"{path.name}.before_resume")
    source = backup if backup.exists() else path  # a resume that was killed at the wrong moment left its backup
    if not source.exists():
        return []
    kept = []
    for line in source.read_bytes().splitlines(keepends=True):
        try:
            if orjson.loads(line)["step"] <= step:
                kept.append(line)
        except orjson.JSONDecodeError:
            break
    return kept
