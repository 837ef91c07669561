"""Texts tokenized into Megatron's indexed form, an index for each source: cut after so many tokens, and counted."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.megatron.index import IndexWriter
from verl_ext.progress import Progress
from verl_ext.text.documents import Counts
from verl_ext.text.plain_text import PlainDocuments, TextTokenizer
from verl_ext.text.readers import Batch, read_batches
from verl_ext.text.sources import SourceFile, total_bytes
from verl_ext.values import DataError

BATCH_BYTES = 4 << 20  # of text handed to a tokenizer whose own threads share the documents of a call


class Written(NamedTuple):
    """What was written of a batch, in the units of the progress bar."""

    num_bytes: int
    records: int
    tokens: int


class TextIndex:
    """A context that writes `prefix`.bin and .idx, complete after it and removed after an error.

    max_tokens: where the stream is cut: the document that reaches it is its last, shortened to fit, and no record after
    that document is counted or ends the run. key: the config key of the texts, which errors name.
    """

    def __init__(
        self, prefix: Path, dtype: np.dtype, max_tokens: int | None = None, key: str = "data.train_dir"
    ) -> None:
        self.max_tokens = max_tokens
        self.counts = Counts()
        self._writer = IndexWriter(prefix, dtype, key)

    def __enter__(self) -> "TextIndex":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._writer.close()
        else:
            self._writer.abandon()

    @property
    def is_full(self) -> bool:
        return self.max_tokens is not None and self.counts.tokens >= self.max_tokens

    def add(self, documents: PlainDocuments) -> Written:
        """Write a batch's documents, none once full. Raises `DataError` with what ends the run, if it is reached."""
        if self.is_full:
            return Written(documents.num_bytes, 0, 0)
        tokens, lengths = self._fitting(documents)
        self._writer.add(tokens, lengths)
        counts, special = self.counts, documents.special_tokens[: len(lengths)]
        counts.add_documents(lengths.tolist())
        counts.add_special_tokens(int(special.sum()), int((special > 0).sum()))
        bad = [bad for bad in documents.bad if bad.after < len(lengths) or not self.is_full]
        for record in bad:
            counts.add_bad(record.reason, record.line)
        counts.records += len(lengths) + len(bad)
        if documents.failure and not self.is_full:
            raise DataError(documents.failure)
        return Written(documents.num_bytes, len(lengths) + len(bad), len(tokens))

    def _fitting(self, documents: PlainDocuments) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The documents' tokens and lengths up to `max_tokens`."""
        room = len(documents.tokens) if self.max_tokens is None else self.max_tokens - self.counts.tokens
        if len(documents.tokens) <= room:
            return documents.tokens, documents.lengths
        ends = np.cumsum(documents.lengths, dtype=np.int64)
        last = int(np.searchsorted(ends, room))
        lengths = documents.lengths[: last + 1].copy()
        lengths[last] -= ends[last] - room
        return documents.tokens[:room], lengths


def write_text_indices(
    files: Sequence[SourceFile],
    tokenizer: TextTokenizer,
    prefixes: dict[str, Path],
    *,
    max_tokens: int | None = None,
    progress: bool = True,
    tokenized: Callable[[Iterator[Batch]], Iterator[PlainDocuments]] | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> dict[str, Counts]:
    """Write an index of each source of `files`.

    Args:
        prefixes: {config key that errors name: PREFIX} of the sources, in the order of their numbers.
        max_tokens: where each source is cut.
        tokenized: turns batches of `batch_bytes` of text into documents, in order; None: this process does, with the
            tokenizer's own threads.

    Returns:
        What was counted, by the same keys.

    Raises:
        DataError: a bad record under on_bad_record=error, a file that cannot be read, a source without a document.
    """
    counts = {key: Counts() for key in prefixes}
    full: set[int] = set()

    def written() -> Generator[Written, None, None]:
        batches = read_batches(files, full.__contains__, batch_bytes)
        results = map(tokenizer.tokenize, batches) if tokenized is None else tokenized(batches)
        for source, documents in groupby(results, key=lambda result: result.source):
            key = list(prefixes)[source - 1]
            unread = sum(file.num_bytes or 0 for file in files if file.category_id == source)
            with TextIndex(prefixes[key], tokenizer.dtype, max_tokens, key) as index:
                counts[key] = index.counts
                for result in documents:
                    done = index.add(result)
                    if index.is_full:
                        full.add(source)
                    unread -= done.num_bytes
                    yield done
                yield Written(max(unread, 0), 0, 0)
                _check_has_document(key, index.counts)
        for key, count in counts.items():
            _check_has_document(key, count)

    begun = time.monotonic()
    with closing(written()) as work:
        first = []
        for done in work:  # until there is a document: a mistake before it is reported without a bar
            first.append(done)
            if done.tokens:
                break
        with Progress(total_bytes(files), "index") if progress else nullcontext() as bar:
            if bar is not None:
                bar.started = begun
            for done in chain(first, work):
                if bar is not None:
                    bar.add(done)
    return counts


def _check_has_document(key: str, counts: Counts) -> None:
    if not counts.documents:
        bad = "; ".join(f"{reason}: {count:,}" for reason, count in sorted(counts.bad.items())) or "no record"
        raise DataError(f"{key} must hold at least one document; got none ({bad})")
