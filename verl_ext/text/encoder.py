"""The protocol of encoders, which turn the records of files into documents.

encoder_chats     chats and texts of `verl-ext tokenize` and `verl-ext train`
encoder_texts     texts of `verl-ext index` and data=multidoc; data/pretrain.py has that of data=pretrain
encoder_tokens    records that are tokenized already
data/babilong     BABILong's samples
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from verl_ext.options import DataError
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.readers import Chunk, ChunkSize, read_chunks
from verl_ext.text.read.sources import SourceFile
from verl_ext.text.tokens.counts import Counts, Tally
from verl_ext.text.tokens.documents import Document, Documents, RecordFacts, join_documents
from verl_ext.text.tokens.tokenizer import load_tokenizer

# One document or several; it may raise BadRecord, or DataError for a text file that cannot be read.
Maker = Callable[[], Document | Sequence[Document]]
Owner = tuple[str, Counts, int]  # the record of a maker: its place, counts and number in the chunk
NO_KEY = 2**64 - 1  # of a record that cannot be read

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

    def record_keys(self, chunk: Chunk) -> NDArray[np.uint64]:
        """Return every record's key, NO_KEY for those that cannot be read."""
        keys = np.full(len(chunk.records), NO_KEY, np.uint64)
        for number, (_, raw) in enumerate(chunk.records):
            with suppress(BadRecord, DataError, RecursionError):  # which `encode` reports
                keys[number] = self.record_key(raw, chunk.category_id)
        return keys

    def made(
        self,
        chunk: Chunk,
        makers: Iterable[Maker],
        owners: Sequence[Owner] = (),
        tally: Tally | None = None,
        keys: NDArray[np.uint64] | None = None,
    ) -> Documents:
        """Make documents in order, up to an error that ends the run.

        owners: the record of each maker; without them each record has a maker. tally: the counts of the records. keys:
        those of the records, if `by_record`.
        """
        if tally is None:
            tally, owners = Tally(self.by_record), []
            for number, (place, _) in enumerate(chunk.records):
                owners.append((place, tally.of(""), number))
                tally.end_record("")
        # A bad record is counted for its owner, or ends the chunk.
        documents: list[Document] = []
        records: list[int] = []
        failure = None
        for make, (place, own, record) in zip(makers, owners, strict=True):
            try:
                found = make()
                documents += [found] if isinstance(found, Document) else found
                records += [record] * (len(documents) - len(records))
            except DataError as error:
                failure = str(error)
            except BadRecord as bad:
                own.add_bad(bad.reason, f"{place}: {bad}")
                failure = self.failure(bad, place)
            if failure is not None:
                break
        failure = chunk.failure if failure is None else failure
        if failure is not None and self.key:
            failure = f"{self.key} must hold {self.reads}; {failure}"
        counts = Counts().add(*tally.by_category().values())
        texts = {name: [document.texts[at] for document in documents] for at, name in enumerate(self.texts)}
        more: dict[str, Any] = {"counts": counts, "failure": failure, "texts": texts}
        if self.by_record:
            keys = self.record_keys(chunk) if keys is None else keys
            more["records"] = RecordFacts(keys, np.array(records, np.int64), tally.records)
        return join_documents(documents, chunk.category_id, chunk.num_bytes, **more)

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
