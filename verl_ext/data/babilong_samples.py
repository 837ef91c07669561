"""What is known of every sample besides its tokens: SampleFacts, one Arrow table beside the tokenised data."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verl_ext.data.babilong_files import Record
from verl_ext.data.babilong_sample import SampleTokens
from verl_ext.data.over_length_report import OverLengthRow
from verl_ext.packing import Spans

FILE_NAME = "samples.arrow"
_SCHEMA = pa.schema(
    {
        "category_id": pa.int32(),
        "full_tokens": pa.int64(),  # of prompt and answer, before the prompt was cut
        "targets": pa.int32(),
        "lowest": pa.int32(),  # token ids
        "highest": pa.int32(),
        "question": pa.large_string(),
        "target": pa.large_string(),
    }
)


class BABILongSample(NamedTuple):
    """What a sample asks and what is right, as the file has them; category: its file's."""

    category: str
    question: str
    target: str


@dataclass
class SampleFactsWriter:
    """Collects facts in the order of the samples; cut: how many have a prompt that was cut, by cut_tokens in all."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _SCHEMA.names})
    cut: int = 0
    cut_tokens: int = 0

    def add(self, category_id: int, record: Record, sample: SampleTokens) -> None:
        """One sample more."""
        ids = sample.input_ids
        self.cut += sample.full_tokens > len(ids)
        self.cut_tokens += sample.full_tokens - len(ids)
        values = (category_id, sample.full_tokens, sample.targets, int(ids.min()), int(ids.max()))
        for name, value in zip(_SCHEMA.names, (*values, record.question, record.target), strict=True):
            self.columns[name].append(value)

    def write(self, folder: Path) -> None:
        """The table, in `folder`."""
        table = pa.table(self.columns, schema=_SCHEMA)
        with pa.OSFile(str(folder / FILE_NAME), "wb") as sink, pa.ipc.new_file(sink, table.schema) as stream:
            stream.write_table(table)


class SampleFacts:
    """Columns of N samples: category_id, targets, lowest, highest int32[N] and full_tokens int64[N]; texts by row."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with pa.memory_map(str(folder / FILE_NAME)) as source:
            self._table = pa.ipc.open_file(source).read_all()
        numbers = {name: self._table[name].to_numpy() for name in _SCHEMA.names[:5]}
        self.category_id: NDArray[np.int32] = numbers["category_id"]
        self.full_tokens: NDArray[np.int64] = numbers["full_tokens"]
        self.targets: NDArray[np.int32] = numbers["targets"]
        self.lowest: NDArray[np.int32] = numbers["lowest"]
        self.highest: NDArray[np.int32] = numbers["highest"]

    def __len__(self) -> int:
        return len(self.targets)

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return type(self), (self.folder,)

    def text(self, row: int) -> tuple[str, str]:
        """(question, target) of a sample."""
        return self._table["question"][row].as_py(), self._table["target"][row].as_py()

    def cut_report(self, spans: Spans, names: dict[int, str], reason: str) -> list[OverLengthRow]:
        """A row for each category with samples of `spans` whose prompt was cut; tokens are those before the cut."""
        rows, kept = spans.row, spans.length.astype(np.int64)
        full, category = self.full_tokens[rows], self.category_id[rows]
        report = []
        for number in np.unique(category[full > kept]).tolist():
            cut = (category == number) & (full > kept)
            tokens, left = int(full[cut].sum()), int(kept[cut].sum())
            share = tokens / int(full.sum())
            report.append(OverLengthRow(names[number], reason, int(cut.sum()), tokens, share, left, tokens - left))
        return report

    def beyond_report(
        self, rows: NDArray[np.int64], in_use: int, lengths: NDArray[np.int64], names: dict[int, str]
    ) -> list[OverLengthRow]:
        """A row for each category with samples beyond the first `in_use` of `rows`; `lengths` int64[N] of all rows."""
        left = rows[in_use:]
        category, total = self.category_id[left], int(lengths[rows].sum())
        report = []
        for number in np.unique(category).tolist():
            beyond = lengths[left[category == number]]
            tokens = int(beyond.sum())
            reason, share = "beyond max_samples", tokens / total
            report.append(OverLengthRow(names[number], reason, len(beyond), tokens, share, tokens_removed=tokens))
        return report


def category_numbers(categories: Iterable[str]) -> dict[str, int]:
    """Category -> number from 1, in the order in which they first occur."""
    return {name: number for number, name in enumerate(dict.fromkeys(categories), start=1)}
