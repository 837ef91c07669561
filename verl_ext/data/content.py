"""What data files hold, as a checksum, and whether they change under a run.

checksum of a file     xxh3_128 of its content; of one above 1 GiB, of the checksums of its blocks of 1 GiB
recorded               in a folder's state.json when it was tokenized; it is taken as long as the file was not
                       written to after state.json
anything else          read once, each rank a share of the blocks; kept in the cache of `datasets` under the files'
                       names, sizes, inodes and times of change
"""

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from verl_ext.data.dataset import DataFile, Ranks
from verl_ext.files import BLOCK, checksum, default_root, joined, write_json
from verl_ext.text.tokenized import digest
from verl_ext.values import reason_of

CONTENT = "the content of the files in data.train_dir"  # what a checkpoint calls `DataFiles.digest`
_CACHE = "verl_ext_checksums"


class _State(NamedTuple):
    """What changes when a file does."""

    bytes: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: str) -> "_State":
        status = os.stat(path)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class DataFiles:
    """The files that a dataset reads while a run goes on, as they are when this is made.

    Args:
        files: in the order in which their documents are read.
        key: the config key that errors name.

    Raises:
        ValueError: a file that is missing, or that has another size than was recorded.
    """

    def __init__(self, files: Sequence[DataFile], key: str) -> None:
        self._files, self._key = {file.path: file for file in files}, key
        self._states = {path: self._state(path) for path in self._files}
        for file in files:
            size = self._states[file.path].bytes
            if file.bytes not in (None, size):
                found = f"{file.path} has {size:,} bytes and had {file.bytes:,}"
                raise ValueError(f"{key} must hold files as they were tokenized; {found}")

    def _state(self, path: str) -> _State:
        try:
            return _State.of(path)
        except OSError as error:
            raise ValueError(f"{self._key} must hold files that can be read; {path}: {reason_of(error)}") from error

    def changed(self) -> str | None:
        """In a few words, the first file that is not as it was; None: nothing has changed. Reads no content."""
        for path, before in self._states.items():
            try:
                now = _State.of(path)
            except OSError as error:
                return f"{path}: {reason_of(error)}"
            if now.bytes != before.bytes:
                return f"{path} has {now.bytes:,} bytes and had {before.bytes:,}"
            if now != before:
                return f"{path} was written to, or replaced"
        return None

    def cut_short(self) -> str | None:
        """In a few words, the first file that has become shorter in its place: a bus error for who reads its map."""
        for path, before in self._states.items():
            with contextlib.suppress(OSError):  # one that is removed stays as it is for its map
                now = _State.of(path)
                if now.inode == before.inode and now.bytes < before.bytes:
                    return f"{path} has {now.bytes:,} bytes and had {before.bytes:,}"
        return None

    def digest(self, ranks: Ranks) -> str:
        """32 hex digits of the content of all files; every rank reads a share of what no checksum is known of.

        Collective. Raises ValueError on every rank for a file that is not as it was tokenized.
        """
        files = list(self._files.values())
        unknown = {
            number: self._states[file.path] for number, file in enumerate(files) if not self._record_holds(file.path)
        }
        unknown = ranks.broadcast(unknown)  # nodes may have copies in other places, with other times
        found: dict[int, str] = {}
        if unknown:
            name = digest([[files[number].path, *state] for number, state in unknown.items()])
            checksums = ranks.broadcast(_kept(name) if ranks.rank == 0 else None)
            if checksums is None or len(checksums) != len(unknown):
                checksums = _read([(files[number].path, state.bytes) for number, state in unknown.items()], ranks)
                if ranks.rank == 0:
                    _keep(name, checksums)
            found = dict(zip(unknown, checksums, strict=True))
        with ranks.guard():
            for number, now in found.items():
                if files[number].xxh3_128 not in (None, now):
                    raise ValueError(
                        f"{self._key} must hold files as they were tokenized; the content of {files[number].path} has "
                        f"changed since (xxh3_128 {now}, was {files[number].xxh3_128})"
                    )
        return digest([found.get(number) or file.xxh3_128 for number, file in enumerate(files)])

    def refuse_other_content(self, before: str, changed: str, ranks: Ranks) -> None:
        """Read files that were written to once more, and go on if their content is what it was.

        Collective. Raises ValueError on every rank where :meth:`digest` is no longer `before`; changed: what
        :meth:`changed` found on one of them.
        """
        message = f"{self._key} must not change while it is trained on; {changed}"
        with ranks.guard():
            try:
                self._states = {path: self._state(path) for path in self._files}
            except ValueError as error:
                raise ValueError(message) from error
        now = ""
        with contextlib.suppress(ValueError):
            now = self.digest(ranks)
        with ranks.guard():
            if now != before:
                raise ValueError(message)

    def _record_holds(self, path: str) -> bool:
        file = self._files[path]
        return file.xxh3_128 is not None and self._states[path].changed_ns <= file.recorded_ns


def _read(files: Sequence[tuple[str, int]], ranks: Ranks) -> list[str]:
    """The checksums of files, given with their sizes; each rank reads its share of their blocks."""
    blocks = [(number, begin) for number, (_, size) in enumerate(files) for begin in range(0, max(size, 1), BLOCK)]
    mine: list[str] = []
    hidden = None if ranks.rank == 0 else True  # None: unless stderr is a terminal
    own = blocks[ranks.rank :: ranks.size]
    with ranks.guard(), tqdm(own, desc="checksums", unit="GiB", delay=3, disable=hidden) as bar:
        mine = [checksum(files[number][0], begin, BLOCK) for number, begin in bar]
    of_file: list[list[str]] = [[] for _ in files]
    shares = ranks.gather(mine)
    for place, (number, _) in enumerate(blocks):
        of_file[number].append(shares[place % ranks.size][place // ranks.size])
    return [joined(own) for own in of_file]


def _kept(name: str) -> list[str] | None:
    with contextlib.suppress(OSError, ValueError):
        values: Any = json.loads((default_root(_CACHE, None) / f"{name}.json").read_text(encoding="utf-8"))
        return [str(value) for value in values] if isinstance(values, list) else None
    return None


def _keep(name: str, checksums: list[str]) -> None:
    with contextlib.suppress(OSError):  # never needed: the files can be read again
        write_json(default_root(_CACHE, None) / f"{name}.json", checksums)
