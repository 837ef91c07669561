"""What was done to documents that are not trained on as they stand, by category and reason: nothing in silence."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from verl_ext.data.category_numbers import CategoryNumbers
from verl_ext.data.tokenised_data import TokenisedData
from verl_ext.packing import Spans

NO_CATEGORY = "(none)"
_COUNTED = 1 << 20  # category ids below it are counted, which is many times faster than sorting


@dataclass
class OverLengthRow:
    """One category and reason: `drop`, `truncate`, `split` (longer than a pack), `empty` (no token, left out), or
    `no target` (in the packs, and nothing to learn from; those that were cut included).

    share is of the tokens of all documents in use. tokens = tokens_kept + tokens_removed. targets_removed counts target
    tokens that are trained on no longer (under `split`, those that became the first token of a piece). Of the
    documents, lost_last_target had their last target removed, without_target had targets and have none left.
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
    data: TokenisedData, lengths: NDArray[np.int64], max_tokens: int, policy: str
) -> list[OverLengthRow]:
    """Rows by category, then the empty documents; `lengths` int64[N] of the rows in use. Only the documents over
    max_tokens are read; a document's category is its most frequent one, of equals the smallest."""
    rows: dict[int, OverLengthRow] = {}
    names = CategoryNumbers.read(data.folders).names
    over = np.flatnonzero(lengths > max_tokens).tolist()
    for row in tqdm(over, desc="counting over-length documents", unit="doc", delay=3, disable=None):
        category = _main_category(data.columns["category_ids"].row(row))
        if category not in rows:
            rows[category] = OverLengthRow(names.get(category, str(category)) if category else NO_CATEGORY, policy)
        _count(rows[category], data.columns["loss_mask"].row(row), max_tokens)
    report = [rows[category] for category in sorted(rows, key=lambda number: (number == 0, number))]
    for counted in report:
        counted.share = counted.tokens / int(lengths.sum())
    empty = int((lengths == 0).sum())
    return [*report, OverLengthRow(NO_CATEGORY, "empty", documents=empty)] if empty else report


def without_target(spans: Spans, targets: NDArray[np.int32]) -> list[OverLengthRow]:
    """The row of the documents none of whose spans holds a target, if there are any; `targets` int32[S]."""
    begins = np.flatnonzero(np.diff(spans.row, prepend=-1))
    of_row, tokens = (np.add.reduceat(values, begins, dtype=np.int64) for values in (targets, spans.length))
    without = of_row == 0
    if not without.any():
        return []
    lost = int(tokens[without].sum())
    share = lost / int(tokens.sum())
    return [OverLengthRow(NO_CATEGORY, "no target", int(without.sum()), lost, share, tokens_kept=lost)]


def _main_category(category_ids: NDArray[Any]) -> int:
    on_targets = category_ids[category_ids != 0]
    if len(on_targets) == 0:
        return 0
    if on_targets.min() > 0 and on_targets.max() < _COUNTED:
        return int(np.bincount(on_targets).argmax())
    ids, counts = np.unique(on_targets, return_counts=True)
    return int(ids[counts.argmax()])


def _count(row: OverLengthRow, loss_mask: NDArray[Any], max_tokens: int) -> None:
    """Add one document, loss_mask [length > max_tokens], to its row."""
    was_target = loss_mask != 0
    was_target[0] = False
    is_target = was_target.copy()
    kept = len(loss_mask)
    if row.reason == "split":
        is_target[::max_tokens] = False
    else:
        kept = max_tokens if row.reason == "truncate" else 0
        is_target[kept:] = False
    row.documents += 1
    row.tokens += len(loss_mask)
    row.tokens_kept += kept
    row.tokens_removed += len(loss_mask) - kept
    row.targets_removed += int(was_target.sum()) - int(is_target.sum())
    if was_target.any():
        row.lost_last_target += not is_target[np.flatnonzero(was_target)[-1]]
        row.without_target += not is_target.any()
