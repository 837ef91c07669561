"""Tokenized chats in Megatron's indexed form, each source's tokens with an index of their loss masks beside it.

    PREFIX.bin, PREFIX.idx              the token ids of every document, int32
    PREFIX_mask.bin, PREFIX_mask.idx    as many numbers for every document, uint8: 1 where the token is a target

Both open as megatron-core's ``IndexedDataset``; document i of one is document i of the other. The mask is of the token
at each place: a dataset whose labels are the tokens one place on shifts it with them.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from verl_ext.data.megatron.index import IndexWriter
from verl_ext.text.documents import Documents
from verl_ext.values import DataError


class MaskedIndexes:
    """Writes the two indices of each source.

    prefixes: {config key that errors name: PREFIX} of the sources, in the order of their numbers.
    """

    def __init__(self, prefixes: Mapping[str, Path]) -> None:
        self._keys = list(prefixes)
        self._tokens = [IndexWriter(prefix, np.int32, key) for key, prefix in prefixes.items()]
        self._masks = [IndexWriter(f"{prefix}_mask", np.uint8, key) for key, prefix in prefixes.items()]

    def add(self, documents: Documents) -> None:
        """Append documents of one source. Raises `DataError` for weights, which the form has no place for."""
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
        """Remove the files that are not complete."""
        for writer in (*self._tokens, *self._masks):
            writer.abandon()
