"""Detect changes of the data files during a run and between runs.

checksum of a file     xxh3_128 of its content; of one above 1 GiB, of the checksums of its blocks of 1 GiB
recorded               in a folder's state.json when it was tokenized; trusted unless the file was written to
                       after state.json
anything else          read once, each rank a share of the blocks, and kept in the cache of `datasets`
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from verl_ext.cache import fingerprint
from verl_ext.data.tokenized.ranks import Ranks, arrays_of_ranks
from verl_ext.files import BLOCK, checksum, combine_checksums, file_state
from verl_ext.options import reason_of
from verl_ext.progress import terminal_bar


class DataFile(NamedTuple):
    """A file that is read during a run."""

    path: str
    xxh3_128: str | None = None  # the checksum that the tokenizer recorded
    recorded_ns: int = 0  # the time of this record


class DataFiles:
    """The files that a dataset reads, in their present state.

    Args:
        files: the files in the order in which their documents are read.
        key: the config key that errors name.

    Raises ValueError if a file cannot be read.
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
        """Return which file has changed, None if none; read no content."""
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
        """Return a digest (32 hex digits) of the content; collective.

        Ranks share the reading of files without a checksum. Raises ValueError on every rank if a file is not as it was
        when it was tokenized.
        """
        recorded = [
            file.xxh3_128 if changed_ns <= file.recorded_ns else None
            for file, (_, _, changed_ns) in zip(self._files, self._states, strict=True)
        ]
        checksums = ranks.broadcast(recorded)  # nodes may have copies in other places, with other times
        if unknown := [number for number, known in enumerate(checksums) if known is None]:
            states = [self._states[number] for number in unknown]
            name = f"checksums-{fingerprint(states)}"
            read = arrays_of_ranks(ranks, name, lambda: {"checksums": np.array(_read(states, ranks))})["checksums"]
            for number, now in zip(unknown, read.tolist(), strict=True):
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
        """Hash modified files again; refuse another digest than `before`; collective.

        changed: the result of :meth:`changed` on one of the ranks.
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
    """Return the checksums of files; each rank reads its share of blocks."""
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
