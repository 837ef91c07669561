"""Documents cut to a number of tokens, and what is known of each besides its tokens: numpy and one Arrow table.

keep = 4 (BOS and EOS included)   B t t t t E | B t E      the EOS stays, the text's end goes
                                  B t t     E | B t E      full_tokens 6 3
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verl_ext.data.over_length_report import OverLengthRow

FILE_NAME = "documents.arrow"
_COLUMNS = {
    "category_id": pa.int32(),
    "full_tokens": pa.int64(),  # before the cut
    "lowest": pa.int32(),  # token ids
    "highest": pa.int32(),
}


def cut_documents(
    tokens: NDArray[Any], lengths: NDArray[np.integer], keep: int
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """(tokens, lengths int32[D]) of the documents side by side in `tokens`, a longer one than `keep` as its first
    keep - 1 tokens and its last."""
    if not (lengths > keep).any():
        return tokens, lengths.astype(np.int32)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    position = np.arange(len(tokens)) - np.repeat(starts, lengths)
    is_last = position == np.repeat(lengths - 1, lengths)
    return tokens[(position < keep - 1) | is_last], np.minimum(lengths, keep).astype(np.int32)


@dataclass
class FactsWriter:
    """Collects facts in the order of the documents; cut: how many were cut, by cut_tokens in all."""

    columns: dict[str, list[NDArray[Any]]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    documents: int = 0
    cut: int = 0
    cut_tokens: int = 0

    def add(
        self, category_id: int, tokens: NDArray[Any], lengths: NDArray[np.int32], full: NDArray[np.integer]
    ) -> None:
        """Documents of one category, at least one, side by side in `tokens`; full int[D]: their tokens uncut."""
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        self.documents += len(lengths)
        self.cut += int((full > lengths).sum())
        self.cut_tokens += int((full - lengths).sum(dtype=np.int64))
        values = (
            np.full(len(lengths), category_id),
            full,
            np.minimum.reduceat(tokens, starts),
            np.maximum.reduceat(tokens, starts),
        )
        for (name, kind), column in zip(_COLUMNS.items(), values, strict=True):
            self.columns[name].append(column.astype(kind.to_pandas_dtype()))

    def write(self, folder: Path) -> None:
        """The table, in `folder`."""
        table = pa.table(
            {name: np.concatenate(parts) for name, parts in self.columns.items()}, schema=pa.schema(_COLUMNS)
        )
        with pa.OSFile(str(folder / FILE_NAME), "wb") as sink, pa.ipc.new_file(sink, table.schema) as stream:
            stream.write_table(table)


class DocumentFacts:
    """Memory-mapped columns of N documents: category_id, lowest, highest int32[N], full_tokens int64[N]. names:
    category number -> name."""

    def __init__(self, folder: Path, names: dict[int, str]) -> None:
        self.folder, self.names = folder, names
        with pa.memory_map(str(folder / FILE_NAME)) as source:
            table = pa.ipc.open_file(source).read_all()
        columns = {name: table[name].combine_chunks().to_numpy() for name in _COLUMNS}
        self.category_id: NDArray[np.int32] = columns["category_id"]
        self.full_tokens: NDArray[np.int64] = columns["full_tokens"]
        self.lowest: NDArray[np.int32] = columns["lowest"]
        self.highest: NDArray[np.int32] = columns["highest"]

    def __len__(self) -> int:
        return len(self.category_id)

    def __reduce__(self) -> tuple[type, tuple[Path, dict[int, str]]]:
        return type(self), (self.folder, self.names)

    def cut_report(self, rows: NDArray[np.int64], lengths: NDArray[np.int64], reason: str) -> list[OverLengthRow]:
        """A row for each category with documents of `rows` that were cut; lengths int64[rows]: after the cut. tokens
        and share are of before it."""
        full = self.full_tokens[rows]
        cut = full > lengths
        total = int(full.sum())
        return self._by_category(rows[cut], full[cut], lengths[cut], total, reason)

    def left_report(
        self, rows: NDArray[np.int64], lengths: NDArray[np.int64], total: int, reason: str
    ) -> list[OverLengthRow]:
        """A row for each category of `rows`, which no pack holds; lengths int64[rows]; total: what share is of."""
        return self._by_category(rows, lengths, np.zeros_like(lengths), total, reason)

    def _by_category(
        self, rows: NDArray[np.int64], tokens: NDArray[np.int64], kept: NDArray[np.int64], total: int, reason: str
    ) -> list[OverLengthRow]:
        category = self.category_id[rows]
        report = []
        for number in np.unique(category).tolist():
            of_it = category == number
            before, after = int(tokens[of_it].sum()), int(kept[of_it].sum())
            share = before / total
            row = OverLengthRow(self.names[number], reason, int(of_it.sum()), before, share, after, before - after)
            report.append(row)
        return report
