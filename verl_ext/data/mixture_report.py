"""What a mixture drew, by source and length interval: wanted, given, epochs, and the document where it is far off."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from verl_ext.packing import Spans
from verl_ext.packing.mixture import IntervalDraw


@dataclass
class MixtureRow:
    """One interval of a source: documents of low < length <= high tokens (None: of any length).

    documents counts every time that one is drawn, distinct each once. epochs = tokens given / tokens of all documents
    of the interval. off = given / wanted - 1, 0 where nothing is wanted. hinders names the document that keeps it more
    than 1 % off.
    """

    source: str
    low: int | None
    high: int | None
    documents: int
    distinct: int
    tokens_wanted: int
    tokens_given: int
    epochs: float
    off: float
    hinders: str | None = None


def mixture_report(
    draws: Iterable[IntervalDraw], spans: Spans, folders: Sequence[str], first_rows: NDArray[np.int64]
) -> list[MixtureRow]:
    """A row for each interval, in the order of the sources; folder f has the rows first_rows[f]..first_rows[f+1]-1."""
    return [
        MixtureRow(
            draw.source,
            draw.low,
            draw.high,
            documents=len(draw.documents),
            distinct=draw.distinct,
            tokens_wanted=draw.wanted,
            tokens_given=draw.given,
            epochs=draw.given / draw.pool,
            off=_off(draw.given, draw.wanted),
            hinders=_hinders(draw, spans, folders, first_rows),
        )
        for draw in draws
    ]


def mixture_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """MixtureRows as dicts, a line for each; * where the budget is missed by more than 1 %."""
    lines = []
    for row in rows:
        cells = {name: f"{value:,}" for name, value in row.items() if isinstance(value, int)}
        rates = {"epochs": f"{row['epochs']:.2f}", "off": f"{row['off']:+.2%}", "": "*" if row["hinders"] else ""}
        lines.append({"source": row["source"], "low": "", "high": "", **cells, **rates})
    return pd.DataFrame(lines).to_string(index=False)


def mixture_notices(report: Iterable[MixtureRow]) -> Iterator[str]:
    """A line for each interval that is more than 1 % off its budget."""
    for row in report:
        if row.hinders:
            interval = "" if row.low is None else f", {row.low} < length <= {row.high}"
            yield (
                f"data.mixture: source {row.source}{interval} gives {row.tokens_given:,} of {row.tokens_wanted:,} "
                f"tokens ({row.off:+.2%}); {row.hinders}"
            )


def _hinders(draw: IntervalDraw, spans: Spans, folders: Sequence[str], first_rows: NDArray[np.int64]) -> str | None:
    if draw.hindrance is None:
        return None
    span, otherwise = draw.hindrance.document, draw.hindrance.tokens_otherwise
    row, start, length = int(spans.row[span]), int(spans.start[span]), int(spans.length[span])
    folder = int(np.searchsorted(first_rows, row, side="right")) - 1
    where = f"row {row - int(first_rows[folder])} of {folders[folder]} ({length:,} tokens"
    where += f" from {start:,})" if start else ")"
    times = "once more" if otherwise > draw.given else "once less"
    return f"{where} drawn {times} would make it {_off(otherwise, draw.wanted):+.2%}"


def _off(given: int, wanted: int) -> float:
    return given / wanted - 1 if wanted else 0.0
