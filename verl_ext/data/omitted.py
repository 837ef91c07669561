"""The documents that packs omit, change or have without targets."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.packing import PackPlan, Spans
from verl_ext.packing.plan import offsets_of

NO_CATEGORY = "(none)"


@dataclass
class OmittedDocuments:
    """The documents of one category that one reason changes or leaves out.

    The reasons are `drop`, `truncate`, `split` (longer than a pack), `empty` (no token, left out), `beyond
    max_samples`, `not drawn` (by data.mixture; also a split document with a piece in no pack), and `no target` (in the
    packs, with nothing to learn from; cut documents are included).

    A cut BABILong prompt has the reason `context truncated` or `question truncated`, and a cut pretraining text has
    `truncated to max_length`; their tokens are those before the cut. The only document of a stream may be `cut into
    training and validation`; the tokens removed lie between the two. A record without a document has `bad record: …`,
    and one with names of special tokens has `special tokens encoded as text`. For reasons other than length, the
    category is that of the document's record, which is known if verl-ext tokenized it.
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


class OverLength(NamedTuple):
    """The documents longer than a pack."""

    rows: NDArray[np.int64]  # [M], ascending
    max_tokens: int
    policy: str  # drop, truncate or split


class OverLengthCount(NamedTuple):
    """The over-length documents of one category; its numbers are those of OmittedDocuments."""

    category: int
    documents: int
    tokens: int
    tokens_kept: int
    targets_removed: int
    lost_last_target: int
    without_target: int


def count_over_length(
    over: OverLength,
    lengths: NDArray[np.int64],
    is_target: NDArray[np.bool_],
    packed_targets: NDArray[np.int64],
    category_ids: NDArray[Any],
) -> NDArray[np.int64]:
    """Count those of D documents that are over-length, as rows of OverLengthCounts.

    is_target, category_ids: of their tokens, one document after the other. packed_targets: the targets of each document
    that packs have, int64[D].
    """
    size, at, offsets = over.max_tokens, np.flatnonzero(lengths > over.max_tokens), offsets_of(lengths)
    length, start, packed = lengths[at], offsets[at], packed_targets[at]
    # A first token is no target. The place of the last one in its document counts only if there is one.
    places = np.flatnonzero(is_target)
    before, until = np.searchsorted(places, start + 1), np.searchsorted(places, start + length)
    targets, last = until - before, np.append(0, places)[until] - start
    is_lost, tokens_kept = {
        "split": (last % size == 0, length),  # it became the first token of a piece
        "truncate": (last >= size, np.full_like(length, size)),
        "drop": (np.ones_like(last, bool), np.zeros_like(length)),
    }[over.policy]
    losses = targets - packed, (targets > 0) & is_lost, (targets > 0) & (packed == 0)
    category = main_categories(category_ids, offsets[:-1])[at]
    return sum_by_category(np.stack([category, np.ones_like(length), length, tokens_kept, *losses], axis=1))


def sum_by_category(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum rows of OverLengthCounts to one for each category, in ascending order."""
    categories, group = np.unique(counts[:, 0], return_inverse=True)
    sums = np.zeros((len(categories), counts.shape[1]), np.int64)
    np.add.at(sums, group, counts)
    sums[:, 0] = categories
    return sums


def main_categories(category_ids: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the most frequent category of each document's tokens, int64[D].

    It is the smallest of several, and 0 if there is only 0, no category.
    """
    changes = np.ones(len(category_ids), bool)
    np.not_equal(category_ids[1:], category_ids[:-1], out=changes[1:])
    changes[starts] = True
    runs = np.flatnonzero(changes)  # categories change rarely, so a document has few runs
    ids, of_run = np.unique(category_ids[runs], return_inverse=True)
    document = np.searchsorted(starts, runs, side="right") - 1
    pairs, of_pair = np.unique(document * len(ids) + of_run, return_inverse=True)
    tokens = np.bincount(of_pair, np.diff(runs, append=len(category_ids)))
    document, category = pairs // len(ids), ids[pairs % len(ids)].astype(np.int64)
    tokens[category == 0] = 0
    best_last = np.lexsort((-category, tokens, document))
    main = np.zeros(len(starts), np.int64)
    main[document[best_last]] = category[best_last]  # the last assignment for a document holds
    return main


@dataclass(frozen=True)
class OmittedReport:
    """A maker of OmittedDocuments from rows of the data.

    categories: the category of every row's record, int[N], None if unknown; names: category number -> name; total: the
    number of tokens of all documents of the set.
    """

    categories: NDArray[Any] | None
    names: Mapping[int, str]
    total: int

    def over_length(
        self, counts: Iterable[OverLengthCount], policy: str, lengths: NDArray[np.integer]
    ) -> list[OmittedDocuments]:
        """Report the documents longer than a pack, then the empty ones.

        lengths: those of the documents in use.
        """
        report = []
        for count in sorted(counts, key=lambda count: (count.category == 0, count.category)):
            category, documents, tokens, kept, *targets = count
            report.append(self._row(category, policy, documents, tokens, kept, *targets))
        empty = int((lengths == 0).sum())
        return [*report, OmittedDocuments(NO_CATEGORY, "empty", documents=empty)] if empty else report

    def by_category(
        self, reason: str, rows: NDArray[np.int64], tokens: NDArray[Any], kept: NDArray[Any] | None = None
    ) -> list[OmittedDocuments]:
        """Report documents by category.

        rows int64[D]: one for each piece, with its tokens and the tokens that are kept (None: none).
        """
        kept = np.zeros_like(tokens) if kept is None else kept
        category = np.zeros(len(rows), np.int64) if self.categories is None else self.categories[rows]
        report = []
        for number in np.unique(category).tolist():
            chosen = category == number
            before, after = int(tokens[chosen].sum(dtype=np.int64)), int(kept[chosen].sum(dtype=np.int64))
            report.append(self._row(number, reason, len(np.unique(rows[chosen])), before, after))
        return report

    def of_plan(self, spans: Spans, plan: PackPlan, targets: NDArray[Any]) -> list[OmittedDocuments]:
        """Report the documents that `plan` lacks, or has without a target.

        targets: the targets of each span, int32[S].
        """
        is_packed = np.zeros(len(spans), bool)
        is_packed[plan.document_index] = True
        row, length = spans.row[is_packed], spans.length[is_packed]
        begins = np.flatnonzero(np.diff(row, prepend=-1))
        of_row, tokens = (np.add.reduceat(values, begins, dtype=np.int64) for values in (targets[is_packed], length))
        none = of_row == 0
        return [
            *self.by_category("not drawn", spans.row[~is_packed], spans.length[~is_packed]),
            *self.by_category("no target", row[begins][none], tokens[none], tokens[none]),
        ]

    def _row(
        self, category: int, reason: str, documents: int, tokens: int, kept: int, *targets: int
    ) -> OmittedDocuments:
        name = self.names.get(category, str(category)) if category > 0 else NO_CATEGORY
        share = tokens / self.total
        return OmittedDocuments(name, reason, documents, tokens, share, kept, tokens - kept, *targets)
