"""The protocol of encoders, which turn the records of files into documents.

encoder_chats     chats and texts of `verl-ext tokenize` and `verl-ext train`
encoder_texts     texts of `verl-ext index` and data=multidoc; data/pretrain.py has that of data=pretrain
encoder_tokens    records that are tokenized already
data/babilong     BABILong's samples
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from verl_ext.options import DataError
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.readers import Chunk, ChunkSize, read_chunks
from verl_ext.text.read.sources import SourceFile
from verl_ext.text.tokens.counts import NO_KEY, Counts, Tally
from verl_ext.text.tokens.documents import Document, Documents, RecordFacts, join_documents
from verl_ext.text.tokens.tokenizer import load_tokenizer


class Origin(NamedTuple):
    """The record that documents are made of.

    place: its file and line, for errors. number: its number in the chunk. counts: those that it adds to. category: ""
    for that of its source.
    """

    place: str
    number: int
    counts: Counts
    category: str = ""


# Makes the documents of a record, or of a part of it that is used or left out as a whole. It may raise BadRecord, or
# DataError for a text file that cannot be read.
Draft = tuple[Origin, Callable[[], Sequence[Document]]]

# Reasons for which an option leaves a document out: they count it, and end no run.
TOO_SHORT = "too_short"


class Encoder(ABC):
    """The base class of encoders.

    Documents follow from the records, the tokenizer and the options alone.

    An encoder pickles as what it was made of: its cached properties, such as a tokenizer that the options name, are
    made again in each process.

    reads: what files must hold, for errors. texts: the names of further columns of the documents. columns: those of a
    table that are read; None: all. by_record: whether documents come with the facts of each record.
    """

    reads: ClassVar[str] = "records"
    texts: ClassVar[tuple[str, ...]] = ()
    columns: Collection[str] | None = None
    by_record: bool = False

    def __init__(self, options: Any, tokenizer: Any = None, key: str = "") -> None:
        """Take options, `options.model`'s tokenizer if None, and the files' key."""
        self.options, self.given_tokenizer, self.key = options, tokenizer, key

    def __getstate__(self) -> dict[str, Any]:
        made = {name for name in vars(self) if isinstance(getattr(type(self), name, None), cached_property)}
        return {name: value for name, value in vars(self).items() if name not in made}

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises `UsageError` if it cannot be loaded."""
        return load_tokenizer(self.options.model) if self.given_tokenizer is None else self.given_tokenizer

    @cached_property
    def vocabulary(self) -> int:
        """One more than the highest id: `len(tokenizer)`, without gaps."""
        return max(len(self.tokenizer), 1 + max(self.tokenizer.get_vocab().values(), default=-1))

    def open(self) -> None:
        """Make what any record needs. Raises `UsageError` if the tokenizer is unfit."""
        _ = self.tokenizer

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens."""
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of all but the records that decides the documents."""

    def read(self, file: SourceFile, size: ChunkSize) -> Iterator[Chunk]:
        """Yield a file's records in chunks."""
        return read_chunks(file, size, self.columns)

    @abstractmethod
    def encode(self, chunk: Chunk) -> Documents:
        """Return a chunk's documents, up to an error that ends the run."""

    def record_key(self, raw: Any, source: int) -> int:
        """Return 64 bits of a hash of a source's record. Raises `BadRecord`."""
        raise NotImplementedError

    def record_keys(self, chunk: Chunk) -> list[int]:
        """Return every record's key, NO_KEY for those that cannot be read."""
        keys = [NO_KEY] * len(chunk.records)
        for number, (_, raw) in enumerate(chunk.records):
            with suppress(BadRecord, DataError, RecursionError):  # which `encode` reports
                keys[number] = self.record_key(raw, chunk.category_id)
        return keys

    def one_each(self, chunk: Chunk, makers: Iterable[Callable[[], Document]]) -> Documents:
        """Make one document of each record, up to an error that ends the run."""
        tally, drafts = Tally(self.by_record), []
        keys = self.record_keys(chunk) if self.by_record else [NO_KEY] * len(chunk.records)
        for number, ((place, _), key, make) in enumerate(zip(chunk.records, keys, makers, strict=True)):
            drafts.append((Origin(place, number, tally.of("")), partial(_alone, make)))
            tally.end_record("", key)
        return self.made(chunk, drafts, tally)

    def made(self, chunk: Chunk, drafts: Iterable[Draft], tally: Tally) -> Documents:
        """Make a chunk's documents in order, up to an error that ends the run; `tally` has its records."""
        # A bad record is counted for its origin, or ends the chunk.
        documents: list[Document] = []
        origins: list[Origin] = []
        failure = None
        for origin, make in drafts:
            try:
                documents += make()
                origins += [origin] * (len(documents) - len(origins))
            except DataError as error:
                failure = str(error)
            except BadRecord as bad:
                origin.counts.add_bad(bad.reason, f"{origin.place}: {bad}")
                failure = self.failure(bad, origin.place)
            if failure is not None:
                break
        failure = chunk.failure if failure is None else failure
        if failure is not None and self.key:
            failure = f"{self.key} must hold {self.reads}; {failure}"
        records = None
        if self.by_record:
            owners = np.array([origin.number for origin in origins], np.int64)
            records = RecordFacts(np.array(tally.keys, np.uint64), owners, tally.records)
        names = [origin.category for origin in origins]
        return join_documents(
            documents,
            chunk.category_id,
            chunk.num_bytes,
            counts=Counts().add(*tally.by_category().values()),
            failure=failure,
            category_names=names if any(names) else None,
            texts={name: [document.texts[at] for document in documents] for at, name in enumerate(self.texts)},
            records=records,
        )

    def check_length(self, tokens: int) -> None:
        """Raise `BadRecord` for a document of fewer tokens than `min_tokens`."""
        least = self.options.min_tokens
        if least is not None and tokens < least:
            raise BadRecord(TOO_SHORT, f"{tokens} tokens, and min_tokens is {least}")

    def failure(self, bad: BadRecord, place: str) -> str | None:
        """Return a bad record's line that ends the run, or None."""
        if self.options.on_bad_record == "skip" or bad.reason == TOO_SHORT:
            return None
        return f"{place}: {bad} ({bad.reason}; {self.options.key('on_bad_record')}=skip leaves such records out)"


def _alone(make: Callable[[], Document]) -> Sequence[Document]:
    return [make()]
