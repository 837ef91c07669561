"""Checkpoints on disk: the files of one, whether it is whole, and which one a run resumes from.

    global_step_N/              whole, as it is renamed to this name when all of it is on the disk
        manifest.json         step, what the run was made with, and size and checksum of every other file
        state/ extra.json       model and optimizer, schedule (verl_ext.engines.saving)
        huggingface/            config and tokenizer, weights with `hf_model`
    global_step_N.partial/      being written, or left by a run that was killed
    global_step_N.set_aside/    of steps after the one that was resumed

Checkpoints of verl's own form have no manifest.json: they count as whole when every rank's files are there.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from verl_ext.files import checksum, is_inside, sync, write_json

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
PARTIAL, SET_ASIDE = ".partial", ".set_aside"
RESUMABLE = ("model", "optimizer", "extra")  # what a checkpoint must hold to be resumed
_FORMAT = 1
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_UNFINISHED = re.compile(rf"global_step_\d+({re.escape(PARTIAL)}|{re.escape(SET_ASIDE)})")
_VERL_KINDS = ("model", "optim", "extra_state")  # what each rank must have saved to be resumed
_OF_RANK = re.compile(r"(?:__(\d+)_\d+\.distcp|_rank_(\d+)\.pt)$")


class Damaged(ValueError):
    """A checkpoint is not as it was written; the message says in a few words what differs."""


@dataclass(frozen=True)
class FileFacts:
    """Size and checksum of a file."""

    bytes: int
    xxh3_128: str

    @classmethod
    def of(cls, path: Path) -> "FileFacts":
        """Reads the whole file."""
        return cls(path.stat().st_size, checksum(path))


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says.

    Attributes:
        step: optimizer steps that the checkpoint has seen.
        ranks: how many wrote it.
        contents: those of `checkpoint.save_contents` that it holds.
        plan: what it was made with and how far the run was, `RunState.state_dict()`.
        elastic: whether any number of ranks reads it.
        files: by path below the folder.
    """

    step: int
    ranks: int
    contents: tuple[str, ...]
    plan: dict[str, Any]
    elastic: bool
    files: dict[str, FileFacts]

    def write(self, folder: Path) -> None:
        content = {"format": _FORMAT, **vars(self), "files": {name: vars(file) for name, file in self.files.items()}}
        write_json(folder / MANIFEST, {**content, "checksum": _checksum(content)})

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """Of a checkpoint's folder; None for one that verl wrote.

        Raises:
            Damaged: the file cannot be read, or is not as it was written.
        """
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            written, form = content.pop("checksum"), content["format"]
            whole = written == _checksum(content)
        except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
            raise Damaged(f"its {MANIFEST} cannot be read") from error
        if not whole:
            raise Damaged(f"its {MANIFEST} is not as it was written")
        if form != _FORMAT:
            raise Damaged(f"its {MANIFEST} is of format {form}, and this version reads {_FORMAT}")
        try:
            del content["format"]
            files = {name: FileFacts(**facts) for name, facts in content["files"].items()}
            manifest = cls(**{**content, "files": files, "contents": tuple(map(str, content["contents"]))})
        except (LookupError, AttributeError, TypeError) as error:
            raise Damaged(f"its {MANIFEST} lacks what a checkpoint's has") from error
        kinds = {"step": int, "ranks": int, "plan": dict, "elastic": bool}
        if any(type(getattr(manifest, name)) is not kind for name, kind in kinds.items()):
            raise Damaged(f"its {MANIFEST} is of other kinds than a checkpoint's")
        if any(Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name for name in files):
            raise Damaged(f"its {MANIFEST} names files of other folders")
        return manifest


def _checksum(content: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(content))  # tuples as the lists that are read back
    return xxhash.xxh3_128_hexdigest(json.dumps(plain, sort_keys=True).encode())


def files_of(folder: Path, rank: int) -> dict[str, FileFacts]:
    """The files below a folder that a rank wrote, each on the disk; rank 0 wrote those without a rank's number."""
    found = {}
    for path in sorted(folder.rglob("*")):
        match = _OF_RANK.search(path.name)
        if path.is_file() and int(match[1] or match[2] if match else 0) == rank:
            sync(path)
            found[path.relative_to(folder).as_posix()] = FileFacts.of(path)
    return found


