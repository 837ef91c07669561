"""DocumentScan: facts of the documents to pack that only their tokens show.

Folders that verl-ext tokenized have targets, token ids and categories as columns. Of other folders, and of documents
longer than a pack, each rank reads its share of the tokens once, in blocks of a few million. The result is cached.

    loss_mask      1 1 0 1 1 1 | 0 1 1        documents of 6 and 3 tokens; no first token is ever a target
    pieces of 4    1 1 0 1|1 1 | 0 1 1        targets 2, 1 and 2: nor is the first token of a piece
    in packs       truncate: the first piece of each document; split: all pieces; drop: those that are a document
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.cache import Arrays, fingerprint
from verl_ext.data.tokenized.arrow import fitting
from verl_ext.data.tokenized.ranks import ONE_RANK, Ranks, arrays_of_rank0, arrays_of_ranks
from verl_ext.data.tokenized.source import DocumentSource
from verl_ext.files import CATEGORIES, file_state
from verl_ext.options import must
from verl_ext.packing import Spans, cut_spans
from verl_ext.packing.plan import offsets_of
from verl_ext.progress import terminal_bar
from verl_ext.text.arrow_folder import count_targets


class OverLength(NamedTuple):
    """The documents longer than a pack."""

    rows: NDArray[np.int64]  # [M], ascending
    max_tokens: int
    policy: str  # drop, truncate or split


class OverLengthCount(NamedTuple):
    """The over-length documents of one category, counted as in OmittedDocuments."""

    category: int
    documents: int
    tokens: int
    tokens_kept: int


def count_over_length(over: OverLength, lengths: NDArray[np.int64], category_ids: NDArray[Any]) -> NDArray[np.int64]:
    """Count the over-length documents among D, a row of numbers for each OverLengthCount.

    category_ids: of their tokens, one document after the other.
    """
    at = np.flatnonzero(lengths > over.max_tokens)
    length, category = lengths[at], main_categories(category_ids, offsets_of(lengths)[:-1])[at]
    kept = {"split": length, "truncate": np.full_like(length, over.max_tokens), "drop": np.zeros_like(length)}
    return sum_by_category(np.stack([category, np.ones_like(length), length, kept[over.policy]], axis=1))


def sum_by_category(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum rows of the fields of OverLengthCount to one for each category, in ascending order."""
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


BLOCK_TOKENS = 1 << 22
FORMAT = 5  # of a cached scan; raise it when the scan's meaning changes
# Of no block: the range of its token ids, the categories of its targets, and rows of its over-length documents.
_NOTHING = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, len(OverLengthCount._fields)), np.int64)

Values = dict[str, NDArray[Any]]  # of documents, one after the other, by column


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
    data: DocumentSource,
    spans: Spans,
    over: OverLength,
    ranks: Ranks = ONE_RANK,
    *,
    keep: bool = False,
    block_tokens: int = BLOCK_TOKENS,
) -> DocumentScan:
    """Scan `spans`, at least one; the ranks share the reading.

    keep: reuse the result of an earlier start, and keep this one's, in the cache of `datasets`.

    Raises ValueError if loss_mask is not 0 or 1, a category id is negative, or a loss_weight is negative or not finite
    (it names the row); if there is no target at all; for answers that `check_answers` refuses.
    """
    # Only documents without columns are read, and those that are cut or dropped, to report the loss.
    columns = data.document_columns
    is_read = np.zeros(len(data.lengths), bool)
    is_read[over.rows] = True
    is_read[spans.row if columns is None else spans.row[columns.num_targets[spans.row] < 0]] = True
    of_tokens: Any = slice(None) if columns is None else is_read[spans.row]  # a slice copies nothing
    targets = np.empty(len(spans), np.int32)
    token_ids: list[int] = []
    categories: set[int] = set()
    counts: list[list[int]] = []
    reader = _Reader(data, over, block_tokens)
    if is_read.any():
        cut = [over.max_tokens, over.policy] if len(over.rows) else None
        name = f"scan-{_fingerprint(data, is_read, cut)}" if keep and ranks.rank == 0 else ""
        read = partial(reader.read, is_read, spans.row[of_tokens], ranks)
        facts = arrays_of_ranks(ranks, name, read) if keep else read()
        targets[of_tokens] = facts["targets"]
        token_ids += facts["token_ids"].tolist()
        categories |= set(facts["categories"].tolist())
        counts = facts["over_length"].tolist()
    # All other spans are whole documents, whose facts are columns.
    if columns is not None and not of_tokens.all():
        row = spans.row[~of_tokens]
        targets[~of_tokens] = columns.num_targets[row]
        token_ids += [int(columns.lowest_token_id[row].min()), int(columns.highest_token_id[row].max())]
        categories |= set(np.unique(columns.category[row[columns.num_targets[row] > 0]]).tolist())
    with ranks.guard():
        if not targets.any():
            where = f"after the first token of each of its {len(spans)} documents"
            raise ValueError(f"{data.key} must have target tokens; loss_mask is 0 everywhere {where}")
    if data.units is not None:
        has_target = np.zeros(len(data.lengths), bool)
        has_target[spans.row[targets > 0]] = True
        check_answers(data, has_target, ranks, keep=keep, block_tokens=block_tokens)
    over_length = tuple(OverLengthCount(*numbers) for numbers in counts)
    ids = tuple(sorted(categories - {0}))
    return DocumentScan(targets, min(token_ids), max(token_ids), ids, over_length, reader.tokens_read)


