"""One list column of a memory-mapped table as numpy views: row lengths and flat values, no token copied.

Arrow keeps a list column in chunks (record batches); each has the values of its rows back to back:

    rows      [7 8 9] [4] [] [5 6]
    offsets   0       3   4  4     6      one more than rows, int32 or int64
    values    7 8 9   4      5 6
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

LIST_KINDS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)

Lookup = Callable[[NDArray[Any]], NDArray[np.int64]] | None
Piece = tuple[int, int, int]  # chunk, begin, end: values of one chunk, counted from the first value of its first row


class ListColumn:
    """Rows 0..N-1 of one column, possibly of several tables one after the other (their types may differ).

    Columns with the same chunks and the same row lengths have the same pieces: what `pieces` of one of them finds,
    `gather` of each takes.
    """

    def __init__(
        self, chunks: list[pa.Array], name: str, kinds: tuple[str, ...], key: str, lookups: Sequence[Lookup] = ()
    ) -> None:
        """`kinds`: what the values may be, of `integer`, `boolean`, `floating`. `lookups`: for each chunk
        what its values are read as, None: as they are. ValueError names `key`."""
        self._chunks = [chunk for chunk in chunks if len(chunk)]
        self._lookups = [lookup for chunk, lookup in zip(chunks, lookups, strict=True) if len(chunk)] if lookups else []
        for kind in {chunk.type: None for chunk in self._chunks}:
            _check_type(kind, name, kinds, key)
        self.first_row = np.concatenate([[0], np.cumsum([len(chunk) for chunk in self._chunks], dtype=np.int64)])
        for first, chunk in zip(self.first_row, self._chunks, strict=False):
            if chunk.null_count or chunk.values.null_count:
                rows = f"rows {first}..{first + len(chunk) - 1}"
                raise ValueError(f"{key} must have no null in column {name}; {rows} hold one")
        self._views: list[tuple[NDArray[Any], Any] | None] = [None] * len(self._chunks)

    def __len__(self) -> int:
        return int(self.first_row[-1])

    def row_lengths(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """(first row, values in each of the rows from there on), chunk by chunk."""
        for number, chunk in enumerate(self._chunks):
            yield int(self.first_row[number]), np.diff(_offsets(chunk))

    def block(self, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Rows first..last-1, all in one chunk: (offsets int64[last-first+1] from 0, values[offsets[-1]])."""
        number = int(np.searchsorted(self.first_row, first, side="right")) - 1
        offsets, values = self._view(number)
        row = first - int(self.first_row[number])
        assert row + last - first < len(offsets), "a block must lie in one chunk"
        ends = offsets[row : row + last - first + 1].astype(np.int64)
        begin = int(ends[0]) - int(offsets[0])
        ends -= ends[0]
        return ends, values[begin : begin + int(ends[-1])]

    def row(self, row: int) -> NDArray[Any]:
        """The values of one row."""
        return self.block(row, row + 1)[1]

    def pieces(self, row: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64]) -> list[Piece]:
        """Where tokens start..start+length of each row lie."""
        chunk = np.searchsorted(self.first_row, row, side="right") - 1
        within = row - self.first_row[chunk]
        found = []
        for number, local, skip, count in zip(
            chunk.tolist(), within.tolist(), start.tolist(), length.tolist(), strict=True
        ):
            offsets = self._view(number)[0]
            begin = offsets.item(local) - offsets.item(0) + skip
            found.append((number, begin, begin + count))
        return found

    def gather(self, pieces: Sequence[Piece], out: NDArray[Any]) -> None:
        """Write the values of `pieces` to `out`, one after the other."""
        values = {number: self._view(number)[1] for number in {number for number, _, _ in pieces}}
        # Slices win over an index of every token, also for documents of 200 tokens: 1.4 against 1.9 ns a token.
        parts = [values[number][begin:end] for number, begin, end in pieces]
        np.concatenate(parts, out=out, casting="same_kind")

    def _view(self, number: int) -> tuple[NDArray[Any], Any]:
        """(offsets, values) of a chunk, values from the first of its first row on; slices of values are numpy arrays,
        views but where the values are bit-packed or looked up."""
        view = self._views[number]
        if view is None:
            chunk = self._chunks[number]
            offsets = _offsets(chunk)
            values = chunk.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
            flat = _Bits(values) if pa.types.is_boolean(values.type) else values.to_numpy(zero_copy_only=True)
            if self._lookups and (lookup := self._lookups[number]) is not None:
                flat = _LookedUp(flat, lookup)
            view = self._views[number] = (offsets, flat)
        return view


class _Bits:
    """Bit-packed values, unpacked slice by slice."""

    def __init__(self, values: pa.Array) -> None:
        self._values = values

    def __getitem__(self, part: slice) -> NDArray[np.bool_]:
        return self._values[part].to_numpy(zero_copy_only=False)


class _LookedUp:
    """Values as a lookup reads them, slice by slice."""

    def __init__(self, values: Any, lookup: Callable[[NDArray[Any]], NDArray[np.int64]]) -> None:
        self._values, self._lookup = values, lookup

    def __getitem__(self, part: slice) -> NDArray[np.int64]:
        return self._lookup(self._values[part])


def _offsets(chunk: pa.Array) -> NDArray[Any]:
    if pa.types.is_fixed_size_list(chunk.type):
        return (np.arange(len(chunk) + 1) + chunk.offset) * chunk.type.list_size
    return chunk.offsets.to_numpy()


def _check_type(kind: pa.DataType, name: str, kinds: tuple[str, ...], key: str) -> None:
    is_list = any(is_kind(kind) for is_kind in LIST_KINDS)
    if not is_list or not any(getattr(pa.types, f"is_{wanted}")(kind.value_type) for wanted in kinds):
        raise ValueError(f"{key} must have column {name} as a list of {' or '.join(kinds)} values; got {kind}")
