"""Write tokenized chats in Megatron's indexed form, with indices of their loss masks.

    PREFIX.bin, PREFIX.idx              the token ids of every document, int32
    PREFIX_mask.bin, PREFIX_mask.idx    the loss mask of every document, uint8: 1 for a target

Both open as megatron-core's ``IndexedDataset``; document i of one is document i of the other. A mask belongs to the
token at the same place. A dataset whose labels are shifted by one token must shift the mask with them.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from verl_ext.data.stream.megatron.index import IndexWriter
from verl_ext.options import DataError
from verl_ext.packing.plan import pieces_within
from verl_ext.text.tokens.counts import Counts
from verl_ext.text.tokens.documents import Document, Documents, join_documents


class MaskedIndexes:
    """A writer of the two indices of each source.

    Args:
        prefixes: {config key that errors name: PREFIX} of the sources, in the order of their numbers.
        max_document_tokens: the tokens of the longest document (None: of any length), as nothing cuts it later.
        over_length: what becomes of longer ones, as with packs.
    """

    def __init__(
        self, prefixes: Mapping[str, Path], max_document_tokens: int | None = None, over_length: str = "error"
    ) -> None:
        self._keys = list(prefixes)
        self._most, self._over_length = max_document_tokens, over_length
        self._tokens = [IndexWriter(prefix, np.int32, key) for key, prefix in prefixes.items()]
        self._masks = [IndexWriter(f"{prefix}_mask", np.uint8, key) for key, prefix in prefixes.items()]

    def fitting(self, documents: Documents) -> Documents:
        """Return documents, of which too long ones are left out or cut; a piece's first token is no target.

        One of which no target is left is left out. Raises `DataError` under `error`.
        """
        most, lengths, ids, mask = self._most, documents.lengths, documents.input_ids, documents.loss_mask
        if most is None or not (lengths > most).any():
            return documents
        if self._over_length == "error":
            raise DataError(
                f"max_document_tokens must hold every document of {self._keys[documents.category_id - 1]}; got {most},"
                f" and one has {lengths.max()} tokens: raise it or choose over_length=drop|truncate|split"
            )
        spans, pieces = pieces_within(lengths, most, self._over_length), []
        rows, begins = spans.row.tolist(), (documents.starts[spans.row] + spans.start).tolist()
        for begin, length in zip(begins, spans.length.tolist(), strict=True):
            own = mask[begin : begin + length].copy()
            own[0] = 0
            pieces.append(Document(ids[begin : begin + length], own))
        learnt = {row for row, piece in zip(rows, pieces, strict=True) if piece.loss_mask.any()}
        kept = [piece for row, piece in zip(rows, pieces, strict=True) if row in learnt]
        over = Counter(
            documents=int((lengths > most).sum()),
            tokens=len(ids) - sum(len(piece.input_ids) for piece in kept),
            targets=int(mask.sum(dtype=np.int64)) - sum(int(piece.loss_mask.sum()) for piece in kept),
            without_target=len(set(rows) - learnt),
        )
        counts = Counts.total([documents.counts, Counts(over_length=over)])
        return join_documents(kept, documents.category_id, documents.num_bytes, counts)

    def add(self, documents: Documents) -> None:
        """Append documents of one source. Raises `DataError` if they have weights, which the form cannot hold."""
        source = documents.category_id - 1
        if documents.weights is not None:
            raise DataError(
                f"{self._keys[source]} must have no weights with format=megatron, whose masks are 0 and 1; got some"
            )
        self._tokens[source].add(documents.input_ids, documents.lengths)
        self._masks[source].add(documents.loss_mask.view(np.uint8), documents.lengths)

    def close(self) -> None:
        """Complete the files."""
        for writer in (*self._tokens, *self._masks):
            writer.close()

    def abandon(self) -> None:
        """Remove the files that are incomplete."""
        for writer in (*self._tokens, *self._masks):
            writer.abandon()