def saved_folders(folder: Path) -> list[Path]:
    """Checkpoint folders below ``folder``, oldest step first."""
    return sorted((path for path in folder.glob("global_step_*") if _STEP_FOLDER.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's folder is named after; ValueError for other names."""
    match = _STEP_FOLDER.search(checkpoint.name)
    if match is None:
        raise ValueError(f"trainer.resume_from_path must be an existing global_step_N folder; got {checkpoint}")
    return int(match[1])


def unfinished_folders(folder: Path) -> list[Path]:
    """Folders of checkpoints that a killed run was writing, or that were set aside."""
    return [path for path in folder.glob("global_step_*") if _UNFINISHED.fullmatch(path.name)]


def tracked_step(folder: Path) -> int | None:
    """The step that verl's tracker file names, None without one."""
    try:
        return int((folder / TRACKER).read_text().strip())
    except (OSError, ValueError):
        return None


def damage(checkpoint: Path, needed: Sequence[str] = RESUMABLE) -> str | None:
    """What is wrong with a checkpoint that needs these contents, by names and sizes alone; None: nothing."""
    try:
        manifest = Manifest.read(checkpoint)
    except Damaged as error:
        return str(error)
    if manifest is None:
        return None if _verl_ranks(checkpoint) else "it lacks model, optimizer or extra of a rank"
    named = _STEP_FOLDER.search(checkpoint.name)
    if named and manifest.step != int(named[1]):
        return f"its {MANIFEST} is of step {manifest.step}"
    if missing := [name for name in needed if name not in manifest.contents]:
        return f"it was saved without {', '.join(missing)} (checkpoint.save_contents)"
    for name, facts in manifest.files.items():
        if not is_inside(checkpoint / name, checkpoint):
            return f"its {name} is a link out of the folder"
        try:
            size = (checkpoint / name).stat().st_size
        except OSError:
            return f"it has no {name}"
        if size != facts.bytes:
            return f"its {name} has {size:,} bytes and had {facts.bytes:,}"
    return None


def changed_file(checkpoint: Path, rank: int, ranks: int, needed: Sequence[str] = RESUMABLE) -> str | None:
    """:func:`damage` by checksums: every rank reads its share of the files."""
    if wrong := damage(checkpoint, needed):
        return wrong
    manifest = Manifest.read(checkpoint)
    for name, facts in sorted(manifest.files.items() if manifest else ())[rank::ranks]:
        try:
            found = FileFacts.of(checkpoint / name)
        except OSError as error:
            return f"its {name} cannot be read ({error.strerror})"
        if found != facts:
            return f"its {name} is not as it was written (xxh3_128 {found.xxh3_128}, was {facts.xxh3_128})"
    return None


def resumable_ranks(checkpoint: Path) -> int | None:
    """How many ranks a run must have to resume a whole checkpoint; None: any number."""
    manifest = Manifest.read(checkpoint)
    if manifest is None:
        return _verl_ranks(checkpoint)
    return None if manifest.elastic else manifest.ranks


def saved_plan(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint was made with; empty where verl's trainer wrote it."""
    if manifest := Manifest.read(checkpoint):
        return manifest.plan
    path = checkpoint / "data_0.pt"
    if not path.is_file():
        return {}
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever the bytes lead it to
        raise ValueError(f"{path} must be the plan of a run of this project; it cannot be read as one") from error


def whole_checkpoints(folder: Path) -> tuple[list[Path], dict[Path, str]]:
    """(checkpoints that `trainer.resume_mode=auto` may resume from, the newest first; what is wrong with newer ones).

    One of verl's form counts up to the step of its tracker alone: nothing else says that it is whole.
    """
    whole: list[Path] = []
    wrong: dict[Path, str] = {}
    tracked = tracked_step(folder)
    for checkpoint in reversed(saved_folders(folder)):
        of_verl = not (checkpoint / MANIFEST).is_file()
        reason = damage(checkpoint)
        if reason is None and of_verl and (tracked is None or step_of(checkpoint) > tracked):
            reason = f"{TRACKER} does not name it"
        if reason is None:
            whole.append(checkpoint)
        elif not whole:
            wrong[checkpoint] = reason
    return whole, wrong


def _verl_ranks(checkpoint: Path) -> int | None:
    """How many ranks saved a checkpoint of verl's form; None when one of their files is missing.

    Without its `extra` file a resume would start the learning-rate schedule anew, without `optim` the moments.
    """
    for shard in sorted(checkpoint.glob("model_world_size_*_rank_0.pt")):
        ranks = int(shard.name.split("_")[3])
        names: Iterable[str] = (f"{kind}_world_size_{ranks}_rank_{r}.pt" for kind in _VERL_KINDS for r in range(ranks))
        if all((checkpoint / name).is_file() for name in names):
            return ranks
    return None