def check_answers(
    data: DocumentSource,
    has_target: NDArray[np.bool_],
    ranks: Ranks = ONE_RANK,
    *,
    keep: bool = False,
    block_tokens: int = BLOCK_TOKENS,
) -> None:
    """Refuse an answer without a target, or equal to the preferred one.

    Raises ValueError with its row. `verl-ext tokenize` leaves such answers out. Of the rows of other programs, rank 0
    reads those that are not known to have a target (bool[N]), and the ids of pairs of one length.

    keep: do not read again what an earlier start found right.
    """
    # The rows of folders that verl-ext tokenized need no check.
    units, columns = data.units, data.document_columns
    if units is None:
        return
    is_checked = (units.answer != 0) & (True if columns is None else columns.num_targets < 0)
    if not is_checked.any():
        return

    def check() -> Arrays:
        _check_targets(data, is_checked & ~has_target, block_tokens)
        chosen, rejected = (rows[is_checked[rows]] for rows in units.pairs)
        _check_different(data, chosen, rejected, block_tokens)
        return {"checked": np.flatnonzero(is_checked)[:1]}

    arrays_of_rank0(ranks, (lambda: f"answers-{_fingerprint(data, is_checked)}") if keep else None, check)


def _check_targets(data: DocumentSource, is_read: NDArray[np.bool_], block_tokens: int) -> None:
    has_none = is_read & (data.lengths == 0)
    over = OverLength(np.zeros(0, np.int64), 0, "error")  # nothing is cut
    rows_to_read = np.flatnonzero(is_read & ~has_none)
    for rows, length, values in _Reader(data, over, block_tokens).blocks(is_read & ~has_none, rows_to_read, True):
        has_none[rows] = count_targets(values["loss_mask"] != 0, offsets_of(length)[:-1]) == 0
    if has_none.any():
        raise ValueError(must(data.key, "have a target in every answer", f"none in row {has_none.argmax()}"))


def _check_different(
    data: DocumentSource, chosen: NDArray[np.int64], rejected: NDArray[np.int64], block_tokens: int
) -> None:
    alike = data.lengths[chosen] == data.lengths[rejected]
    chosen, rejected = chosen[alike], rejected[alike]
    length = data.lengths[chosen].astype(np.int64)
    for first, stop in fitting(0, length, block_tokens):
        starts, pairs = offsets_of(length[first:stop]), slice(first, stop)
        sides = [np.empty(int(starts[-1]), np.int64) for _ in range(2)]
        for rows, ids in zip((chosen, rejected), sides, strict=True):
            data.gather(rows[pairs], np.zeros(stop - first, np.int64), length[pairs], {"input_ids": ids})
        differs = np.logical_or.reduceat(sides[0] != sides[1], starts[:-1])
        if not differs.all():
            at = first + int(differs.argmin())
            got = f"the tokens of row {chosen[at]} again in row {rejected[at]}"
            raise ValueError(must(data.key, "have different answers in a unit", got))


def check_vocabulary(token_range: tuple[int, int], vocab_size: int, key: str = "data.train_dir") -> None:
    """Raise ValueError if a token id of lowest..highest lies outside 0..vocab_size-1."""
    lowest, highest = token_range
    if lowest < 0 or highest >= vocab_size:
        got = f"ids from {lowest} to {highest}: was it tokenized with another tokenizer?"
        raise ValueError(must(key, f"hold token ids of the model's vocabulary (0..{vocab_size - 1})", got))


def shares(lengths: NDArray[np.integer], ranks: int) -> NDArray[np.int64]:
    """Split documents into shares of about the same number of tokens.

    Rank r reads documents shares[r]..shares[r+1]-1, of int64[ranks+1].
    """
    offsets = offsets_of(lengths)
    return np.searchsorted(offsets[:-1], np.arange(ranks + 1) * (int(offsets[-1]) / ranks))


def _fingerprint(data: DocumentSource, is_read: NDArray[np.bool_], cut: list[Any] | None = None) -> str:
    """Return a digest of all that decides what is read and cut."""
    paths = [file.path for file in data.files]
    paths += [path for folder in data.folders if os.path.exists(path := os.path.join(folder, CATEGORIES))]
    files = [file_state(path) for path in paths]
    return fingerprint([FORMAT, len(data.folders), files, cut], np.packbits(is_read))


