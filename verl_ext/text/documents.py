"""What tokenizing yields: documents with targets, those over max_tokens cut, a chunk's side by side.

document 1   document 2
5 6 7        8 9          input_ids  5 6 7 8 9      lengths     3 2
0 1 1        0 1          loss_mask  0 1 1 0 1      targets     2 1      lowest_ids  5 8      highest_ids  7 9
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from verl_ext.text.counts import Counts, Run
from verl_ext.text.json_records import BadRecord
from verl_ext.values import DataError


@dataclass
class Document:
    """input_ids[T] int32, loss_mask[T] int8 of one document, and weights[T] float32 where a target has one.

    full_length: its tokens before it was cut; None: it was not.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    weights: np.ndarray | None = None
    full_length: int | None = None

    def part(self, start: int, stop: int) -> "Document":
        """Tokens start..stop as a document of its own: its first token is no target."""
        mask = self.loss_mask[start:stop].copy()
        mask[:1] = 0
        weights = None if self.weights is None else self.weights[start:stop]
        return Document(self.input_ids[start:stop], mask, weights, len(self.input_ids))


@dataclass
class Documents:
    """The documents of a chunk of records.

    Args:
        category_id: number of their source, from 1.
        num_bytes: bytes of the source's files that the records stand for.
        input_ids, loss_mask, weights: int32, int8 and float32 [ΣT]; weights None where no target has one.
        lengths, full_lengths: int32[D]; tokens, and tokens before a cut (None: none was cut).
        counts: what became of the records.
        category_names, category_counts: of each document and of each category, where records give their category.
        category_ids: int32[D], the numbers of category_names, which the process that writes gives.
        preview: the first documents, decoded.
        texts: further columns, a text of each document.
    """

    category_id: int
    num_bytes: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.int8]
    lengths: NDArray[np.int32]
    weights: NDArray[np.float32] | None
    counts: Counts
    full_lengths: NDArray[np.int32] | None = None
    category_names: list[str] | None = None
    category_counts: dict[str, Counts] = field(default_factory=dict)
    category_ids: NDArray[np.int32] | None = None
    preview: list[list[Run]] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def records(self) -> int:
        """Records read."""
        return self.counts.records

    @property
    def tokens(self) -> int:
        """Tokens kept."""
        return self.counts.tokens

    @property
    def targets(self) -> NDArray[np.int32]:
        """int32[D]: target tokens of each document."""
        return self._of_each(np.add, self.loss_mask)

    @property
    def lowest_ids(self) -> NDArray[np.int32]:
        """int32[D]: the lowest token id of each document."""
        return self._of_each(np.minimum, self.input_ids)

    @property
    def highest_ids(self) -> NDArray[np.int32]:
        """int32[D]: the highest token id of each document."""
        return self._of_each(np.maximum, self.input_ids)

    def _of_each(self, reduce: np.ufunc, values: np.ndarray) -> NDArray[np.int32]:
        """A reduction over the tokens of each document; none is without tokens."""
        starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        return reduce.reduceat(values, starts, dtype=np.int32) if len(starts) else np.empty(0, np.int32)


def joined(documents: Sequence[Document], category_id: int, num_bytes: int, counts: Counts) -> Documents:
    """Documents side by side."""
    weights = None
    if any(document.weights is not None for document in documents):
        weights = np.concatenate(
            [np.ones(len(d.input_ids), np.float32) if d.weights is None else d.weights for d in documents]
        )
    lengths = np.array([len(d.input_ids) for d in documents], np.int32)
    return Documents(
        category_id,
        num_bytes,
        np.concatenate([np.empty(0, np.int32), *(d.input_ids for d in documents)]),
        np.concatenate([np.empty(0, np.int8), *(d.loss_mask for d in documents)]),
        lengths,
        weights,
        counts,
        np.array([d.full_length or len(d.input_ids) for d in documents], np.int32),
    )


def fit(document: Document, max_tokens: int | None, policy: str, counts: Counter[str]) -> list[Document]:
    """The documents of at most `max_tokens` tokens that a document becomes; what was done is added to `counts`.

    truncate keeps the first max_tokens tokens, split all tokens in pieces, also those without a target.
    Raises `DataError` under the policy `error`, `BadRecord` where no target is left.
    """
    tokens = len(document.input_ids)
    if max_tokens is None or tokens <= max_tokens:
        return [document]
    if policy == "error":
        raise DataError(
            f"a document must have at most max_tokens={max_tokens} tokens, or over_length=drop|truncate|split be given;"
            f" got {tokens}"
        )
    if policy == "drop":
        counts.update(dropped_documents=1, dropped_tokens=tokens)
        return []
    stop = max_tokens if policy == "truncate" else tokens
    pieces = [document.part(start, min(start + max_tokens, stop)) for start in range(0, stop, max_tokens)]
    targets = [int(piece.loss_mask.sum()) for piece in pieces]
    if not any(targets):
        past = {"truncate": "truncation", "split": "split"}[policy]
        raise BadRecord(f"no_target_after_{past}", f"no target is left of {tokens} tokens at max_tokens={max_tokens}")
    done = {"truncate": "truncated", "split": "split"}[policy]
    counts[f"{done}_documents"] += 1
    counts[f"{done}_targets_lost"] += int(document.loss_mask.sum()) - sum(targets)
    if policy == "truncate":
        counts["truncated_tokens"] += tokens - max_tokens
        counts["truncated_last_target_lost"] += int(document.loss_mask[max_tokens:].any())
    else:
        counts["split_tokens"] += tokens
        counts["split_pieces"] += len(pieces)
        counts["split_pieces_without_target"] += targets.count(0)
    return pieces
