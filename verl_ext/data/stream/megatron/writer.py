"""Tokenize texts into Megatron's indexed form, with one index for each source."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.stream.megatron.index import IndexWriter
from verl_ext.options import DataError
from verl_ext.text.encoder_texts import PlainDocuments, TextTokenizer
from verl_ext.text.read.readers import Batch, read_batches
from verl_ext.text.read.sources import SourceFile, total_bytes
from verl_ext.text.tokenizing import BATCH_BYTES, write_documents
from verl_ext.text.tokens.documents import Counts


class IndexedPart(NamedTuple):
    """The part of a batch that was written, in the units of the progress bar."""

    num_bytes: int
    records: int
    tokens: int


class TextIndexes:
    """A writer of PREFIX.bin and .idx of each source in turn; it removes the files of a source that fails.

    Args:
        prefixes: {config key that errors name: PREFIX} of the sources, in the order of their numbers.
        max_tokens: the tokens after which a source is cut: the document that reaches them is the last one, shortened to
            fit, and no record after it is counted or ends the run.
    """

    def __init__(self, prefixes: Mapping[str, Path], dtype: np.dtype[Any], max_tokens: int | None = None) -> None:
        self.counts = {key: Counts() for key in prefixes}
        self.max_tokens = max_tokens
        self._prefixes, self._dtype, self._source = dict(prefixes), dtype, 0
        self._writer: IndexWriter | None = None

    def is_full(self, source: int) -> bool:
        """Return whether a source, by its number from 1, has reached `max_tokens`."""
        return self.max_tokens is not None and [*self.counts.values()][source - 1].tokens >= self.max_tokens

    def add(self, documents: PlainDocuments) -> IndexedPart:
        """Write a batch's documents, none if the source is full. Raises `DataError` if the batch ends the run."""
        key = [*self._prefixes][documents.source - 1]
        if documents.source != self._source:
            self._close_source()
            self._source, self._writer = documents.source, IndexWriter(self._prefixes[key], self._dtype, key)
        assert self._writer is not None
        if self.is_full(documents.source):
            return IndexedPart(documents.num_bytes, 0, 0)
        counts = self.counts[key]
        tokens, lengths = self._fitting(documents, counts)
        self._writer.add(tokens, lengths)
        counts.add_documents(lengths.tolist())
        is_full = self.is_full(documents.source)
        read = documents.counts(len(lengths) if is_full else None)
        counts.add(read)
        if documents.failure and not is_full:
            raise DataError(documents.failure)
        return IndexedPart(documents.num_bytes, read.records, len(tokens))

    def _fitting(self, documents: PlainDocuments, counts: Counts) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the documents' tokens and lengths up to `max_tokens`."""
        room = len(documents.tokens) if self.max_tokens is None else self.max_tokens - counts.tokens
        if len(documents.tokens) <= room:
            return documents.tokens, documents.lengths
        ends = np.cumsum(documents.lengths, dtype=np.int64)
        last = int(np.searchsorted(ends, room))
        lengths = documents.lengths[: last + 1].copy()
        lengths[last] -= ends[last] - room
        return documents.tokens[:room], lengths

    def _close_source(self) -> None:
        if self._writer is None:
            return
        _check_has_document([*self.counts.items()][self._source - 1])
        self._writer.close()
        self._writer = None

    def close(self) -> None:
        """Finish the last index. Raises `DataError` for a source without a document."""
        self._close_source()
        for counted in self.counts.items():
            _check_has_document(counted)

    def abandon(self) -> None:
        """Remove the files of an index that is not finished."""
        if self._writer is not None:
            self._writer.abandon()


def write_text_indexes(
    files: Sequence[SourceFile],
    tokenizer: TextTokenizer,
    prefixes: Mapping[str, Path],
    *,
    max_tokens: int | None = None,
    tokenized: Callable[[Iterator[Batch]], Iterator[PlainDocuments]] | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> dict[str, Counts]:
    """Write an index of each source of `files`; return the counts by the keys of `prefixes`.

    prefixes, max_tokens: see `TextIndexes`. tokenized: turns batches of `batch_bytes` of text into documents, in order;
    None: this process does this, with the tokenizer's own threads.

    Raises:
        DataError: if a record is bad under on_bad_record=error, a file cannot be read, or a source has no document.
    """
    indexes = TextIndexes(prefixes, tokenizer.dtype, max_tokens)
    batches = read_batches(files, indexes.is_full, batch_bytes, tokenizer.options.read_columns)
    results = map(tokenizer.tokenize, batches) if tokenized is None else tokenized(batches)
    write_documents(results, indexes.add, indexes, total_bytes(files), "index")
    return indexes.counts


def _check_has_document(counted: tuple[str, Counts]) -> None:
    key, counts = counted
    if not counts.documents:
        bad = "; ".join(f"{reason}: {count:,}" for reason, count in sorted(counts.bad.items())) or "no record"
        raise DataError(f"{key} must hold at least one document; got none ({bad})")
