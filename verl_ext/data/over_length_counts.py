"""What over-length handling does to the tokens and targets of the documents that are longer than a pack.

The documents are read in blocks of whole ones, so that ranks may share them and a memo may keep the counts:

    loss_mask      1 1 0 1 1 1 | 0 0 0 0 1       documents of 6 and 5 tokens, cut after 4
    targets        4             1               the first token of a document is never one
    truncate       2 left        0 left
    split          3 left        0 left          nor is the first token of a piece
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from verl_ext.data.tokenised_data import TokenisedData

BLOCK_TOKENS = 1 << 22


class OverLengthCount(NamedTuple):
    """The over-length documents of one category; the numbers are those of OverLengthRow."""

    category: int
    documents: int
    tokens: int
    tokens_kept: int
    targets_removed: int
    lost_last_target: int
    without_target: int


@dataclass(frozen=True)
class OverLengthDocuments:
    """rows int64[M] ascending, their lengths int64[M] > max_tokens; policy: drop, truncate or split."""

    rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    max_tokens: int
    policy: str

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, lengths: NDArray[np.int64], max_tokens: int, policy: str) -> "OverLengthDocuments":
        """Those of rows 0..N-1 with these lengths, int64[N]."""
        rows = np.flatnonzero(lengths > max_tokens)
        return cls(rows, lengths[rows], max_tokens, policy)

    def part(self, first: int, last: int) -> "OverLengthDocuments":
        """Documents first..last-1 of these."""
        return OverLengthDocuments(self.rows[first:last], self.lengths[first:last], self.max_tokens, self.policy)


def count_over_length(
    data: TokenisedData, documents: OverLengthDocuments, block_tokens: int = BLOCK_TOKENS, progress: bool = True
) -> tuple[OverLengthCount, ...]:
    """By category, ascending; reads each document once. A document's category is its most frequent one but 0, of
    equals the smallest. With `progress`, a bar when it takes more than 3 s."""
    if len(documents) == 0:
        return ()
    counts: list[OverLengthCount] = []
    off = None if progress else True  # None: where nobody looks
    with tqdm(total=len(documents), desc="counting over-length documents", unit="doc", delay=3, disable=off) as bar:
        for begin, end in data.blocks(int(documents.rows[0]), int(documents.rows[-1]) + 1, block_tokens):
            low, high = np.searchsorted(documents.rows, [begin, end])
            if low < high:
                counts += _count_block(data, begin, end, documents.part(int(low), int(high)))
                bar.update(int(high - low))
    return add_counts(counts)


def add_counts(counts: Iterable[OverLengthCount]) -> tuple[OverLengthCount, ...]:
    """One for each category, ascending."""
    sums: dict[int, NDArray[np.int64]] = {}
    for category, *numbers in counts:
        sums[category] = sums.get(category, np.zeros(len(numbers), np.int64)) + np.asarray(numbers)
    return tuple(OverLengthCount(category, *sums[category].tolist()) for category in sorted(sums))


def _count_block(data: TokenisedData, begin: int, end: int, documents: OverLengthDocuments) -> list[OverLengthCount]:
    offsets, loss_mask = data.columns["loss_mask"].block(begin, end)
    category_ids = data.columns["category_ids"].block(begin, end)[1]
    length = documents.lengths
    ends = np.cumsum(length)
    starts = ends - length
    if ends[-1] < offsets[-1]:  # documents that fit lie between
        wanted = np.repeat(offsets[documents.rows - begin] - starts, length) + np.arange(ends[-1])
        loss_mask, category_ids = loss_mask[wanted], category_ids[wanted]
    categories = _main_categories(category_ids, starts)
    per_document = np.stack(
        [np.ones_like(length), length, _tokens_kept(documents), *_targets_lost(loss_mask != 0, starts, documents)]
    )
    found, of_document = np.unique(categories, return_inverse=True)
    sums = np.zeros((len(found), len(per_document)), np.int64)
    np.add.at(sums, of_document, per_document.T)
    return [OverLengthCount(category, *row) for category, row in zip(found.tolist(), sums.tolist(), strict=True)]


def _tokens_kept(documents: OverLengthDocuments) -> NDArray[np.int64]:
    if documents.policy == "split":
        return documents.lengths
    return np.full_like(documents.lengths, documents.max_tokens if documents.policy == "truncate" else 0)


def _targets_lost(
    is_target: NDArray[np.bool_], starts: NDArray[np.int64], documents: OverLengthDocuments
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """(targets removed, whether the last one was, whether there were targets and none is left), of each document;
    is_target of their tokens is overwritten."""
    size, policy = documents.max_tokens, documents.policy
    is_target[starts] = False
    ends = starts + documents.lengths
    running = np.zeros(len(is_target) + 1, np.int64)
    np.cumsum(is_target, out=running[1:])
    before = running[ends] - running[starts]
    if policy == "split":
        cuts = (documents.lengths - 1) // size
        nth = np.arange(cuts.sum()) - np.repeat(np.cumsum(cuts) - cuts, cuts) + 1
        at_cuts = is_target[np.repeat(starts, cuts) + nth * size]
        removed = np.add.reduceat(at_cuts, np.cumsum(cuts) - cuts, dtype=np.int64)
    else:
        removed = running[ends] - running[starts + (size if policy == "truncate" else 0)]
    had = before > 0
    last = np.zeros_like(before)
    last[had] = np.flatnonzero(is_target)[running[ends[had]] - 1] - starts[had]
    gone = {"split": last % size == 0, "truncate": last >= size, "drop": np.ones_like(had)}[policy]
    return removed, had & gone, had & (removed == before)


def _main_categories(category_ids: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[documents]: the most frequent category of each but 0, of equals the smallest; 0 where there is no other."""
    changes = np.ones(len(category_ids), bool)
    np.not_equal(category_ids[1:], category_ids[:-1], out=changes[1:])
    changes[starts] = True
    runs = np.flatnonzero(changes)  # categories change rarely: a few runs a document instead of its tokens
    ids, of_run = np.unique(category_ids[runs], return_inverse=True)
    document = np.searchsorted(starts, runs, side="right") - 1
    pairs, of_pair = np.unique(document * len(ids) + of_run, return_inverse=True)
    tokens = np.bincount(of_pair, np.diff(runs, append=len(category_ids)))
    document, category = pairs // len(ids), ids[pairs % len(ids)].astype(np.int64)
    named = category != 0
    document, category, tokens = document[named], category[named], tokens[named]
    best_last = np.lexsort((-category, tokens, document))
    main = np.zeros(len(starts), np.int64)
    main[document[best_last]] = category[best_last]  # of one document, the last assignment holds
    return main
