"""Write tokenized chats in Megatron's indexed form, with their loss masks' indices.

    PREFIX.bin, PREFIX.idx              the token ids of every document, int32
    PREFIX_mask.bin, PREFIX_mask.idx    the loss mask of every document, uint8: 1 for a target

Both open as megatron-core's ``IndexedDataset``; document i of one is document i of the other. A mask belongs to the
token at the same place. A dataset whose labels are shifted by one token must shift the mask with them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from verl_ext.data.stream.megatron.index import IndexWriter
from verl_ext.options import DataError, must
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
        """Leave out or cut too long documents; a piece begins without target.

        Also left out is one without a target left. Raises `DataError` for weights and answers, which the form cannot
        hold, and under `error`.
        """
        key, lengths, most = self._keys[documents.category_id - 1], documents.lengths, self._most
        if documents.units is not None:
            needed = "hold no preferences with format=megatron, which cannot say which is rejected"
            raise DataError(must(key, needed, "some"))
        if documents.weights is not None:
            raise DataError(must(key, "have no weights with format=megatron, whose masks are 0 and 1", "some"))
        if most is None or not (lengths > most).any():
            return documents
        if self._over_length == "error":
            got = f"{most}, and one has {lengths.max()} tokens: raise it or choose over_length=drop|truncate|split"
            raise DataError(must("max_document_tokens", f"hold every document of {key}", got))
        kept: list[Document] = []
        for start, length in zip(documents.starts.tolist(), lengths.tolist(), strict=True):
            stop = {"drop": 0 if length > most else length, "truncate": most, "split": length}[self._over_length]
            pieces = []
            for at in range(start, start + min(stop, length), most):
                mask = documents.loss_mask[at : min(at + most, start + length)].copy()
                mask[0] = 0
                pieces.append(Document(documents.input_ids[at : at + len(mask)], mask))
            kept += pieces if any(piece.loss_mask.any() for piece in pieces) else []
        found = join_documents(kept, documents.category_id, documents.num_bytes, counts=documents.counts)
        whole, rest = documents.counted(), found.counted()
        over = Counter(documents=int((lengths > most).sum()), tokens=whole.tokens - rest.tokens)
        over["targets"] = whole.target_tokens - rest.target_tokens
        more = Counts(over_length=over, special_tokens=whole.special_tokens)
        return replace(found, counts=Counts().add(documents.counts, more))

    def add(self, documents: Documents) -> None:
        """Append documents of one source."""
        source = documents.category_id - 1
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
