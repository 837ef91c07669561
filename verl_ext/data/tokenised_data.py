"""The columns of one or several tokenised folders, one after the other, checked and memory-mapped."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verl_ext.data.category_numbers import CategoryNumbers
from verl_ext.data.folder import open_folder
from verl_ext.data.list_column import ListColumn, Lookup, Piece

VALUE_KINDS = {
    "input_ids": ("integer",),
    "loss_mask": ("integer", "boolean"),
    "category_ids": ("integer",),
    "loss_weight": ("floating", "integer"),
}


class TokenisedData:
    """`columns[name]` is a ListColumn of N rows for input_ids, loss_mask, category_ids and, when the folders have it,
    loss_weight; `lengths()` reads the length column. Categories of one name have one number in all folders (see
    category_numbers.py; values that could be of two categories are a ValueError where they are read). Pickles as its
    folders' paths."""

    def __init__(self, folders: Sequence[str], key: str = "data.train_dir", check: bool = True) -> None:
        """Open `folders`; with `check`, every list column must be as long as `length` says, in every row.

        Raises:
            ValueError: a folder that is no tokenised dataset, columns of a wrong type, lengths that disagree.
        """
        self.folders, self.key = tuple(folders), key
        self._tables = [open_folder(folder, key).data for folder in self.folders]
        names = list(VALUE_KINDS)
        with_weight = ["loss_weight" in table.column_names for table in self._tables]
        if not any(with_weight):
            names.remove("loss_weight")
        elif not all(with_weight):
            lacking = self.folders[with_weight.index(False)]
            raise ValueError(f"{key} must have loss_weight in all of its folders or in none; {lacking} lacks it")
        numbers = {"category_ids": self._category_lookups()}
        self.columns = {
            name: ListColumn(self._chunks(name), name, VALUE_KINDS[name], key, numbers.get(name, ())) for name in names
        }
        first_row = self.columns["input_ids"].first_row
        assert all(np.array_equal(column.first_row, first_row) for column in self.columns.values()), (
            "Arrow files keep all columns in the same record batches"
        )
        if check:
            self._check_lengths()

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def __reduce__(self) -> tuple[type, tuple[Sequence[str], str, bool]]:
        return type(self), (self.folders, self.key, False)

    @property
    def has_loss_weight(self) -> bool:
        return "loss_weight" in self.columns

    def lengths(self) -> NDArray[np.int64]:
        """int64[N]: the `length` column."""
        lengths = np.empty(len(self), np.int64)
        row = 0
        for chunk in self._chunks("length"):
            if not pa.types.is_integer(chunk.type):
                raise ValueError(f"{self.key} must have column length as integer; got {chunk.type}")
            if chunk.null_count:
                raise ValueError(f"{self.key} must have no null in column length")
            lengths[row : row + len(chunk)] = chunk.to_numpy()
            row += len(chunk)
        return lengths

    def first_rows(self) -> NDArray[np.int64]:
        """int64[F+1]: the first row of every folder, and the number of rows."""
        return np.cumsum([0, *(table.num_rows for table in self._tables)], dtype=np.int64)

    def pieces(self, row: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64]) -> list[Piece]:
        """Where tokens start..start+length of each row lie, in every column."""
        return self.columns["input_ids"].pieces(row, start, length)

    def blocks(self, first: int, last: int, max_tokens: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows that cover first..last-1 in order; each lies in one chunk of every column and has at most
        `max_tokens` tokens or one row."""
        edges = np.concatenate([[first, last], *(column.first_row for column in self.columns.values())])
        edges = np.unique(edges[(edges >= first) & (edges <= last)])
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            offsets, _ = self.columns["input_ids"].block(begin, end)
            row = 0
            while row < end - begin:
                fits = int(np.searchsorted(offsets, offsets[row] + max_tokens, side="right")) - 1
                until = max(fits, row + 1)
                yield begin + row, begin + until
                row = until

    def _chunks(self, name: str) -> list[pa.Array]:
        return [chunk for table in self._tables for chunk in table.column(name).chunks]

    def _category_lookups(self) -> list[Lookup]:
        """For each chunk, by what its folder's category numbers are read."""
        by_folder = CategoryNumbers.read(self.folders).lookups
        if not any(lookup is not None for lookup in by_folder):
            return []
        tables = zip(self._tables, by_folder, strict=True)
        return [lookup for table, lookup in tables for _ in table.column("category_ids").chunks]

    def _check_lengths(self) -> None:
        lengths = self.lengths()
        for name, column in self.columns.items():
            wrong, first_wrong = 0, (0, 0)
            for first, counts in column.row_lengths():
                differs = counts != lengths[first : first + len(counts)]
                if differs.any():
                    at = int(differs.argmax())
                    first_wrong = first_wrong if wrong else (first + at, int(counts[at]))
                    wrong += int(differs.sum())
            if wrong:
                row, count = first_wrong
                raise ValueError(
                    f"{self.key} must have as many {name} as length says in every row; row {row} has length "
                    f"{lengths[row]} and {count} {name} ({wrong} such rows)"
                )
