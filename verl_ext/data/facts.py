"""DocumentScan: facts of documents that only their tokens show.

Folders that verl-ext tokenized have targets, token ids and categories as columns. For other folders, and for documents
longer than a pack, each rank reads its share of the tokens once, in blocks of a few million. The result is cached.

    loss_mask      1 1 0 1 1 1 | 0 1 1        documents of 6 and 3 tokens; no first token is ever a target
    running      0 1 2 2 3 4 5   5 6 7        targets: 5-1, 7-5
    pieces of 4    [0,4) [4,6)   [0,3)        3-1, 5-4, 7-5: nor is the first token of a piece
    kept           truncate: the first piece of each document; split: all pieces; drop: those that are a document
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.arrow import TokenizedData
from verl_ext.data.content import Arrays, found_once
from verl_ext.data.omitted import OverLengthCount
from verl_ext.data.ranks import ONE_RANK, Ranks
from verl_ext.files import CATEGORIES, file_state, fingerprint
from verl_ext.packing import Spans, cut_spans
from verl_ext.progress import terminal_bar

BLOCK_TOKENS = 1 << 22
FORMAT = 4  # of a cached scan; raise it when the scan's meaning changes


class OverLength(NamedTuple):
    """The documents longer than a pack: rows int64[M], ascending; policy: drop, truncate or split."""

    rows: NDArray[np.int64]
    max_tokens: int
    policy: str


@dataclass(frozen=True)
class DocumentScan:
    """The facts of the documents to pack.

    targets: the target tokens of each span, int32[S], whose first token never is one. min_token_id, max_token_id, and
    category_ids (> 0, ascending) of the targets. over_length: the documents longer than a pack, by category.
    tokens_read: the tokens that this rank read.
    """

    targets: NDArray[np.int32]
    min_token_id: int
    max_token_id: int
    category_ids: tuple[int, ...]
    over_length: tuple[OverLengthCount, ...] = ()
    tokens_read: int = 0


def scan_documents(
    data: TokenizedData,
    spans: Spans,
    over: OverLength,
    ranks: Ranks = ONE_RANK,
    *,
    keep: bool = False,
    block_tokens: int = BLOCK_TOKENS,
) -> DocumentScan:
    """Scan `spans` (at least one); collective, and each rank reads about as many tokens as any other.

    keep: reuse the result of an earlier start, and keep this one's, in the cache of `datasets`.

    Raises:
        ValueError: if loss_mask is not 0 or 1, a category id is negative, or a loss_weight is negative or not finite
            (it names the row); if there is no target at all.
    """
    columns = data.document_columns
    is_read = np.zeros(len(data), bool)
    is_read[over.rows] = True
    is_read[spans.row if columns is None else spans.row[columns.num_targets[spans.row] < 0]] = True
    of_tokens: Any = slice(None) if columns is None else is_read[spans.row]  # a slice copies nothing
    targets = np.empty(len(spans), np.int32)
    token_ids: list[int] = []
    categories: set[int] = set()
    counts: list[list[int]] = []
    reader = _Reader(data, is_read, spans.row[of_tokens], over, block_tokens)
    if is_read.any():
        name = f"scan-{_fingerprint(data, is_read, over)}" if keep and ranks.rank == 0 else ""
        found = found_once(name, ranks, lambda: reader.read(ranks)) if keep else reader.read(ranks)
        targets[of_tokens] = found["targets"]
        token_ids += found["token_ids"].tolist()
        categories |= set(found["categories"].tolist())
        counts = found["over_length"].tolist()
    if columns is not None and not of_tokens.all():
        row = spans.row[~of_tokens]
        targets[~of_tokens] = columns.num_targets[row]
        token_ids += [int(columns.lowest_token_id[row].min()), int(columns.highest_token_id[row].max())]
        categories |= set(np.unique(columns.category[row[columns.num_targets[row] > 0]]).tolist())
    with ranks.guard():
        if not targets.any():
            where = f"after the first token of each of its {len(spans)} documents"
            raise ValueError(f"{data.key} must have target tokens; loss_mask is 0 everywhere {where}")
    over_length = tuple(OverLengthCount(*numbers) for numbers in counts)
    ids = tuple(sorted(categories - {0}))
    return DocumentScan(targets, min(token_ids), max(token_ids), ids, over_length, reader.tokens_read)


def check_vocabulary(token_range: tuple[int, int], vocab_size: int, key: str = "data.train_dir") -> None:
    """Raise ValueError if a token id of lowest..highest lies outside 0..vocab_size-1."""
    lowest, highest = token_range
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"{key} must hold token ids of the model's vocabulary (0..{vocab_size - 1}); got ids from "
            f"{lowest} to {highest}: was it tokenized with another tokenizer?"
        )


def shares(lengths: NDArray[np.integer], ranks: int) -> NDArray[np.int64]:
    """Split documents of these lengths (at least one) into shares of the ranks, int64[ranks+1].

    Rank r reads documents shares[r]..shares[r+1]-1. All shares have about the same number of tokens.
    """
    begins = np.cumsum(lengths, dtype=np.int64)
    total = int(begins[-1])
    begins -= lengths
    return np.searchsorted(begins, np.arange(ranks + 1) * (total / ranks))


def sum_by_category(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum the rows of OverLengthCounts to one for each category, in ascending order."""
    categories, group = np.unique(counts[:, 0], return_inverse=True)
    sums = np.zeros((len(categories), counts.shape[1]), np.int64)
    np.add.at(sums, group, counts)
    sums[:, 0] = categories
    return sums


