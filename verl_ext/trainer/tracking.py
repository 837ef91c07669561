"""verl's tracking on rank 0, with a metrics file that a resumed run continues."""

import os
from pathlib import Path

import orjson
from omegaconf import DictConfig, OmegaConf
from verl.utils.tracking import Tracking

METRICS = "metrics.jsonl"
_FILE_PATH = "VERL_FILE_LOGGER_PATH"


def open_tracking(config: DictConfig, first_step: int) -> Tracking:
    """The loggers that `trainer.logger` names.

    verl's ``file`` logger opens its file anew even on resume; the lines up to ``first_step`` are put back here. Unless
    ``VERL_FILE_LOGGER_PATH`` says otherwise it lies beside the checkpoints as ``metrics.jsonl``.
    """
    trainer = config.trainer
    loggers = [trainer.logger] if isinstance(trainer.logger, str) else list(trainer.logger)
    kept: list[bytes] = []
    if "file" in loggers:
        path = Path(os.environ.setdefault(_FILE_PATH, str(Path(trainer.default_local_dir) / METRICS)))
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(path, first_step) if first_step else []
        backup = path.with_name(f"{path.name}.before_resume")
        if kept and not backup.exists():
            os.replace(path, backup)  # until they are written again below
    tracking = Tracking(
        trainer.project_name,
        trainer.experiment_name,
        default_backend=loggers,
        config=OmegaConf.to_container(config, resolve=True),
    )
    if kept:
        tracking.logger["file"].fp.write(b"".join(kept))
        backup.unlink()
    return tracking


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
