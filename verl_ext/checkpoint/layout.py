"""The files of a run's folder: its checkpoints, whether each is whole, and its lock.

    run.lock                  who writes here: "process 4711 on node-3 since 2026-03-01 …"
    global_step_N/            a whole checkpoint: it takes this name when all of it is on the disk
        manifest.json           step, what the run was made with, size and checksum of every other file
        state/ extra.json       model and optimizer, schedule (verl_ext.checkpoint.state)
        huggingface/            config and tokenizer, weights with `hf_model` (verl_ext.checkpoint.export)
    global_step_N.partial/    being written, or left by a run that was killed
    global_step_N.set_aside/  of a step after the one that was resumed

Checkpoints of verl's own form have no manifest.json: one counts as whole if the files of every rank are there.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import xxhash

from verl_ext.files import checksum, is_inside, sync, write_json

MANIFEST = "manifest.json"
EXPORT, EXPORT_MARKER = "huggingface", "export.json"  # the second says of a folder that `verl-ext export` wrote it
TRACKER = "latest_checkpointed_iteration.txt"
PARTIAL, SET_ASIDE = ".partial", ".set_aside"
RUN_LOCK = "run.lock"
REPORT, EVALUATION, RUN_IDS = "data_report.json", "evaluation.json", "run_ids.json"
METRICS, SPIKES, ANSWERS, RUN = "metrics.jsonl", "spikes.jsonl", "answers.jsonl", "run.json"
FLIGHT_RECORDER = "flight_recorder"
FINAL_MEMORY, MEMORY_SETTINGS = "final_memory_checkpoint.pt", "final_memory_checkpoint.json"
# A folder that holds these alone is no run to keep: one that was killed before its first checkpoint begins anew.
NOTES = (
    *(REPORT, EVALUATION, RUN, RUN_IDS, FLIGHT_RECORDER),
    *(f"{name}{ending}" for name in (METRICS, SPIKES, ANSWERS) for ending in ("", ".before_restart")),
)
_RESULTS = (TRACKER, FINAL_MEMORY, MEMORY_SETTINGS)
RESUMABLE = ("model", "optimizer", "extra")  # the contents that a resume needs
_FORMAT = 1
_locked: list[TextIO] = []  # the open lock files of this process, whose locks would end with them
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_VERL_KINDS = ("model", "optim", "extra_state")  # the files that each rank saves in verl's own form
_FILE_OF_RANK = re.compile(r"(?:__(\d+)_\d+\.distcp|_rank_(\d+)\.pt)$")


class Damaged(ValueError):
    """A checkpoint that is not as it was written; the message says in a few words what differs."""


@dataclass(frozen=True)
class FileFacts:
    """The size and the checksum of a file."""

    bytes: int
    xxh3_128: str

    @classmethod
    def from_file(cls, path: Path) -> "FileFacts":
        """Read the whole file."""
        return cls(path.stat().st_size, checksum(path))


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    Attributes:
        step: the optimizer steps that the checkpoint has seen.
        ranks: how many ranks wrote it.
        contents: those of `checkpoint.save_contents` that it holds.
        run_state: `RunState.state_dict()`; the file calls it "plan".
        elastic: whether any number of ranks reads it.
        files: by path below the folder.
    """

    step: int
    ranks: int
    contents: tuple[str, ...]
    run_state: dict[str, Any]
    elastic: bool
    files: dict[str, FileFacts]

    def write(self, folder: Path) -> None:
        """Write manifest.json into a checkpoint's folder."""
        content = {"format": _FORMAT, **asdict(self)}
        content["plan"] = content.pop("run_state")
        write_json(folder / MANIFEST, {**content, "checksum": _checksum(content)})

    @classmethod
    def from_folder(cls, folder: Path) -> "Manifest | None":
        """Read the manifest of a checkpoint; None for one of verl's own form, which has none.

        Raises:
            Damaged: the file cannot be read, or is not as it was written.
        """
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            is_whole = content.pop("checksum") == _checksum(content)
            if is_whole and content["format"] != _FORMAT:
                raise Damaged(f"its {MANIFEST} is of format {content['format']}, and this version reads {_FORMAT}")
            manifest = cls(
                step=int(content["step"]),
                ranks=int(content["ranks"]),
                contents=tuple(map(str, content["contents"])),
                run_state=dict(content["plan"]),
                elastic=bool(content["elastic"]),
                files={name: FileFacts(**facts) for name, facts in content["files"].items()},
            )
        except Damaged:
            raise
        except (OSError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
            raise Damaged(f"its {MANIFEST} cannot be read") from error
        if not is_whole:
            raise Damaged(f"its {MANIFEST} is not as it was written")
        return manifest


def _checksum(content: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(content))  # tuples become the lists that are read back
    return xxhash.xxh3_128_hexdigest(json.dumps(plain, sort_keys=True).encode())


def files_of_rank(folder: Path, rank: int) -> dict[str, FileFacts]:
    """Return the files that a rank wrote below a folder, each synced; those without a rank's number are rank 0's."""
    found = {}
    for path in sorted(folder.rglob("*")):
        match = _FILE_OF_RANK.search(path.name)
        if path.is_file() and int(match[1] or match[2] if match else 0) == rank:
            sync(path)
            found[path.relative_to(folder).as_posix()] = FileFacts.from_file(path)
    return found


def saved_folders(folder: Path) -> list[Path]:
    """Return the checkpoint folders below ``folder``, the oldest step first."""
    return sorted((path for path in folder.glob("global_step_*") if _STEP_FOLDER.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint's folder is named after; ValueError for other names."""
    match = _STEP_FOLDER.search(checkpoint.name)
    if match is None:
        raise ValueError(f"trainer.resume_from_path must be an existing global_step_N folder; got {checkpoint}")
    return int(match[1])


def tracked_step(folder: Path) -> int | None:
    """Return the step that verl's tracker file names, None without one."""
    try:
        return int((folder / TRACKER).read_text().strip())
    except (OSError, ValueError):
        return None


def damage(checkpoint: Path, needed: Sequence[str] = RESUMABLE) -> str | None:
    """Return how a checkpoint fails to be whole, judged by names and sizes; None if it is whole.

    Args:
        checkpoint: its folder.
        needed: the contents that it must have.
    """
    try:
        manifest = Manifest.from_folder(checkpoint)
    except Damaged as error:
        return str(error)
    if manifest is None:
        return None if _ranks_of_verl(checkpoint) else "it lacks model, optimizer or extra of a rank"
    named = _STEP_FOLDER.search(checkpoint.name)
    if named and manifest.step != int(named[1]):
        return f"its {MANIFEST} is of step {manifest.step}"
    for name, facts in manifest.files.items():
        try:
            if not is_inside(checkpoint / name, checkpoint):
                return f"its {MANIFEST} names files of other folders"
            size = (checkpoint / name).stat().st_size
        except (OSError, ValueError):  # a ValueError for a name with a null byte in it
            return f"it has no {name}"
        if size != facts.bytes:
            return f"its {name} has {size:,} bytes and had {facts.bytes:,}"
    if missing := [name for name in needed if name not in manifest.contents]:
        return f"it was saved without {', '.join(missing)} (checkpoint.save_contents)"
    return None


def changed_file(checkpoint: Path, rank: int, ranks: int, needed: Sequence[str] = RESUMABLE) -> str | None:
    """Return :func:`damage`, judged by checksums too: every rank reads its share of the files."""
    if wrong := damage(checkpoint, needed):
        return wrong
    manifest = Manifest.from_folder(checkpoint)
    for name, facts in sorted(manifest.files.items() if manifest else ())[rank::ranks]:
        try:
            found = FileFacts.from_file(checkpoint / name)
        except OSError as error:
            return f"its {name} cannot be read ({error.strerror})"
        if found != facts:
            return f"its {name} is not as it was written (xxh3_128 {found.xxh3_128}, was {facts.xxh3_128})"
    return None


def resumable_ranks(checkpoint: Path) -> int | None:
    """Return how many ranks a run must have to resume a whole checkpoint; None: any number."""
    manifest = Manifest.from_folder(checkpoint)
    if manifest is None:
        return _ranks_of_verl(checkpoint)
    return None if manifest.elastic else manifest.ranks


def saved_run_state(checkpoint: Path) -> dict[str, Any]:
    """Return the `RunState` of a checkpoint; empty if verl's trainer wrote it."""
    if manifest := Manifest.from_folder(checkpoint):
        return manifest.run_state
    path = checkpoint / "data_0.pt"  # of versions before the manifest
    if not path.is_file():
        return {}
    import torch  # heavy: not for a program that looks for checkpoints alone

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever the bytes lead it to
        raise ValueError(f"{path} must be the state of a run of this project; it cannot be read as one") from error


def whole_checkpoints(folder: Path) -> tuple[list[Path], dict[Path, str]]:
    """Return the checkpoints that `trainer.resume_mode=auto` may use, and why newer ones may not be used.

    The newest comes first. Nothing but verl's tracker says that a checkpoint of verl's form is whole: one of a later
    step than the tracker's does not count.
    """
    whole: list[Path] = []
    wrong: dict[Path, str] = {}
    tracked = tracked_step(folder)
    for checkpoint in reversed(saved_folders(folder)):
        is_verls = not (checkpoint / MANIFEST).is_file()
        reason = damage(checkpoint)
        if reason is None and is_verls and (tracked is None or step_of(checkpoint) > tracked):
            reason = f"{TRACKER} does not name it"
        if reason is None:
            whole.append(checkpoint)
        elif not whole:
            wrong[checkpoint] = reason
    return whole, wrong


def _ranks_of_verl(checkpoint: Path) -> int | None:
    """Return how many ranks saved a checkpoint of verl's own form; None if one of their files is missing.

    Without its `extra_state` a resume would begin the learning-rate schedule anew, without `optim` the moments.
    """
    for shard in sorted(checkpoint.glob("model_world_size_*_rank_0.pt")):
        ranks = int(shard.name.split("_")[3])
        names = (f"{kind}_world_size_{ranks}_rank_{r}.pt" for kind in _VERL_KINDS for r in range(ranks))
        if all((checkpoint / name).is_file() for name in names):
            return ranks
    return None


def remove_unfinished(folder: Path) -> None:
    """Remove the partial files and folders of runs that were killed."""
    for path in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_run_files(folder: Path) -> None:
    """Remove what an earlier run wrote, as `trainer.overwrite=true` asks; other files stay."""
    ours = re.compile(rf"{_STEP_FOLDER.pattern}({re.escape(PARTIAL)}|{re.escape(SET_ASIDE)})?")
    checkpoints = (path for path in folder.glob("global_step_*") if ours.fullmatch(path.name))
    for path in (*checkpoints, *(folder / name for name in (*NOTES, *_RESULTS))):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def refuse_locked(folder: Path) -> None:
    """Refuse a folder that a run on this or another host is writing in; leave everything as it is.

    Raises:
        ValueError: the lock is held; the message says by which process.
    """
    with suppress(FileNotFoundError), (folder / RUN_LOCK).open() as file:
        _lock(file, fcntl.LOCK_SH)


def lock_folder(folder: Path) -> Callable[[], None]:
    """Lock ``folder``, made if it is missing, while this process lives; return what releases the lock before.

    The lock is the POSIX record lock on run.lock, which the kernel releases however its process ends, also over NFS.
    filelock's `flock` would be inherited by loader processes, which a killed rank leaves behind for a while. A process
    loses a record lock when it closes any of its file objects of that file. On a file system without locks nothing is
    locked, and a note says so.

    Raises:
        ValueError: as :func:`refuse_locked`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN_LOCK
    file = path.open("a+")  # the words of its holder must outlive an attempt
    try:
        if not _lock(file, fcntl.LOCK_EX):
            print(f"note: {folder} cannot be locked (its file system has no locks)", file=sys.stderr)
        if os.fstat(file.fileno()).st_nlink == 0:  # The run before ended meanwhile, and the next locks another file.
            file.close()
            return lock_folder(folder)
        file.truncate(0)
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}")
        file.flush()
    except BaseException:
        file.close()
        raise
    _locked.append(file)

    def release() -> None:
        path.unlink(missing_ok=True)  # while it is locked: afterwards it may be another run's
        file.close()
        _locked.remove(file)

    return release


def _lock(file: TextIO, kind: int) -> bool:
    """Lock an open run.lock; False if its file system has no locks, ValueError if another process has it."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            raise ValueError(
                "trainer.default_local_dir must be a folder that no other run is writing in; got "
                f"{Path(file.name).parent}, which is held by {file.read() or 'another process'}: end that run, or "
                "choose another folder"
            ) from None
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            return False
        raise
    return True