def _fingerprint(data: TokenizedData, is_read: NDArray[np.bool_], over: OverLength) -> str:
    """Return a digest of the data files, their categories, and the documents that are read and cut."""
    paths = [file.path for file in data.files]
    paths += [path for folder in data.folders if os.path.exists(path := os.path.join(folder, CATEGORIES))]
    files = [file_state(path) for path in paths]
    cut = [over.max_tokens, over.policy] if len(over.rows) else None
    return fingerprint([FORMAT, len(data.folders), files, cut], np.packbits(is_read))


class _Reader:
    """A reader of the documents of is_read bool[N]; it cuts those longer than `over.max_tokens` into pieces.

    span_rows: the rows of their spans, which are the pieces that are kept.
    """

    def __init__(
        self,
        data: TokenizedData,
        is_read: NDArray[np.bool_],
        span_rows: NDArray[np.int64],
        over: OverLength,
        block_tokens: int,
    ) -> None:
        self.data, self.is_read, self.over, self.block_tokens = data, is_read, over, block_tokens
        self.tokens_read = 0
        self._span_rows, self._targets = span_rows, np.zeros(len(span_rows), np.int32)
        # Of each block: lowest and highest token id, categories of targets, and OverLengthCounts.
        self._token_ids, self._categories = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        self._counts = [np.zeros((0, len(OverLengthCount._fields)), np.int64)]

    def read(self, ranks: Ranks) -> Arrays:
        """Read this rank's share, with a progress bar after 3 s; return the facts of all shares."""
        with ranks.guard():
            rows = np.flatnonzero(self.is_read)
            first, last = shares(self.data.lengths[rows], ranks.size)[ranks.rank : ranks.rank + 2].tolist()
            if first < last:  # there may be fewer documents than ranks
                self._read_rows(rows[first:last], has_bar=ranks.rank == 0)
        ranks.all_reduce(self._targets)  # every span belongs to one share, so that the sum joins the shares
        lists = (self._token_ids, self._categories, self._counts)
        shared = ranks.gather([np.concatenate(arrays) for arrays in lists])
        token_ids, categories, counts = (np.concatenate(parts) for parts in zip(*shared, strict=True))
        return {
            "targets": self._targets,
            "token_ids": np.array([token_ids.min(), token_ids.max()] if len(token_ids) else [], np.int64),
            "categories": np.unique(categories),
            "over_length": sum_by_category(counts),
        }

    def _read_rows(self, rows: NDArray[np.int64], has_bar: bool) -> None:
        total = int(self.data.lengths[rows].sum(dtype=np.int64))
        with terminal_bar("reading tokens", has_bar, total=total, unit="tok", unit_scale=True) as bar:
            for begin, end in self.data.blocks(int(rows[0]), int(rows[-1]) + 1, self.block_tokens):
                before = self.tokens_read
                self._read_block(begin, end)
                bar.update(self.tokens_read - before)

    def _read_block(self, begin: int, end: int) -> None:
        """Read those of rows begin..end-1 that are to be read; none of them is empty."""
        is_read = self.is_read[begin:end]
        rows = begin + np.flatnonzero(is_read)
        if not len(rows):
            return
        length, values = self.data.lengths[begin:end].astype(np.int64), self.data.block(begin, end)
        if len(rows) < end - begin:  # other documents lie between
            wanted = np.repeat(is_read, length)
            values, length = {name: flat[wanted] for name, flat in values.items()}, length[is_read]
        ends = np.cumsum(length)
        starts, tokens = ends - length, int(ends[-1])
        self.tokens_read += tokens
        is_target = values["loss_mask"] != 0
        running = np.zeros(tokens + 1, np.int32)
        np.cumsum(is_target, out=running[1:])
        inside, first = None, starts
        if length.max() <= self.over.max_tokens:
            targets = running[ends] - running[starts + 1]
        else:
            pieces = cut_spans(length, self.over.max_tokens, "split")
            first = starts[pieces.row] + pieces.start
            targets = running[first + pieces.length] - running[first + 1]
            kept = np.ones(len(pieces), bool)
            if self.over.policy != "split":
                kept = pieces.start == 0
            if self.over.policy == "drop":
                kept &= length[pieces.row] <= self.over.max_tokens
            kept_targets = np.bincount(pieces.row, targets * kept, len(rows)).astype(np.int64)
            self._count_over_length(length, ends, is_target, running, kept_targets, values["category_ids"])
            inside, targets = np.repeat(kept, pieces.length), targets[kept]
        at = np.searchsorted(self._span_rows, begin)
        self._targets[at : at + len(targets)] = targets
        is_target[first] = False
        if inside is not None:  # the packs lack tokens that are cut off or dropped
            values, is_target = {name: flat[inside] for name, flat in values.items()}, is_target[inside]
        if len(ids := values["input_ids"]):

            def row_of(at: int) -> int:
                token = at if inside is None else np.flatnonzero(inside)[at]
                return int(rows[np.searchsorted(ends, token, side="right")])

            self._check(values, row_of)
            self._token_ids.append(np.array([ids.min(), ids.max()], np.int64))
            self._categories.append(_distinct(values["category_ids"][is_target]))

    def _check(self, values: dict[str, NDArray[Any]], row_of: Callable[[int], int]) -> None:
        """Raise ValueError, with the row of the first value, if values are out of range."""

        def refuse(requirement: str, found: NDArray[Any], wrong: NDArray[np.bool_]) -> None:
            at = int(wrong.argmax())
            raise ValueError(f"{self.data.key} must have {requirement}; got {found[at]} in row {row_of(at)}")

        mask, categories, weight = values["loss_mask"], values["category_ids"], values.get("loss_weight")
        if mask.dtype != bool and (mask.min() < 0 or mask.max() > 1):
            refuse("loss_mask 0 or 1", mask, (mask != 0) & (mask != 1))
        if categories.min() < 0:
            refuse("category_ids at least 0", categories, categories < 0)
        if weight is not None and not (weight.min() >= 0 and weight.max() < np.inf):  # false for nan too
            refuse("loss_weight finite and at least 0", weight, ~((weight >= 0) & (weight < np.inf)))

    def _count_over_length(
        self,
        lengths: NDArray[np.int64],
        ends: NDArray[np.int64],
        is_target: NDArray[np.bool_],
        running: NDArray[np.int32],
        kept_targets: NDArray[np.int64],
        category_ids: NDArray[Any],
    ) -> None:
        """Count the over-length documents of a block; running: the number of targets before each of its tokens."""
        policy, size = self.over.policy, self.over.max_tokens
        at = np.flatnonzero(lengths > size)
        length, end = lengths[at], ends[at]
        start = end - length
        targets = running[end] - running[start + 1]
        kept, has_target = kept_targets[at], targets > 0
        last = np.zeros_like(length)  # the place of the last target
        last[has_target] = np.flatnonzero(is_target)[running[end[has_target]] - 1] - start[has_target]
        is_lost, tokens_kept = {
            "split": (last % size == 0, length),
            "truncate": (last >= size, np.full_like(length, size)),
            "drop": (np.ones_like(has_target), np.zeros_like(length)),
        }[policy]
        losses = targets - kept, has_target & is_lost, has_target & (kept == 0)
        category = main_categories(category_ids, ends - lengths)[at]
        counts = np.stack([category, np.ones_like(length), length, tokens_kept, *losses], axis=1)
        self._counts.append(sum_by_category(counts.astype(np.int64)))


