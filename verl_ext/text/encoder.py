"""The protocol of encoders, which turn the records of files into documents.

encoder_chats     chats and texts of `verl-ext tokenize` and `verl-ext train`
encoder_texts     texts of `verl-ext index`, data=multidoc and data=pretrain
encoder_tokens    records that are tokenized already
babilong_encoder  BABILong's samples (in verl_ext.data)
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from verl_ext.options import DataError
from verl_ext.text.read.readers import Chunk, ChunkSize, read_chunks
from verl_ext.text.read.sources import SourceFile
from verl_ext.text.records.bad_record import BadRecord
from verl_ext.text.tokens.counts import Counts
from verl_ext.text.tokens.documents import Document, Documents, join_documents
from verl_ext.text.tokens.tokenizer import load_tokenizer


class Encoder(ABC):
    """The base class of encoders, which turn records into documents, in any process.

    The documents follow from the records, the tokenizer and the options alone. An encoder pickles as what it was made
    of: its cached properties, such as a tokenizer that the options name, are made anew in each process.

    Options: the class of `options`, for families; reads: what files must hold, for errors; texts: the names of further
    columns of the documents.
    """

    Options: ClassVar[Any] = None
    reads: ClassVar[str] = "records"
    texts: ClassVar[tuple[str, ...]] = ()
    columns: Collection[str] | None = None  # the columns of a table that are read; None: all

    def __init__(self, options: Any, tokenizer: Any = None, key: str = "") -> None:
        """Take the options, a tokenizer (None: that of `options.model`) and the config key of the files, for errors."""
        self.options, self._given, self.key = options, tokenizer, key

    def __getstate__(self) -> dict[str, Any]:
        made = {name for name in vars(self) if isinstance(getattr(type(self), name, None), cached_property)}
        return {name: value for name, value in vars(self).items() if name not in made}

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises `UsageError` if it cannot be loaded."""
        return load_tokenizer(self.options.model) if self._given is None else self._given

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens."""
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    @property
    def has_threads(self) -> bool:
        """Whether the tokenizer is one at hand, whose own threads work in this process."""
        return self._given is not None

    def open(self) -> None:
        """Make what any record needs. Raises `UsageError` if the tokenizer is unfit."""
        _ = self.tokenizer

    @abstractmethod
    def encode(self, chunk: Chunk) -> Documents:
        """Return the documents of a chunk, up to an error that ends the run."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of all but the records that decides the documents."""

    def read(self, file: SourceFile, size: ChunkSize) -> Iterator[Chunk]:
        """Yield a file's records in chunks."""
        return read_chunks(file, size, self.columns)

    def notices(self, total: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line for each way in which documents differ from the records; total: the counts in the report."""
        yield from ()

    def failure(self, bad: BadRecord, place: str) -> str | None:
        """Return the line of a bad record that ends the run; None if it is left out."""
        if self.options.on_bad_record == "skip":
            return None
        return f"{place}: {bad} ({bad.reason}; {self.options.key('on_bad_record')}=skip leaves such records out)"

    def collected(
        self,
        chunk: Chunk,
        documents: Iterable[tuple[str, str, Callable[[], Document]]],
        counts: defaultdict[str, Counts] | None = None,
    ) -> Documents:
        """Make the documents of a chunk in the order of their records, up to an error that ends the run.

        documents: (place, category, a maker that may raise `BadRecord` or `DataError`) of each; counts: of the records
        by category, in which bad ones are added here.
        """
        counts = defaultdict(Counts, {"": Counts(records=len(chunk.records))}) if counts is None else counts
        found: list[Document] = []
        categories: list[str] = []
        failure = None
        for place, category, make in documents:
            try:
                found.append(make())
                categories.append(category)
            except DataError as error:  # a text file, read only now, cannot be read
                failure = str(error)
            except BadRecord as bad:
                counts[category].add_bad(bad.reason, f"{place}: {bad}")
                failure = self.failure(bad, place)
            if failure is not None:
                break
        if failure is None:
            failure = chunk.failure
        if failure is not None and self.key:
            failure = f"{self.key} must hold {self.reads}; {failure}"
        joined = join_documents(found, chunk.category_id, chunk.num_bytes, Counts.total(counts.values()))
        texts = {name: [document.texts[at] for document in found] for at, name in enumerate(self.texts)}
        named = {name: own for name, own in counts.items() if name}
        names = categories if named else None
        return replace(joined, failure=failure, texts=texts, category_names=names, category_counts=named)
