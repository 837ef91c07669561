"""Tokenize texts into Megatron's indexed form, with one index for each source."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.data.stream.megatron.index import IndexWriter
from verl_ext.options import DataError, must
from verl_ext.text.encoder_texts import TextRecordEncoder, optimal_dtype
from verl_ext.text.read.sources import SourceFile
from verl_ext.text.tokenizing import tokenize_files
from verl_ext.text.tokens.counts import Counts
from verl_ext.text.tokens.documents import Documents


class TextIndexes:
    """A writer of each source's PREFIX.bin and .idx, removed if it fails.

    Args:
        prefixes: {config key that errors name: PREFIX} of the sources, in the order of their numbers.
        max_corpus_tokens: the tokens after which a source is cut: the document that reaches them is the last one,
            shortened to fit, and no record after it is counted, except bad ones of its chunk.
    """

    def __init__(
        self, prefixes: Mapping[str, Path], dtype: np.dtype[Any], max_corpus_tokens: int | None = None
    ) -> None:
        self.counts = {key: Counts() for key in prefixes}
        self.max_corpus_tokens = max_corpus_tokens
        self._prefixes, self._dtype, self._source = dict(prefixes), dtype, 0
        self._writer: IndexWriter | None = None

    def is_full(self, source: int) -> bool:
        """Return whether a source, by its number from 1, has reached `max_corpus_tokens`."""
        most = self.max_corpus_tokens
        return most is not None and [*self.counts.values()][source - 1].tokens >= most

    def add(self, documents: Documents) -> Documents:
        """Write a chunk's documents, as far as they fit; return those."""
        source = documents.category_id
        key = [*self._prefixes][source - 1]
        if source != self._source:
            self._close_source()
            self._source, self._writer = source, IndexWriter(self._prefixes[key], self._dtype, key)
        assert self._writer is not None
        if self.max_corpus_tokens is not None:
            documents = _first(documents, self.max_corpus_tokens - self.counts[key].tokens)
        self._writer.add(documents.input_ids, documents.lengths)
        self.counts[key].add(documents.counts, documents.counted())
        return documents

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


def _first(documents: Documents, room: int) -> Documents:
    """Return the documents and records of `room` tokens, the last one shortened."""
    if len(documents.input_ids) < room:
        return documents
    ends = np.cumsum(documents.lengths)
    kept = int(np.searchsorted(ends, room)) + 1 if room else 0
    lengths = documents.lengths[:kept].copy()
    lengths[-1:] -= ends[kept - 1 : kept] - room
    bad = documents.counts.bad.total() if room else 0
    return replace(
        documents,
        input_ids=documents.input_ids[:room],
        loss_mask=documents.loss_mask[:room],
        lengths=lengths,
        full_lengths=lengths,
        special_tokens=documents.special_tokens[:kept],
        counts=replace(documents.counts, records=kept + bad) if room else Counts(),
    )


def write_text_indexes(
    files: Sequence[SourceFile],
    encoder: TextRecordEncoder,
    prefixes: Mapping[str, Path],
    *,
    max_corpus_tokens: int | None = None,
    num_workers: int | None = None,
) -> dict[str, Counts]:
    """Write each source's index; return the counts by the keys of `prefixes`.

    prefixes, max_corpus_tokens: see `TextIndexes`; num_workers: see `tokenize_files`.

    Raises DataError if a record is bad under on_bad_record=error, a file cannot be read, or a source has no document.
    """
    indexes = TextIndexes(prefixes, optimal_dtype(encoder.vocabulary), max_corpus_tokens)
    tokenize_files(
        files, encoder, indexes.add, indexes, num_workers=num_workers, is_full=indexes.is_full, description="index"
    )
    return indexes.counts


def _check_has_document(counted: tuple[str, Counts]) -> None:
    key, counts = counted
    if not counts.documents:
        bad = "; ".join(f"{reason}: {count:,}" for reason, count in sorted(counts.bad.items())) or "no record"
        raise DataError(must(key, "hold at least one document", f"none ({bad})"))
