"""Cache facts of data files and detect their changes during a run.

checksum of a file     xxh3_128 of its content; of one above 1 GiB, of the checksums of its blocks of 1 GiB
recorded               in a folder's state.json when it was tokenized; trusted unless the file was written to
                       after state.json
anything else          read once, each rank a share of the blocks, and kept in the cache of `datasets`
"""

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.ranks import DataFile, Ranks
from verl_ext.files import (
    BLOCK,
    cached_folder,
    checksum,
    combine_checksums,
    default_root,
    file_state,
    fingerprint,
    is_complete,
)
from verl_ext.options import reason_of
from verl_ext.progress import terminal_bar

CONTENT = "the content of the files in data.train_dir"  # the key of `DataFiles.digest` in a checkpoint
_FACTS = "facts.npz"

Arrays = Mapping[str, NDArray[Any]]


def found_once(name: str, ranks: Ranks, find: Callable[[], Arrays], root: Path | None = None) -> Arrays:
    """Return the arrays of `find`, which all ranks call together, cached on disk under `name`.

    A cache that cannot be written or read only costs time. root: the folder of the cache; None: that of `datasets`.
    """
    root, kept = default_root("verl_ext_facts", None) if root is None else root, None
    if ranks.rank == 0 and is_complete(root / name):
        try:
            with np.load(root / name / _FACTS, allow_pickle=False) as arrays:
                kept = dict(arrays)
        except Exception:  # whatever is wrong with the file, the data can be read instead
            shutil.rmtree(root / name, ignore_errors=True)
    kept = ranks.broadcast(kept)
    if kept is not None:
        return kept
    found = find()
    if ranks.rank == 0:
        with contextlib.suppress(ValueError, NotImplementedError):  # NotImplementedError if a file system has no locks
            cached_folder(root, name, lambda folder: np.savez(folder / _FACTS, **found))  # type: ignore[arg-type]
    return found


class DataFiles:
    """The files that a dataset reads during a run, in the state that they have now.

    Args:
        files: the files in the order in which their documents are read.
        key: the config key that errors name.

    Raises:
        ValueError: if a file cannot be read.
    """

    def __init__(self, files: Sequence[DataFile], key: str) -> None:
        self._files, self._key = list(files), key
        self._states = self._current()

    def _current(self) -> list[tuple[str, int, int]]:
        try:
            return [file_state(file.path) for file in self._files]
        except OSError as error:
            raise ValueError(
                f"{self._key} must hold files that can be read; {error.filename}: {reason_of(error)}"
            ) from error

    def changed(self, sizes_alone: bool = False) -> str | None:
        """Return in a few words which file has changed, None if none has. No content is read."""
        for file, before in zip(self._files, self._states, strict=True):
            try:
                now = file_state(file.path)
            except OSError as error:
                return f"{file.path}: {reason_of(error)}"
            if now[1] != before[1]:
                return f"{file.path} has {now[1]:,} bytes and had {before[1]:,}"
            if now != before and not sizes_alone:
                return f"{file.path} was written to, or replaced"
        return None

    def digest(self, ranks: Ranks) -> str:
        """Return a digest (32 hex digits) of all files' content; ranks share the reading of files without a checksum.

        This call is collective. Raises ValueError on every rank if a file is not as it was when it was tokenized.
        """
        recorded = [
            file.xxh3_128 if changed_ns <= file.recorded_ns else None
            for file, (_, _, changed_ns) in zip(self._files, self._states, strict=True)
        ]
        checksums = ranks.broadcast(recorded)  # nodes may have copies in other places, with other times
        if unknown := [number for number, known in enumerate(checksums) if known is None]:
            states = [self._states[number] for number in unknown]
            name = f"checksums-{fingerprint(states)}"
            found = found_once(name, ranks, lambda: {"checksums": np.array(_read(states, ranks))})["checksums"]
            for number, now in zip(unknown, found.tolist(), strict=True):
                checksums[number] = now
        with ranks.guard():
            for file, now in zip(self._files, checksums, strict=True):
                if file.xxh3_128 not in (None, now):
                    raise ValueError(
                        f"{self._key} must hold files as they were tokenized; the content of {file.path} has "
                        f"changed since (xxh3_128 {now}, was {file.xxh3_128})"
                    )
        return fingerprint(checksums)

    def verify_content(self, before: str, changed: str, ranks: Ranks) -> None:
        """Hash modified files again; raise ValueError if the digest is no longer `before`.

        This call is collective. changed: the result of :meth:`changed` on one of the ranks.
        """
        message, now = f"{self._key} must not change while it is trained on; {changed}", ""
        with ranks.guard():
            try:
                self._states = self._current()
            except ValueError as error:
                raise ValueError(message) from error
        with contextlib.suppress(ValueError):
            now = self.digest(ranks)
        with ranks.guard():
            if now != before:
                raise ValueError(message)


def _read(files: Sequence[tuple[str, int, int]], ranks: Ranks) -> list[str]:
    """Return the checksums of files by their states; each rank reads its share of their blocks."""
    blocks = [(number, begin) for number, (_, size, _) in enumerate(files) for begin in range(0, max(size, 1), BLOCK)]
    mine: list[str] = []
    own = blocks[ranks.rank :: ranks.size]
    with ranks.guard(), terminal_bar("checksums", ranks.rank == 0, own, unit="GiB") as bar:
        mine = [checksum(files[number][0], begin, BLOCK) for number, begin in bar]
    of_file: list[list[str]] = [[] for _ in files]
    shares = ranks.gather(mine)
    for place, (number, _) in enumerate(blocks):
        of_file[number].append(shares[place % ranks.size][place // ranks.size])
    return [combine_checksums(own) for own in of_file]
