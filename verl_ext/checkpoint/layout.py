"""The files in a run's folder: checkpoints, their completeness, and the lock.

    run.lock                  the process that writes here: "process 4711 on node-3 since 2026-03-01 …"
    global_step_N/            a whole checkpoint, which gets this name when all its files are on the disk
        manifest.json           the step, the run's facts, the hooks' states, the size and checksum of every other file
        state/ extra.json       model and optimizer, schedule (verl_ext.checkpoint.state)
        untrained.json          if any, tensors that the model class does not load (verl_ext.checkpoint.untrained)
        huggingface/            config and tokenizer, weights with `hf_model` (verl_ext.checkpoint.export)
    best                      a link to the checkpoint with the best value of `checkpoint.keep_best`
    global_step_N.partial/    a checkpoint in progress, or left by a killed run
    global_step_N.set_aside/  a checkpoint of a step after the resumed one

A checkpoint of stock verl has no manifest.json and is refused.
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
from verl_ext.options import must

MANIFEST = "manifest.json"
EXPORT, EXPORT_MARKER = "huggingface", "export.json"  # the latter marks a folder that `verl-ext export` wrote
TRACKER = "latest_checkpointed_iteration.txt"
PARTIAL, SET_ASIDE = ".partial", ".set_aside"
RUN_LOCK, BEST = "run.lock", "best"
REPORT, EVALUATION, RUN_IDS = "data_report.json", "evaluation.json", "run_ids.json"
METRICS, SPIKES, ANSWERS, RUN = "metrics.jsonl", "spikes.jsonl", "answers.jsonl", "run.json"
EXPERTS = "experts.jsonl"
RUN_FILE = "run.yaml"  # starts the run again: `verl-ext train run.yaml`
FLIGHT_RECORDER, REFERENCE = "flight_recorder", "reference"
# A folder with only these files holds no run to keep; a run killed before its first checkpoint starts again.
NOTES = (
    *(REPORT, EVALUATION, RUN, RUN_FILE, RUN_IDS, FLIGHT_RECORDER, REFERENCE),
    *(f"{name}{ending}" for name in (METRICS, SPIKES, ANSWERS, EXPERTS) for ending in ("", ".before_restart")),
)
_RESULTS = (TRACKER, BEST)
RESUMABLE = ("model", "optimizer", "extra")  # the contents that a resume needs
_FORMAT = 2
# What stood among a run's facts, with defaults, by the hook that has it now.
_STATES_IN_FORMAT_1: dict[str, dict[str, Any]] = {
    "ProgressHook": {"total_tokens": 0, "total_target_tokens": 0},
    "SpikeHook": {"spikes": 0, "recent_losses": []},
    "SkippedStepsHook": {"skipped_steps": 0, "skipped_in_a_row": 0},
    "HighLossHook": {"high_in_a_row": 0},
    "WatchedHook": {"watched": {}},
}
_locked: list[TextIO] = []  # the open lock files of this process, whose locks end when they are closed
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_FILE_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp$")


class Damaged(ValueError):
    """A checkpoint that is not as written; the message names the difference."""


@dataclass(frozen=True)
class FileFacts:
    """The size and the checksum of a file."""

    bytes: int
    xxh3_128: str

    @classmethod
    def from_file(cls, path: Path) -> "FileFacts":
        """Read a whole file and return its size and checksum."""
        return cls(path.stat().st_size, checksum(path))


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    Attributes:
        step: the optimizer steps that the checkpoint has seen.
        ranks: the number of ranks that wrote it.
        contents: the entries of `checkpoint.save_contents` that it holds.
        facts: `Identity.saved()`.
        hooks: the states of the hooks, by the names of their classes.
        files: the facts of each file, by path below the folder.
    """

    step: int
    ranks: int
    contents: tuple[str, ...]
    facts: dict[str, Any]
    hooks: dict[str, dict[str, Any]]
    files: dict[str, FileFacts]

    def write(self, folder: Path) -> None:
        """Write manifest.json into a checkpoint's folder."""
        content = {"format": _FORMAT, **asdict(self)}
        write_json(folder / MANIFEST, {**content, "checksum": _checksum(content)})

    @classmethod
    def from_folder(cls, folder: Path) -> "Manifest":
        """Read the manifest of a checkpoint.

        Raises:
            Damaged: If the file is missing, cannot be read, or has changed since it was written.
            ValueError: If the checkpoint is in the form of stock verl.
        """
        path = folder / MANIFEST
        # Checkpoints in verl's own form are not damaged: `resume_mode=auto` must not pass over them in silence.
        if any(folder.glob("model_world_size_*_rank_*.pt")):
            raise ValueError(
                f"a checkpoint must hold its tensors in state/; {folder} is in the form of stock verl, which "
                "cannot be resumed: start from its weights in another trainer.default_local_dir, by `python -m "
                f"verl.model_merger merge --backend fsdp --local_dir {folder} --target_dir DIR` and model.path=DIR"
            )
        if not path.is_file():
            raise Damaged(f"it has no {MANIFEST}")
        try:
            # A damaged file may hold anything, so any error of its reading means damage.
            content = json.loads(path.read_text(encoding="utf-8"))
            is_whole = content.pop("checksum") == _checksum(content)
            if content["format"] == 1:
                _to_format_2(content)
            elif is_whole and content["format"] != _FORMAT:
                raise Damaged(f"its {MANIFEST} is of format {content['format']}, and this version reads {_FORMAT}")
            manifest = cls(
                step=int(content["step"]),
                ranks=int(content["ranks"]),
                contents=tuple(map(str, content["contents"])),
                facts=dict(content["facts"]),
                hooks={name: dict(state) for name, state in content["hooks"].items()},
                files={name: FileFacts(**facts) for name, facts in content["files"].items()},
            )
        except Damaged:
            raise
        except (OSError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
            raise Damaged(f"its {MANIFEST} cannot be read") from error
        if not is_whole:
            raise Damaged(f"its {MANIFEST} is not as it was written")
        return manifest


def _to_format_2(content: dict[str, Any]) -> None:
    """Give hooks the states that stood among the facts."""
    facts = content["facts"] = content.pop("plan")
    content["hooks"] = {
        hook: {name: facts.pop(name, default) for name, default in state.items()}
        for hook, state in _STATES_IN_FORMAT_1.items()
    }


def _checksum(content: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(content))  # tuples become lists, as when they are read back
    return xxhash.xxh3_128_hexdigest(json.dumps(plain, sort_keys=True).encode())


def files_of_rank(folder: Path, rank: int) -> dict[str, FileFacts]:
    """Sync a rank's files, rank 0 the unnumbered ones; return their facts."""
    found = {}
    for path in sorted(folder.rglob("*")):
        match = _FILE_OF_RANK.search(path.name)
        if path.is_file() and int(match[1] if match else 0) == rank:
            sync(path)
            found[path.relative_to(folder).as_posix()] = FileFacts.from_file(path)
    return found


def saved_folders(folder: Path) -> list[Path]:
    """Return the checkpoint folders in ``folder``, the earliest step first."""
    return sorted((path for path in folder.glob("global_step_*") if _STEP_FOLDER.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint folder's name, or raise ValueError."""
    match = _STEP_FOLDER.search(checkpoint.name)
    if match is None:
        raise ValueError(must("trainer.resume_from_path", "be an existing global_step_N folder", checkpoint))
    return int(match[1])


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder and its manifest, which is read once."""

    folder: Path
    manifest: Manifest

    @classmethod
    def read(cls, folder: Path, needed: Sequence[str] = RESUMABLE) -> "Checkpoint":
        """Read the manifest, and compare the names and sizes of the files with it.

        needed: the contents that the checkpoint must have. Raises Damaged for a difference, and ValueError if it
        is in the form of stock verl.
        """
        manifest = Manifest.from_folder(folder)
        named = _STEP_FOLDER.search(folder.name)
        if named and manifest.step != int(named[1]):
            raise Damaged(f"its {MANIFEST} is of step {manifest.step}")
        for name, facts in manifest.files.items():
            try:
                size = (folder / name).stat().st_size if is_inside(folder / name, folder) else None
            except (OSError, ValueError):  # ValueError for a name with a null byte
                raise Damaged(f"it has no {name}") from None
            if size is None:
                raise Damaged(f"its {MANIFEST} names files of other folders")
            if size != facts.bytes:
                raise Damaged(f"its {name} has {size:,} bytes and had {facts.bytes:,}")
        if missing := [name for name in needed if name not in manifest.contents]:
            raise Damaged(f"it was saved without {', '.join(missing)} (checkpoint.save_contents)")
        return cls(folder, manifest)

    def changed_file(self, rank: int = 0, ranks: int = 1) -> str | None:
        """Describe the first file with another checksum; None if all are whole. Ranks share the work."""
        for name, facts in sorted(self.manifest.files.items())[rank::ranks]:
            try:
                present = FileFacts.from_file(self.folder / name)
            except OSError as error:
                return f"its {name} cannot be read ({error.strerror})"
            if present != facts:
                return f"its {name} is not as it was written (xxh3_128 {present.xxh3_128}, was {facts.xxh3_128})"
        return None


def whole_checkpoints(folder: Path) -> tuple[list[Checkpoint], dict[Path, str]]:
    """Return the whole checkpoints, newest first, and why newer ones are unusable.

    Raises ValueError if a newer one is in the form of stock verl.
    """
    whole: list[Checkpoint] = []
    wrong: dict[Path, str] = {}
    for path in reversed(saved_folders(folder)):
        if whole and not (path / MANIFEST).is_file():
            continue  # a resume would not reach it
        try:
            whole.append(Checkpoint.read(path))
        except Damaged as error:
            if not whole:
                wrong[path] = str(error)
    return whole, wrong


def is_unfinished(name: str, files: Sequence[str] = ()) -> bool:
    """Tell whether a run whose hooks write `files` gives its partial files or folders this name."""
    names = "|".join(map(re.escape, (*NOTES, *_RESULTS, *files)))  # as `save` and `atomic_write` name them
    return re.fullmatch(rf"({_STEP_FOLDER.pattern}|({names})\..+-\d+){re.escape(PARTIAL)}", name) is not None


def remove_unfinished(folder: Path, files: Sequence[str] = ()) -> None:
    """Remove the partial files and folders of killed runs, also of the files that hooks write."""
    for path in folder.glob(f"*{PARTIAL}"):
        if is_unfinished(path.name, files) and not path.name.startswith(EVALUATION):  # an evaluation may be writing it
            _remove(path)


def remove_run_files(folder: Path, files: Sequence[str] = ()) -> None:
    """Remove the files of an earlier run and its hooks for `trainer.overwrite=true`; keep other files."""
    ours = re.compile(rf"{_STEP_FOLDER.pattern}({re.escape(PARTIAL)}|{re.escape(SET_ASIDE)})?")
    checkpoints = (path for path in folder.glob("global_step_*") if ours.fullmatch(path.name))
    for path in (*checkpoints, *(folder / name for name in (*NOTES, *_RESULTS, *files))):
        if path.name != BEST or path.is_symlink():  # a folder of that name is the user's
            _remove(path)


def _remove(path: Path) -> None:
    is_folder = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)


def refuse_locked(folder: Path) -> None:
    """Refuse a folder that a run on any host holds; change nothing.

    Raises:
        ValueError: If the lock is held; the message names the process.
    """
    with suppress(FileNotFoundError), (folder / RUN_LOCK).open() as file:
        _lock(file, fcntl.LOCK_SH)


def is_locked(folder: Path) -> bool:
    """Tell whether a run is writing in a folder."""
    try:
        with (folder / RUN_LOCK).open() as file:
            return not _lock(file, fcntl.LOCK_SH)  # without file locks, a file that is left tells it
    except OSError:  # there is no such file
        return False
    except ValueError:
        return True


def lock_folder(folder: Path) -> Callable[[], None]:
    """Lock ``folder``, created if missing; return a function that unlocks it.

    The lock is a POSIX record lock on run.lock, which the kernel releases however the process ends, also over NFS.
    Loader workers, which a killed rank leaves behind for a while, would inherit filelock's `flock`. A process loses a
    record lock when it closes any of its file objects of that file. On a file system without locks, nothing is locked
    and a note is printed.

    Raises:
        ValueError: Like :func:`refuse_locked`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN_LOCK
    file = path.open("a+")  # a failed attempt must not erase the holder's words
    try:
        if not _lock(file, fcntl.LOCK_EX):
            print(f"note: {folder} cannot be locked (its file system has no locks)", file=sys.stderr)
        if os.fstat(file.fileno()).st_nlink == 0:  # The previous run ended meanwhile and removed this file.
            file.close()
            return lock_folder(folder)
        # A refused run prints these words, so that its user knows which process to end.
        file.truncate(0)
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}")
        file.flush()
    except BaseException:
        file.close()
        raise
    # The file object must stay open as long as the lock.
    _locked.append(file)

    def release() -> None:
        path.unlink(missing_ok=True)  # while it is locked, because afterwards it may be another run's
        file.close()
        _locked.remove(file)

    return release


def _lock(file: TextIO, kind: int) -> bool:
    """Lock run.lock, or raise ValueError; return False without file locks."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            held = f"held by {file.read() or 'another process'}: end that run, or choose another folder"
            got, needed = f"{Path(file.name).parent}, which is {held}", "be a folder that no other run is writing in"
            raise ValueError(must("trainer.default_local_dir", needed, got)) from None
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            return False
        raise
    return True
