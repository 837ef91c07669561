"""A comparison of tokens: the same records tokenized in two ways, or a prompt and the document that begins with it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.text import Text

from verl_ext.commands.preview import Decode
from verl_ext.options import one_line
from verl_ext.tables import plain_table
from verl_ext.tools.show.documents import Row, ShownDocuments

BEFORE, AFTER = 12, 24  # tokens shown around the place of a difference


def first_difference(one: NDArray[Any], other: NDArray[Any]) -> int | None:
    """Return where arrays differ or one ends; None if equal."""
    most = min(len(one), len(other))
    differs = np.flatnonzero(one[:most] != other[:most])
    if len(differs):
        return int(differs[0])
    return None if len(one) == len(other) else most


def around(ids: NDArray[Any], place: int, decode: Decode | None, style: str = "") -> Text:
    """Return the tokens before and after a place; `style` is of those after it."""
    parts = ids[max(place - BEFORE, 0) : place].tolist(), ids[place : place + AFTER].tolist()
    before, after = (" ".join(map(str, part)) if decode is None else decode(part) for part in parts)
    return Text().append(one_line(before), "dim").append(" » ", "bold yellow").append(one_line(after), style)


def differs_in(one: Row, other: Row) -> tuple[int, str] | None:
    """Return the first place where tokens, or else targets, differ, and which of them; None if equal."""
    for what, left, right in (
        ("tokens", one.input_ids, other.input_ids),
        ("targets", one.loss_mask, other.loss_mask),
    ):
        if (place := first_difference(left, right)) is not None:
            return place, what
    return None


def comparison(
    one: ShownDocuments, other: ShownDocuments, decode: Decode | None, most: int
) -> Iterator[RenderableType]:
    """Yield counts of differing rows, and first differences of `most` rows.

    Row i of one is compared with row i of the other, up to the last row that both have.
    """
    compared = min(len(one), len(other))
    counts = {"tokens": 0, "targets": 0}
    table = plain_table("row", "token", "differs in", "here", "there", left=5)
    for row in range(compared):
        rows = one.row(row), other.row(row)
        if (difference := differs_in(*rows)) is None:
            continue
        place, what = difference
        counts[what] += 1
        if table.row_count == most:
            continue
        shown = []
        for each in rows:
            is_target = what == "targets" and place < len(each.loss_mask) and bool(each.loss_mask[place])
            shown.append(around(each.input_ids, place, decode, "green" if is_target else ""))
            shown[-1].append(" (target)" if is_target else "")
        table.add_row(str(row), str(place), what, *shown)
    same = compared - sum(counts.values())
    yield Text(f"{compared:,} rows compared: {same:,} equal, {counts['tokens']:,} with other tokens,", "bold").append(
        f" {counts['targets']:,} with the same tokens and other targets"
    )
    if len(one) != len(other):
        lengths = f"{len(one):,} and {len(other):,} documents"
        yield Text(f"{lengths}: the rows after the shorter set are not compared", "yellow")
    if table.row_count:
        yield table
