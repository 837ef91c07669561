"""A comparison of the same records, tokenized in two ways."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.text import Text

from verl_ext.commands.preview import Decode
from verl_ext.options import one_line
from verl_ext.tables import plain_table
from verl_ext.tools.show.document import AFTER, BEFORE, first_difference
from verl_ext.tools.show.documents import ShownDocuments


def report_differences(one: ShownDocuments, other: ShownDocuments) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ascending rows with other tokens, and with other targets alone.

    Row i of one is compared with row i of the other, up to the last row that both have.
    """
    tokens, targets = [], []
    for row in range(min(len(one), len(other))):
        left, right = one.row(row), other.row(row)
        if not np.array_equal(left.input_ids, right.input_ids):
            tokens.append(row)
        elif not np.array_equal(left.loss_mask, right.loss_mask):
            targets.append(row)
    return np.array(tokens, np.int64), np.array(targets, np.int64)


def comparison(
    one: ShownDocuments, other: ShownDocuments, decode: Decode | None, most: int
) -> Iterator[RenderableType]:
    """Yield counts of differing rows, and first differences of `most` rows."""
    tokens, targets = report_differences(one, other)
    compared = min(len(one), len(other))
    same = compared - len(tokens) - len(targets)
    yield Text(f"{compared:,} rows compared: {same:,} equal, {len(tokens):,} with other tokens,", "bold").append(
        f" {len(targets):,} with the same tokens and other targets"
    )
    if len(one) != len(other):
        counts = f"{len(one):,} and {len(other):,} documents"
        yield Text(f"{counts}: the rows after the shorter set are not compared", "yellow")
    # Rows that differ in either way stand in one list, because a row number is what the user looks up.
    rows = np.sort(np.concatenate([tokens, targets]))[:most]
    table = plain_table("row", "token", "differs in", "here", "there", left=5)
    for row in rows.tolist():
        left, right = one.row(row), other.row(row)
        place, what = first_difference(left.input_ids, right.input_ids), "tokens"
        if place is None:
            place, what = first_difference(left.loss_mask, right.loss_mask), "targets"
        assert place is not None, "the rows differ"
        begin = max(place - BEFORE, 0)
        shown = []
        for each in (left, right):
            ids = each.input_ids.tolist()
            before, after = ids[begin:place], ids[place : place + AFTER]
            parts = [" ".join(map(str, part)) if decode is None else decode(part) for part in (before, after)]
            is_target = what == "targets" and place < len(ids) and bool(each.loss_mask[place])
            shown.append(Text(one_line(parts[0]), "dim").append(" » ", "bold yellow"))
            shown[-1].append(one_line(parts[1]), "green" if is_target else "").append(" (target)" if is_target else "")
        table.add_row(str(row), str(place), what, *shown)
    if len(rows):
        yield table