class _Reader:
    """A reader of documents' tokens, which cuts them as packs do."""

    def __init__(self, data: DocumentSource, over: OverLength, block_tokens: int) -> None:
        self.data, self.over, self.block_tokens = data, over, block_tokens
        self.tokens_read = 0

    def read(self, is_read: NDArray[np.bool_], span_rows: NDArray[np.int64], ranks: Ranks) -> Arrays:
        """Read this rank's share; return the facts of all shares.

        is_read bool[N]: the rows to read, none of them empty; span_rows: the rows of the pieces that packs have.
        """
        targets, own = np.zeros(len(span_rows), np.int32), [[*_NOTHING]]
        with ranks.guard():
            rows = np.flatnonzero(is_read)
            first, last = shares(self.data.lengths[rows], ranks.size)[ranks.rank : ranks.rank + 2].tolist()
            for block in self.blocks(is_read, rows[first:last], has_bar=ranks.rank == 0):
                of_pieces, *facts = self._facts(*block)
                at = int(np.searchsorted(span_rows, block[0][0]))
                targets[at : at + len(of_pieces)] = of_pieces
                own.append(facts)
        ranks.all_reduce(targets)  # every span belongs to one share, so that the sum joins the shares
        shared = ranks.gather([np.concatenate(arrays) for arrays in zip(*own, strict=True)])
        token_ids, categories, counts = (np.concatenate(arrays) for arrays in zip(*shared, strict=True))
        return {
            "targets": targets,
            "token_ids": np.array([token_ids.min(), token_ids.max()] if len(token_ids) else [], np.int64),
            "categories": np.unique(categories),
            "over_length": sum_by_category(counts),
        }

    def blocks(
        self, is_read: NDArray[np.bool_], rows: NDArray[np.int64], has_bar: bool
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], Values]]:
        """Yield rows, lengths and values, in blocks of about block_tokens."""
        if not len(rows):  # there may be fewer documents than ranks
            return
        total = int(self.data.lengths[rows].sum(dtype=np.int64))
        with terminal_bar("reading tokens", has_bar, total=total, unit="tok", unit_scale=True) as bar:
            for begin, end in self.data.blocks(int(rows[0]), int(rows[-1]) + 1, self.block_tokens):
                wanted, length = is_read[begin:end], self.data.lengths[begin:end].astype(np.int64)
                if not wanted.any():
                    continue
                values = self.data.block(begin, end)
                if not wanted.all():  # other documents lie between
                    inside = np.repeat(wanted, length)
                    values, length = {name: flat[inside] for name, flat in values.items()}, length[wanted]
                tokens = int(length.sum())
                yield begin + np.flatnonzero(wanted), length, values
                self.tokens_read += tokens
                bar.update(tokens)

    def _facts(
        self, rows: NDArray[np.int64], length: NDArray[np.int64], values: Values
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the targets of pieces in packs, and facts like _NOTHING."""
        # Cut the documents into pieces, of which the policy decides whether packs have them.
        is_target, policy, max_tokens = values["loss_mask"] != 0, self.over.policy, self.over.max_tokens
        pieces = cut_spans(length, max_tokens, "split")
        starts = offsets_of(pieces.length)[:-1]
        packed = np.ones(len(pieces), bool) if policy == "split" else pieces.start == 0
        if policy == "drop":
            packed &= length[pieces.row] <= max_tokens
        targets, (token_ids, _, counts) = count_targets(is_target, starts)[packed], _NOTHING
        if len(pieces) > len(rows):
            counts = count_over_length(self.over, length, values["category_ids"])
        # Values that no pack has are neither checked nor counted.
        is_target[starts] = False
        if not packed.all():
            inside = np.repeat(packed, pieces.length)
            values, is_target = {name: flat[inside] for name, flat in values.items()}, is_target[inside]
        if len(ids := values["input_ids"]):
            self._check(values, rows[pieces.row[packed]], pieces.length[packed])
            token_ids = np.array([ids.min(), ids.max()], np.int64)
        return targets, token_ids, _distinct(values["category_ids"][is_target]), counts

    def _check(self, values: Values, rows: NDArray[np.int64], lengths: NDArray[np.integer]) -> None:
        """Raise ValueError if values are out of range.

        rows, lengths: of the pieces that the values belong to, for the row in the message.
        """

        def refuse(requirement: str, column: NDArray[Any], wrong: NDArray[np.bool_]) -> None:
            at = int(wrong.argmax())
            row = rows[np.searchsorted(np.cumsum(lengths), at, side="right")]
            raise ValueError(must(self.data.key, f"have {requirement}", f"{column[at]} in row {row}"))

        mask, categories, weight = values["loss_mask"], values["category_ids"], values.get("loss_weight")
        if mask.dtype != bool and (mask.min() < 0 or mask.max() > 1):
            refuse("loss_mask 0 or 1", mask, (mask != 0) & (mask != 1))
        if categories.min() < 0:
            refuse("category_ids at least 0", categories, categories < 0)
        if weight is not None and not (weight.min() >= 0 and weight.max() < np.inf):  # false for nan too
            refuse("loss_weight finite and at least 0", weight, ~((weight >= 0) & (weight < np.inf)))


def _distinct(categories: NDArray[Any]) -> NDArray[np.int64]:
    """Return the distinct categories, all of which are at least 0."""
    if len(categories) and categories.max() < 1 << 20:  # counting is many times faster than sorting
        return np.flatnonzero(np.bincount(categories.astype(np.int64, copy=False)))
    return np.unique(categories.astype(np.int64))
