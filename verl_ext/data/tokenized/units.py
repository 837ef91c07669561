"""The preferences in tokenized folders: which rows are answers to one prompt.

row           0   1 | 2   3   4 | 5 | 6        row 5: an answer with a label alone; row 6: not an answer
unit          2   0 | 3   0   0 | 1 | 1        the rows of a unit in its first one
answer        1  -1 | 1  -1  -1 |-1 | 0        the preferred answer comes first
pair_weight   1   1 | 2   2   2 | 1 | 1
starts        0       2           5   6   7
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verl_ext.options import must
from verl_ext.text.tokens.documents import UNIT_COLUMNS

OVER_LENGTH_OF_UNITS = ("error", "drop")  # a cut answer has no end, and a cut prompt asks another question


@dataclass(frozen=True)
class UnitRows:
    """The U units of N rows.

    starts: int64[U + 1], unit u has the rows starts[u]..starts[u + 1] - 1. answer: int8[N], 1 preferred or desirable,
    -1 rejected or undesirable, 0 no answer. weight: float64[U].
    """

    starts: NDArray[np.int64]
    answer: NDArray[np.int8]
    weight: NDArray[np.float64]

    @classmethod
    def of_table(cls, table: pa.Table, key: str, folder: str) -> "UnitRows":
        """Read a folder's rows; without these columns, each is a unit."""
        names = ("unit", "answer")
        if all(name in table.column_names and pa.types.is_floating(table.schema.field(name).type) for name in names):
            raise ValueError(
                must(key, "have columns unit and answer as integers", f"numbers with fractions in {folder}")
            )
        columns = {name: np.full(len(table), name != "answer", kind) for name, kind in UNIT_COLUMNS.items()}
        for name in UNIT_COLUMNS if has_answers(table) else ():
            if name in table.column_names:
                if table.column(name).null_count:
                    raise ValueError(f"{key} must have no null in column {name}; {folder} has one")
                columns[name] = table.column(name).to_numpy()
        return cls.of_columns(**columns, key=key, folder=folder)

    @classmethod
    def of_columns(
        cls, unit: NDArray[Any], answer: NDArray[Any], pair_weight: NDArray[Any], key: str, folder: str
    ) -> "UnitRows":
        """Read a folder's columns; raise ValueError for units that are broken."""

        def refuse(wrong: NDArray[np.bool_], requirement: str, got: Callable[[int], object]) -> None:
            if wrong.any():
                row = int(wrong.argmax())
                raise ValueError(must(key, f"have {requirement}", f"{got(row)} in row {row} of {folder}"))

        refuse(unit < 0, "unit at least 0", unit.__getitem__)
        refuse(unit[:1] == 0, "the first row of a unit before its others, which have unit 0", unit.__getitem__)
        starts = np.append(np.flatnonzero(unit), len(unit)).astype(np.int64)
        sizes = np.zeros(len(unit), np.int64)
        sizes[starts[:-1]] = np.diff(starts)
        needed = "in a unit's first row the number of its rows, which follow each other"
        refuse(unit != sizes, needed, lambda row: f"unit {unit[row]} and {sizes[row] - 1} rows of unit 0 after it")
        refuse(~np.isin(answer, (-1, 0, 1)), "answer 1, -1 or 0", answer.__getitem__)
        # The first of several answers is preferred to each of the others.
        expected = np.where(sizes > 1, 1, np.where(sizes == 1, answer, -1))
        needed = "answer 1 in the first of a unit's rows, and -1 in its others"
        refuse(answer != expected, needed, lambda row: f"answer {answer[row]}")
        is_weight = (pair_weight >= 0) & (pair_weight < np.inf)
        refuse(~is_weight, "pair_weight finite and at least 0", pair_weight.__getitem__)
        return cls(starts, answer.astype(np.int8), pair_weight[starts[:-1]].astype(np.float64))

    @classmethod
    def joined(cls, parts: Sequence["UnitRows"]) -> "UnitRows":
        """Return the units of several folders' rows, one after the other."""
        first = np.cumsum([0, *(len(part.answer) for part in parts)])
        starts = [part.starts[:-1] + begin for part, begin in zip(parts, first[:-1], strict=True)]
        answer, weight = (np.concatenate([getattr(part, name) for part in parts]) for name in ("answer", "weight"))
        return cls(np.concatenate([*starts, first[-1:]]), answer, weight)

    def __len__(self) -> int:
        return len(self.weight)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The rows of each unit, int64[U]."""
        return np.diff(self.starts)

    def unit_of(self, row: int) -> range:
        """Return the rows of the unit that holds a row."""
        at = int(np.searchsorted(self.starts, row, side="right")) - 1
        return range(int(self.starts[at]), int(self.starts[at + 1]))

    def weight_of(self, row: int) -> float:
        """Return the weight of the unit that holds a row."""
        return float(self.weight[np.searchsorted(self.starts, row, side="right") - 1])

    @property
    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows of each pair's preferred and rejected answers, int64[P] both."""
        rejected = np.flatnonzero((self.answer == -1) & (np.repeat(self.sizes, self.sizes) > 1))
        return np.repeat(self.starts[:-1], self.sizes)[rejected], rejected

    def fitting(self, tokens: NDArray[np.integer], max_tokens: int, policy: str, key: str) -> NDArray[np.int64]:
        """Return the units of at most `max_tokens` tokens, int64[n], ascending.

        tokens: of each unit as it is packed, int64[U]. policy: one of OVER_LENGTH_OF_UNITS. Raises ValueError under
        `error` if one is longer.
        """
        is_long = tokens > max_tokens
        if policy == "error" and is_long.any():
            longest = int(tokens.argmax())
            rows = f"rows {self.starts[longest]}..{self.starts[longest + 1] - 1}"
            longer = (
                f"{is_long.sum():,} of {len(self):,} are longer, the longest ({rows}) with {tokens[longest]:,} tokens"
            )
            got = f"{max_tokens}, and {longer}: raise it, or data.over_length=drop leaves whole units out"
            raise ValueError(must("data.max_tokens", f"hold every unit of {key}", got))
        return np.flatnonzero(~is_long)


def has_answers(table: pa.Table) -> bool:
    """Return whether rows are answers; columns of other types do not count."""
    names = [name for name in ("unit", "answer") if name in table.column_names]
    return len(names) == 2 and all(pa.types.is_integer(table.schema.field(name).type) for name in names)
