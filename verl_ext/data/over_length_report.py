"""What was done to documents longer than a pack, by category: nothing is dropped, cut or split in silence."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.categories import category_names
from verl_ext.data.tokenised_data import TokenisedData

NO_CATEGORY = "(none)"


@dataclass
class OverLengthRow:
    """One category and action: `drop`, `truncate`, `split`, or `empty` (documents without a token, left out).

    tokens = tokens_kept + tokens_removed. targets_removed counts target tokens that are trained on no longer (under
    `split`, those that became the first token of a piece). Of the documents, lost_last_target had their last target
    removed, without_target had targets and have none left.
    """

    category: str
    action: str
    documents: int = 0
    tokens: int = 0
    tokens_kept: int = 0
    tokens_removed: int = 0
    targets_removed: int = 0
    lost_last_target: int = 0
    without_target: int = 0


def over_length_report(
    data: TokenisedData, lengths: NDArray[np.int64], max_tokens: int, policy: str
) -> list[OverLengthRow]:
    """Rows by category, then the empty documents; `lengths` int64[N] of the rows in use. Only the documents over
    max_tokens are read; a document's category is its most frequent one, of equals the smallest."""
    rows: dict[int, OverLengthRow] = {}
    names = category_names(data.folders)
    for row in np.flatnonzero(lengths > max_tokens).tolist():
        category = _main_category(data.columns["category_ids"].row(row))
        if category not in rows:
            rows[category] = OverLengthRow(names.get(category, str(category)) if category else NO_CATEGORY, policy)
        _count(rows[category], data.columns["loss_mask"].row(row), max_tokens)
    report = [rows[category] for category in sorted(rows, key=lambda number: (number == 0, number))]
    empty = int((lengths == 0).sum())
    return [*report, OverLengthRow(NO_CATEGORY, "empty", documents=empty)] if empty else report


def _main_category(category_ids: NDArray[Any]) -> int:
    ids, counts = np.unique(category_ids[category_ids != 0], return_counts=True)
    return int(ids[counts.argmax()]) if len(ids) else 0


def _count(row: OverLengthRow, loss_mask: NDArray[Any], max_tokens: int) -> None:
    """Add one document, loss_mask [length > max_tokens], to its row."""
    was_target = loss_mask != 0
    was_target[0] = False
    is_target = was_target.copy()
    kept = len(loss_mask)
    if row.action == "split":
        is_target[::max_tokens] = False
    else:
        kept = max_tokens if row.action == "truncate" else 0
        is_target[kept:] = False
    row.documents += 1
    row.tokens += len(loss_mask)
    row.tokens_kept += kept
    row.tokens_removed += len(loss_mask) - kept
    row.targets_removed += int(was_target.sum()) - int(is_target.sum())
    if was_target.any():
        row.lost_last_target += not is_target[np.flatnonzero(was_target)[-1]]
        row.without_target += not is_target.any()
