"""One source's documents written as `.bin` and `.idx`: cut after so many tokens, and counted."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from verl_ext.data.megatron.index import IndexWriter
from verl_ext.progress import Progress
from verl_ext.text.counts import Counts
from verl_ext.text.plain_text import Documents, TextOptions, TextTokenizer
from verl_ext.text.readers import read_batches
from verl_ext.text.sources import SourceFile, total_bytes
from verl_ext.values import DataError

BATCH_BYTES = 4 << 20  # of text handed to a tokenizer whose own threads share the documents of a call


@dataclass
class Written:
    """What was added, in the units of the progress bar."""

    num_bytes: int
    records: int
    tokens: int


class TextIndex:
    """A context that writes `prefix.bin` and `prefix.idx`, complete after `close()` and gone after an error.

    `max_tokens` cuts the stream: the document that reaches it is its last, shortened to fit, and no record after that
    document is counted or can end the run.
    """

    def __init__(
        self, prefix: Path, dtype: np.dtype, max_tokens: int | None = None, key: str = "data.train_dir"
    ) -> None:
        """`key`: the config key of the texts, which an error of a document too long for the format names."""
        self.max_tokens = max_tokens
        self.tally = Counts()
        self._writer = IndexWriter(prefix, dtype, key)

    def __enter__(self) -> "TextIndex":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._writer.abandon()

    @property
    def is_full(self) -> bool:
        """Whether `max_tokens` is reached."""
        return self.max_tokens is not None and self.tally.tokens >= self.max_tokens

    def add(self, documents: Documents) -> Written:
        """Write a batch's documents, none once full. Raises `DataError` with what ends the run, if it is reached."""
        if self.is_full:
            return Written(documents.num_bytes, 0, 0)
        tokens, lengths = self._fitting(documents)
        self._writer.add(tokens, lengths)
        self._count(lengths)
        special = documents.special_tokens[: len(lengths)]
        self.tally.add_special_tokens(int(special.sum()), int((special > 0).sum()))
        bad = [bad for bad in documents.bad if bad.after < len(lengths) or not self.is_full]
        for record in bad:
            self.tally.add_bad(record.reason, record.line)
        self.tally.records += len(lengths) + len(bad)
        if documents.failure and not self.is_full:
            raise DataError(documents.failure)
        return Written(documents.num_bytes, len(lengths) + len(bad), len(tokens))

    def _fitting(self, documents: Documents) -> tuple[np.ndarray, np.ndarray]:
        """The documents' tokens and lengths up to `max_tokens`."""
        if self.max_tokens is None:
            return documents.tokens, documents.lengths
        room = self.max_tokens - self.tally.tokens
        if len(documents.tokens) <= room:
            return documents.tokens, documents.lengths
        ends = np.cumsum(documents.lengths, dtype=np.int64)
        last = int(np.searchsorted(ends, room))
        lengths = documents.lengths[: last + 1].copy()
        lengths[last] -= ends[last] - room
        return documents.tokens[:room], lengths

    def _count(self, lengths: np.ndarray) -> None:
        self.tally.documents += len(lengths)
        self.tally.tokens += int(lengths.sum(dtype=np.int64))
        values, counts = np.unique(lengths, return_counts=True)
        self.tally.lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def close(self) -> None:
        """Finish both files."""
        self._writer.close()


def write_text_index(
    files: Sequence[SourceFile],
    tokenizer: Any,
    prefix: Path,
    options: TextOptions,
    *,
    max_tokens: int | None = None,
    progress: bool = True,
    key: str = "data.train_dir",
) -> Counts:
    """Tokenise files in this process, with the tokenizer's own threads, into `prefix.bin` and `prefix.idx`.

    The bytes are those that the command writes of the same files. `key`: see `TextIndex`. Raises `DataError` for a bad
    record under `on_bad_record=error`, a file that cannot be read, and files that hold no document; `UsageError` where
    the tokenizer lacks a token that is to be added.
    """
    worker = TextTokenizer(tokenizer, options)
    with TextIndex(prefix, worker.dtype, max_tokens, key) as index:
        work = _add_all(index, worker, files)
        if progress:
            show_progress(work, total_bytes(files))
        else:
            deque(work, maxlen=0)
        index.close()
    return index.tally


def _add_all(index: TextIndex, worker: TextTokenizer, files: Sequence[SourceFile]) -> Iterator[Written]:
    for batch in read_batches(files, lambda source: index.is_full, BATCH_BYTES):
        yield index.add(worker.tokenise(batch))
    if not index.tally.documents:
        raise no_document_error(", ".join(file.path for file in files[:3]), index.tally)


def show_progress(work: Iterator[Written], num_bytes: int | None) -> None:
    """Do all the work, with a bar from the first document on: a mistake before it is told without one."""
    begun = time.monotonic()
    before = []
    for written in work:
        before.append(written)
        if written.tokens:
            break
    with Progress(num_bytes, "index") as bar:
        bar.started = begun
        for written in chain(before, work):
            bar.add(written)


def no_document_error(where: str, tally: Counts) -> DataError:
    """What is said of a source that gives no document."""
    bad = "; ".join(f"{reason}: {count:,}" for reason, count in sorted(tally.bad.items())) or "no record"
    return DataError(f"{where} must hold at least one document; got none ({bad})")
