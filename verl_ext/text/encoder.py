"""The protocol of encoders, which turn the records of files into documents.

encoder_chats     chats and texts of `verl-ext tokenize` and `verl-ext train`
encoder_texts     texts of `verl-ext index` and data=multidoc; data/pretrain.py has that of data=pretrain
encoder_tokens    records that are tokenized already
data/babilong     BABILong's samples
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

from verl_ext.options import DataError
from verl_ext.text.read.readers import Chunk, ChunkSize, read_chunks
from verl_ext.text.read.sources import SourceFile
from verl_ext.text.records.bad_record import BadRecord
from verl_ext.text.tokens.counts import Counts
from verl_ext.text.tokens.documents import Document, Documents, join_documents
from verl_ext.text.tokens.tokenizer import load_tokenizer

# One document or several; it may raise BadRecord, or DataError for a text file that cannot be read.
Maker = Callable[[], Document | Sequence[Document]]


class Encoder(ABC):
    """The base class of encoders.

    Documents follow from the records, the tokenizer and the options alone.

    An encoder pickles as what it was made of: its cached properties, such as a tokenizer that the options name, are
    made anew in each process.

    reads: what files must hold, for errors. texts: the names of further columns of the documents. columns: those of a
    table that are read; None: all.
    """

    reads: ClassVar[str] = "records"
    texts: ClassVar[tuple[str, ...]] = ()
    columns: Collection[str] | None = None

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

    def made(self, chunk: Chunk, makers: Iterable[Maker], owners: Sequence[tuple[str, Counts]] = ()) -> Documents:
        """Make documents in order, up to an error that ends the run.

        owners: the place of each, and the counts that a bad record is added to; without them each record has a maker.
        """
        counts = Counts(records=len(chunk.records))
        owners = owners or [(place, counts) for place, _ in chunk.records]
        documents: list[Document] = []
        failure = None
        for make, (place, own) in zip(makers, owners, strict=True):
            try:
                found = make()
                documents += [found] if isinstance(found, Document) else found
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
        texts = {name: [document.texts[at] for document in documents] for at, name in enumerate(self.texts)}
        more: dict[str, Any] = {"counts": counts, "failure": failure, "texts": texts}
        return join_documents(documents, chunk.category_id, chunk.num_bytes, **more)

    def failure(self, bad: BadRecord, place: str) -> str | None:
        """Return a bad record's line that ends the run, or None."""
        if self.options.on_bad_record == "skip":
            return None
        return f"{place}: {bad} ({bad.reason}; {self.options.key('on_bad_record')}=skip leaves such records out)"
