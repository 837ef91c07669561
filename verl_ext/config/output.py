"""What a run does with trainer.default_local_dir: write into a fresh folder, resume in it, or replace it."""

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_ext.config.checkpoints import PARTIAL, TRACKER, damage, resumable_ranks, whole_checkpoints
from verl_ext.config.resolve import PATHS
from verl_ext.files import writable_problem
from verl_ext.text.sources import local_path

REPORT = "data_report.json"
EVALUATION = "evaluation.json"
RUN_IDS = "run_ids.json"
RUN_LOCK = "run.lock"
FINAL_MEMORY = "final_memory_checkpoint.pt"
MEMORY_SETTINGS = "final_memory_checkpoint.json"
METRICS = "metrics.jsonl"
SPIKES = "spikes.jsonl"
FLIGHT_RECORDER = "flight_recorder"
# What may lie in a folder without a run to keep: a run that was killed before its first checkpoint begins anew.
_NO_RUN = (
    *(REPORT, EVALUATION, RUN_IDS, RUN_LOCK, FLIGHT_RECORDER),
    *(f"{name}{ending}" for name in (METRICS, SPIKES) for ending in ("", ".before_restart")),
)


class OutputAction(Enum):
    """What is to be done with the output folder before training."""

    FRESH = "fresh"  # it does not exist or is empty
    RESUME = "resume"  # from OutputPlan.checkpoint
    REPLACE = "replace"  # its files are to be deleted first, by rank 0 alone; checkpoint may name one from elsewhere


@dataclass(frozen=True)
class OutputPlan:
    """The decision for trainer.default_local_dir.

    Attributes:
        checkpoint: the global_step folder that the run resumes from, checked by the sizes of its files alone.
        earlier: those in its place, newest first, where it turns out to be damaged.
        damaged: what is wrong with newer ones, in a line each.
    """

    action: OutputAction
    checkpoint: str | None = None
    earlier: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


def check_output(config: DictConfig, world_size: int | None = None) -> OutputPlan:
    """The decision for the run's output folder; touches nothing.

    Call it before any rank deletes. Raises ValueError when the folder cannot be written to, when files would be
    overwritten without trainer.overwrite=true, when the folder to be replaced holds something that the run reads, and
    when a checkpoint cannot be resumed (world_size: ranks of this run).
    """
    trainer = config.trainer
    folder = Path(trainer.default_local_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"trainer.default_local_dir must be a folder; got the file {folder}")
    if problem := writable_problem("trainer.default_local_dir", str(folder)):
        raise ValueError(problem)
    if trainer.overwrite and (restarts := _restarts()):
        raise ValueError(
            f"trainer.overwrite must be false where a run may be restarted ({restarts}); got true: a restart "
            "would remove what the run has written"
        )
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    used = any(name not in _NO_RUN and not name.endswith(PARTIAL) for name in names)
    named = trainer.resume_from_path if trainer.resume_mode != "disable" else None
    if trainer.resume_mode == "resume_path" or named:
        return _resume_named(config, folder, used, named, world_size)
    if not used:
        return OutputPlan(OutputAction.FRESH)
    if trainer.overwrite:
        _check_replaceable(config, folder)
        return OutputPlan(OutputAction.REPLACE)
    whole, wrong = whole_checkpoints(folder) if trainer.resume_mode == "auto" else ([], {})
    if not whole:
        why = (
            "trainer.resume_mode is disable" if trainer.resume_mode == "disable" else _why_not_resumable(folder, wrong)
        )
        raise ValueError(
            f"trainer.default_local_dir must be empty or new; got {folder}, which has files in it and {why}: choose "
            "another folder, or trainer.overwrite=true to replace it"
        )
    check_ranks(whole[0], world_size)
    latest, *earlier = map(str, whole)
    damaged = tuple(f"{checkpoint} is damaged: {reason}" for checkpoint, reason in wrong.items())
    return OutputPlan(OutputAction.RESUME, latest, tuple(earlier), damaged)


