"""What was done to documents that are not trained on as they stand, by category and reason: nothing in silence."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.stats import OverLengthCount
from verl_ext.packing import PackPlan, Spans

NO_CATEGORY = "(none)"


@dataclass
class OverLengthRow:
    """One category and reason: `drop`, `truncate`, `split` (longer than a pack), `empty` (no token, left out),
    `beyond max_samples`, `not drawn` (by data.mixture; of a split document, any piece that is in no pack), or
    `no target` (in the packs, and nothing to learn from; those that were cut included).

    Only documents longer than a pack, and BABILong's samples, have their category looked up; the others are in (none).
    Of a BABILong prompt that was cut, `context truncated` or `question truncated`, with the tokens from before the cut;
    of a pretraining text, `truncated to max_length`; `bad record: …` of a record that gave no document, and
    `special tokens encoded as text` of one that holds their names.
    share is of the tokens of all documents of the folders. tokens = tokens_kept + tokens_removed; over all rows,
    tokens_removed are the tokens that no pack holds, each counted once. targets_removed counts target tokens of
    documents longer than a pack that are trained on no longer (under `split`, those that became the first token of a
    piece). Of these documents, lost_last_target had their last target removed, without_target had targets and have none
    left, drawn or not.
    """

    category: str
    reason: str
    documents: int = 0
    tokens: int = 0
    share: float = 0.0
    tokens_kept: int = 0
    tokens_removed: int = 0
    targets_removed: int = 0
    lost_last_target: int = 0
    without_target: int = 0


def over_length_report(
    counts: Iterable[OverLengthCount], policy: str, names: Mapping[int, str], lengths: NDArray[np.int64], total: int
) -> list[OverLengthRow]:
    """Rows by category, then the empty documents; names: category number -> name, `lengths` int64[N] of the rows in
    use, total: tokens of all documents of the folders."""
    report = [
        OverLengthRow(
            names.get(count.category, str(count.category)) if count.category else NO_CATEGORY,
            policy,
            count.documents,
            count.tokens,
            count.tokens / total,
            count.tokens_kept,
            count.tokens - count.tokens_kept,
            count.targets_removed,
            count.lost_last_target,
            count.without_target,
        )
        for count in sorted(counts, key=lambda count: (count.category == 0, count.category))
    ]
    empty = int((lengths == 0).sum())
    return [*report, OverLengthRow(NO_CATEGORY, "empty", documents=empty)] if empty else report


def left_out(
    lengths: NDArray[np.int64], in_use: int, spans: Spans, plan: PackPlan, targets: NDArray[np.int32]
) -> list[OverLengthRow]:
    """The documents beyond the first `in_use`, those that `plan` does not hold, and those that it holds without a
    target, where there are any; `lengths` int64[N] of all rows of the folders, targets int32[S]."""
    held = np.zeros(len(spans), bool)
    held[plan.document_index] = True
    row, length = spans.row[held], spans.length[held]
    begins = np.flatnonzero(np.diff(row, prepend=-1))
    of_row, tokens = (np.add.reduceat(values, begins, dtype=np.int64) for values in (targets[held], length))
    rows = [
        _row("beyond max_samples", lengths[in_use:], removed=True),
        _row("not drawn", spans.length[~held], removed=True, documents=len(np.unique(spans.row[~held]))),
        _row("no target", tokens[of_row == 0], removed=False),
    ]
    for counted in rows:
        counted.share = counted.tokens / int(lengths.sum())
    return [counted for counted in rows if counted.documents]


def _row(reason: str, lengths: NDArray[Any], removed: bool, documents: int | None = None) -> OverLengthRow:
    tokens = int(lengths.sum(dtype=np.int64))
    row = OverLengthRow(NO_CATEGORY, reason, len(lengths) if documents is None else documents, tokens)
    row.tokens_kept, row.tokens_removed = (0, tokens) if removed else (tokens, 0)
    return row
