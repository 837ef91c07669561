"""Write tokenized chats in Megatron's indexed form, with indices of their loss masks.

    PREFIX.bin, PREFIX.idx              the token ids of every document, int32
    PREFIX_mask.bin, PREFIX_mask.idx    the loss mask of every document, uint8: 1 for a target

Both open as megatron-core's ``IndexedDataset``; document i of one is document i of the other. A mask belongs to the
token at the same place. A dataset whose labels are shifted by one token must shift the mask with them.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from verl_ext.data.stream.megatron.index import IndexWriter
from verl_ext.options import DataError
from verl_ext.text.tokens.documents import Documents


class MaskedIndexes:
    """A writer of the two indices of each source.

    prefixes: {config key that errors name: PREFIX} of the sources, in the order of their numbers.
    """

    def __init__(self, prefixes: Mapping[str, Path]) -> None:
        self._keys = list(prefixes)
        self._tokens = [IndexWriter(prefix, np.int32, key) for key, prefix in prefixes.items()]
        self._masks = [IndexWriter(f"{prefix}_mask", np.uint8, key) for key, prefix in prefixes.items()]

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