def _restarts() -> str | None:
    """What may start, or has started, this run again by itself."""
    allowed, requeued = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if allowed != "0":
        return f"MAX_RESTARTS={allowed}"
    return None if requeued == "0" else f"slurm requeued it {requeued} times"


def _why_not_resumable(folder: Path, wrong: dict[Path, str]) -> str:
    """What keeps `trainer.resume_mode=auto` from resuming in a folder with files in it."""
    if not wrong:
        return "holds no checkpoint to resume from"
    whole = [path for path in wrong if damage(path) is None]  # of verl's form
    if whole:
        tracker = (folder / TRACKER).read_text().strip() if (folder / TRACKER).is_file() else "missing"
        return (
            f"whose {TRACKER} is {tracker or 'empty'}, which names no whole checkpoint; resume the last whole one by "
            f"trainer.resume_mode=resume_path trainer.resume_from_path={whole[0]}"
        )
    return "no whole checkpoint: " + "; ".join(f"{path.name}: {reason}" for path, reason in wrong.items())


def _resume_named(
    config: DictConfig, folder: Path, used: bool, named: str | None, world_size: int | None
) -> OutputPlan:
    key = "trainer.resume_from_path"
    if not named:
        raise ValueError(f"{key} is required with trainer.resume_mode=resume_path; got null")
    checkpoint = Path(named).expanduser()
    if not checkpoint.is_dir() or "global_step_" not in checkpoint.name:
        raise ValueError(f"{key} must be an existing global_step_N folder; got {named}")
    if wrong := damage(checkpoint):
        raise ValueError(f"{key} must be a whole checkpoint; got {named}: {wrong}")
    check_ranks(checkpoint, world_size)
    inside = folder.resolve() in checkpoint.resolve().parents
    if used and not inside and not config.trainer.overwrite:
        raise ValueError(
            f"trainer.default_local_dir must be empty or new, or hold {key}; got {folder}: choose another folder, or "
            "trainer.overwrite=true to replace it"
        )
    if used and config.trainer.overwrite:
        _check_replaceable(config, folder)
        return OutputPlan(OutputAction.REPLACE, str(checkpoint))
    return OutputPlan(OutputAction.RESUME, str(checkpoint))


def check_ranks(checkpoint: Path, world_size: int | None) -> None:
    """Refuse a whole checkpoint that so many ranks cannot read, by a ValueError."""
    saved = resumable_ranks(checkpoint)
    if None not in (world_size, saved) and saved != world_size:
        raise ValueError(
            f"the checkpoint {checkpoint} was saved by {saved} rank(s) in verl's own form and can only be resumed by "
            f"as many; got {world_size} (trainer.overwrite=true starts anew)"
        )


def _check_replaceable(config: DictConfig, folder: Path) -> None:
    """Replacing deletes: never a folder that holds what the run reads, the working directory or the home."""
    read = {key: OmegaConf.select(config, key) for key in PATHS if key != "trainer.default_local_dir"}
    for name, source in (OmegaConf.select(config, "data.mixture.sources") or {}).items():
        read[f"data.mixture.sources.{name}.train_dir"] = source.get("train_dir")
    held = [(key, path) for key, value in read.items() for path in _listed(value)]
    held += [("the working directory", os.getcwd()), ("the home directory", os.path.expanduser("~"))]
    for name, value in held:
        if not os.path.exists(os.path.expanduser(value)):
            continue
        path = Path(value).expanduser().resolve()
        if folder.resolve() == path or folder.resolve() in path.parents:
            raise ValueError(
                f"trainer.default_local_dir must not hold {name} with trainer.overwrite=true, which would delete it; "
                f"got {folder}"
            )


def _listed(value: Any) -> list[str]:
    """The paths of a value: none, one, a list, or {name: path}."""
    if isinstance(value, DictConfig):
        return [path for held in value.values() for path in _listed(held)]
    values = value if isinstance(value, ListConfig) else [value]
    return [local_path(str(path)) for path in values if path]