def _distinct(categories: NDArray[Any]) -> NDArray[np.int64]:
    """Return the distinct categories, all of which are at least 0."""
    categories = categories.astype(np.int64, copy=False)
    if len(categories) and categories.max() < 1 << 20:  # counting is many times faster than sorting
        return np.flatnonzero(np.bincount(categories))
    return np.unique(categories)


def main_categories(category_ids: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the most frequent category of each document, int64[D]; the smallest of several, 0 if there is only 0."""
    changes = np.ones(len(category_ids), bool)
    np.not_equal(category_ids[1:], category_ids[:-1], out=changes[1:])
    changes[starts] = True
    runs = np.flatnonzero(changes)  # categories change rarely, so a document has few runs
    ids, of_run = np.unique(category_ids[runs], return_inverse=True)
    document = np.searchsorted(starts, runs, side="right") - 1
    pairs, of_pair = np.unique(document * len(ids) + of_run, return_inverse=True)
    tokens = np.bincount(of_pair, np.diff(runs, append=len(category_ids)))
    document, category = pairs // len(ids), ids[pairs % len(ids)].astype(np.int64)
    named = category != 0
    document, category, tokens = document[named], category[named], tokens[named]
    best_last = np.lexsort((-category, tokens, document))
    main = np.zeros(len(starts), np.int64)
    main[document[best_last]] = category[best_last]  # the last assignment for a document holds
    return main
