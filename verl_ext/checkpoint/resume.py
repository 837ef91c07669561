"""The treatment of a run's folder at its start: new, resumed, replaced."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from verl_ext.checkpoint import layout
from verl_ext.checkpoint.layout import Checkpoint
from verl_ext.config.keys import paths
from verl_ext.config.run import RunConfig
from verl_ext.config.upstream import select
from verl_ext.data.tokenized.ranks import Ranks
from verl_ext.files import writable_problem
from verl_ext.options import must
from verl_ext.text.read.sources import local_path

_ANEW = {  # checkpoint.load_contents: what a resumed run does without an entry
    "model": "the weights are those of model.path",
    "optimizer": "the optimizer's state begins empty",
    "extra": "the learning rate's schedule begins at its first step",
}


class OutputAction(Enum):
    """The treatment of the output folder before training."""

    FRESH = "fresh"  # it does not exist or is empty
    RESUME = "resume"  # from one of OutputDecision.checkpoints
    REPLACE = "replace"  # rank 0 alone deletes its files first; a checkpoint may lie elsewhere


@dataclass(frozen=True)
class OutputDecision:
    """The decision for trainer.default_local_dir.

    Attributes:
        checkpoints: the newest first, checked by file sizes alone; the run resumes from the first whole one.
        damaged: a line about the damage of each newer checkpoint.
    """

    action: OutputAction
    checkpoints: tuple[Checkpoint, ...] = ()
    damaged: tuple[str, ...] = ()


def check_output(config: RunConfig) -> OutputDecision:
    """Decide the treatment of a run's output folder without changing anything.

    Call it before any rank deletes files.

    Raises:
        ValueError: If the folder is not writable, files would be overwritten without trainer.overwrite=true, the folder
            to replace contains something that the run reads, or a checkpoint cannot be resumed.
    """
    trainer = config.trainer
    folder = Path(trainer.default_local_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(must("trainer.default_local_dir", "be a folder", f"the file {folder}"))
    if problem := writable_problem("trainer.default_local_dir", str(folder)):
        raise ValueError(problem)
    allowed, requeued = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
    # A restarted run must resume: it would else delete the checkpoints that it was restarted for.
    if trainer.overwrite and (allowed, requeued) != ("0", "0"):
        restarts = f"MAX_RESTARTS={allowed}" if allowed != "0" else f"slurm requeued it {requeued} times"
        got = "true: a restart would remove what the run has written"
        raise ValueError(must("trainer.overwrite", f"be false where a run may be restarted ({restarts})", got))
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    # Notes and partial files are nothing to lose, so that a folder with these alone counts as empty.
    used = any(name not in (*layout.NOTES, layout.RUN_LOCK) and not layout.is_unfinished(name) for name in names)
    named = trainer.resume_from_path if trainer.resume_mode != "disable" else None
    if trainer.resume_mode == "resume_path" or named:
        return _resume_named(config, folder, used, named)
    if not used:
        return OutputDecision(OutputAction.FRESH)
    if trainer.overwrite:
        _check_replaceable(config, folder)
        return OutputDecision(OutputAction.REPLACE)
    # A damaged newest checkpoint must not end the run: an earlier whole one is resumed.
    is_auto = trainer.resume_mode == "auto"
    whole, wrong = layout.whole_checkpoints(folder) if is_auto else ([], {})
    if not whole:
        why = "; ".join(f"{path.name}: {reason}" for path, reason in wrong.items())
        why = f"no whole checkpoint: {why}" if why else "holds no checkpoint to resume from"
        why = why if is_auto else "trainer.resume_mode is disable"
        hint = "choose another folder, or trainer.overwrite=true to replace it"
        got = f"{folder}, which has files in it and {why}: {hint}"
        raise ValueError(must("trainer.default_local_dir", "be empty or new", got))
    damaged = tuple(f"{checkpoint} is damaged: {reason}" for checkpoint, reason in wrong.items())
    return OutputDecision(OutputAction.RESUME, tuple(whole), damaged)


def _resume_named(config: RunConfig, folder: Path, used: bool, named: str | None) -> OutputDecision:
    key = "trainer.resume_from_path"
    if not named:
        raise ValueError(f"{key} is required with trainer.resume_mode=resume_path; got null")
    path = Path(named).expanduser()
    if path.name == layout.BEST and path.is_symlink():
        path = path.resolve()
    if not path.is_dir() or "global_step_" not in path.name:
        raise ValueError(must(key, "be an existing global_step_N folder", named))
    try:
        checkpoint = Checkpoint.read(path)
    except layout.Damaged as error:
        raise ValueError(must(key, "be a whole checkpoint", f"{named}: {error}")) from error
    if used and config.trainer.overwrite:
        _check_replaceable(config, folder)
        return OutputDecision(OutputAction.REPLACE, (checkpoint,))
    if used and folder.resolve() not in path.resolve().parents:
        got = f"{folder}: choose another folder, or trainer.overwrite=true to replace it"
        raise ValueError(must("trainer.default_local_dir", f"be empty or new, or hold {key}", got))
    return OutputDecision(OutputAction.RESUME, (checkpoint,))


def _check_replaceable(config: RunConfig, folder: Path) -> None:
    """Refuse to replace a folder that holds input, working or home directory."""
    read = {
        key: select(config.values, key) for key in paths("data", "run", "model") if key != "trainer.default_local_dir"
    }
    for name, source in (select(config.values, "data.mixture.sources") or {}).items():
        read[f"data.mixture.sources.{name}.train_dir"] = source.get("train_dir")
    held = [(key, path) for key, value in read.items() for path in _paths_in(value)]
    held += [("the working directory", os.getcwd()), ("the home directory", "~")]
    for name, value in held:
        path = Path(value).expanduser().resolve()
        if os.path.exists(path) and path.is_relative_to(folder.resolve()):
            needed = f"not hold {name} with trainer.overwrite=true, which would delete it"
            raise ValueError(must("trainer.default_local_dir", needed, folder))


def _paths_in(value: Any) -> list[str]:
    """Return an option's paths: none, one, a list, or {name: path}."""
    if isinstance(value, Mapping):
        return [path for held in value.values() for path in _paths_in(held)]
    values = value if isinstance(value, list) else [value]
    return [local_path(str(path)) for path in values if path]


def verified(output: OutputDecision, ranks: Ranks) -> Checkpoint | None:
    """Return the checkpoint to resume from, after comparing checksums; collective.

    Ends the run if there are some and none is whole.
    """
    damaged = list(output.damaged)
    for checkpoint in output.checkpoints:
        wrong = next(filter(None, ranks.gather(checkpoint.changed_file(ranks.rank, ranks.size))), None)
        if wrong is None:
            if damaged and ranks.rank == 0:
                print(*(f"warning: {line}" for line in damaged), sep="\n", file=sys.stderr)
                print(f"warning: going on from {checkpoint.folder} in its place", file=sys.stderr, flush=True)
            return checkpoint
        damaged.append(f"{checkpoint.folder} is damaged: {wrong}")
    with ranks.guard():
        if damaged:
            remedy = "choose another trainer.default_local_dir, or trainer.overwrite=true"
            raise ValueError(f"{'; '.join(damaged)}: {remedy}")
    return None


def begins_anew(loaded: Iterable[str], evaluates: bool = False) -> Iterator[str]:
    """Yield what starts again because `checkpoint.load_contents` leaves it out."""
    parts = ("model",) if evaluates else tuple(_ANEW)
    yield from (_ANEW[part] for part in parts if part not in loaded)
