"""The documents that are changed, left out or without a target, by category and reason."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.packing import PackPlan, Spans

NO_CATEGORY = "(none)"


class OverLengthCount(NamedTuple):
    """The documents of one category that are longer than a pack; its numbers are those of DroppedDocuments."""

    category: int
    documents: int
    tokens: int
    tokens_kept: int
    targets_removed: int
    lost_last_target: int
    without_target: int


@dataclass
class DroppedDocuments:
    """The documents of one category that one reason changes or leaves out.

    The reasons are `drop`, `truncate`, `split` (longer than a pack), `empty` (no token, left out), `beyond
    max_samples`, `not drawn` (by data.mixture; also a split document with a piece in no pack), and `no target` (in the
    packs, with nothing to learn from; cut documents are included).

    A cut BABILong prompt has the reason `context truncated` or `question truncated`, and a cut pretraining text has
    `truncated to max_length`; their tokens are those before the cut. The only document of a stream may be `cut into
    training and validation`; the tokens removed lie between the two. A record without a document has `bad record: …`,
    and one with names of special tokens has `special tokens encoded as text`. For reasons other than length, the
    category is known if verl-ext tokenized the documents.
    """

    category: str
    reason: str
    documents: int = 0
    tokens: int = 0
    share: float = 0.0  # share of the tokens of all documents of the set
    tokens_kept: int = 0
    tokens_removed: int = 0  # over all rows, the tokens that no pack holds, each counted once
    # Of documents longer than a pack, drawn or not:
    targets_removed: int = 0  # under `split`, targets that became the first token of a piece
    lost_last_target: int = 0  # documents whose last target was removed
    without_target: int = 0  # documents that had targets and have none left


@dataclass(frozen=True)
class DroppedReport:
    """A maker of DroppedDocuments from rows of the folders.

    categories: the category of every row, int[N], None if unknown; names: category number -> name; total: the number of
    tokens of all documents of the set.
    """

    categories: NDArray[Any] | None
    names: Mapping[int, str]
    total: int

    def over_length(
        self, counts: Iterable[OverLengthCount], policy: str, lengths: NDArray[np.integer]
    ) -> list[DroppedDocuments]:
        """Report the documents longer than a pack, then the empty ones; `lengths` are those of the documents in use."""
        report = []
        for count in sorted(counts, key=lambda count: (count.category == 0, count.category)):
            category, documents, tokens, kept, *targets = count
            report.append(self._row(category, policy, documents, tokens, kept, *targets))
        empty = int((lengths == 0).sum())
        return [*report, DroppedDocuments(NO_CATEGORY, "empty", documents=empty)] if empty else report

    def by_category(
        self, reason: str, rows: NDArray[np.int64], tokens: NDArray[Any], kept: NDArray[Any] | None = None
    ) -> list[DroppedDocuments]:
        """Report the documents `rows` int64[D] (one for each piece), their tokens and the kept tokens (None: none)."""
        kept = np.zeros_like(tokens) if kept is None else kept
        category = np.zeros(len(rows), np.int64) if self.categories is None else self.categories[rows]
        report = []
        for number in np.unique(category).tolist():
            chosen = category == number
            before, after = int(tokens[chosen].sum(dtype=np.int64)), int(kept[chosen].sum(dtype=np.int64))
            report.append(self._row(number, reason, len(np.unique(rows[chosen])), before, after))
        return report

    def left_out(
        self,
        beyond: NDArray[np.int64],
        lengths: NDArray[np.integer],
        spans: Spans,
        plan: PackPlan,
        targets: NDArray[Any],
    ) -> list[DroppedDocuments]:
        """Report the documents `beyond` max_samples, those missing in `plan`, and those in it without a target.

        lengths: the lengths of all rows of the folders; targets: the targets of each span, int32[S].
        """
        held = np.zeros(len(spans), bool)
        held[plan.document_index] = True
        row, length = spans.row[held], spans.length[held]
        begins = np.flatnonzero(np.diff(row, prepend=-1))
        of_row, tokens = (np.add.reduceat(values, begins, dtype=np.int64) for values in (targets[held], length))
        none = of_row == 0
        return [
            *self.by_category("beyond max_samples", beyond, lengths[beyond]),
            *self.by_category("not drawn", spans.row[~held], spans.length[~held]),
            *self.by_category("no target", row[begins][none], tokens[none], tokens[none]),
        ]

    def _row(
        self, category: int, reason: str, documents: int, tokens: int, kept: int, *targets: int
    ) -> DroppedDocuments:
        name = self.names.get(category, str(category)) if category > 0 else NO_CATEGORY
        share = tokens / self.total
        return DroppedDocuments(name, reason, documents, tokens, share, kept, tokens - kept, *targets)
