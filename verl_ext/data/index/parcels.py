"""Chunks gathered into parcels: what one worker tokenises in one go."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from verl_ext.commands.errors import DataError
from verl_ext.tokenize.chunks import CHUNK_BYTES, CHUNK_RECORDS, Chunk, read_chunks
from verl_ext.tokenize.source_files import SourceFile


@dataclass
class Parcel:
    """Chunks of one source, in order. Small files share a parcel, since a job of its own would cost each too much."""

    source: int  # the files' category_id
    chunks: list[Chunk] = field(default_factory=list)
    failure: str | None = None  # why the source cannot be read on after them

    @property
    def num_bytes(self) -> int:
        """How much of the source's files the chunks stand for."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def text_bytes(self) -> int:
        """How much there is to tokenise, about: of a compressed file more than its bytes."""
        return sum(chunk.text_bytes for chunk in self.chunks)

    @property
    def num_records(self) -> int:
        """Records, the unusable ones included."""
        return sum(len(chunk.records) for chunk in self.chunks)


def read_parcels(
    files: Sequence[SourceFile], is_full: Callable[[int], bool], parcel_bytes: int = CHUNK_BYTES
) -> Iterator[Parcel]:
    """Yield the files' chunks, in order, in parcels of about `parcel_bytes` of text at the most.

    `is_full(source)` is asked before each chunk: nothing more of a full source is read. A file that cannot be read
    becomes its parcel's `failure` and ends its source, so that it is told only where the documents before it do not
    fill the source, however far ahead of them it was found.
    """
    parcel: Parcel | None = None
    for source, found in _chunks(files, is_full):
        if parcel is not None and parcel.source != source:
            yield parcel
            parcel = None
        parcel = parcel or Parcel(source)
        if isinstance(found, Chunk):
            parcel.chunks.append(found)
        else:
            parcel.failure = str(found)
        if parcel.failure or parcel.text_bytes >= parcel_bytes or parcel.num_records >= CHUNK_RECORDS:
            yield parcel
            parcel = None
    if parcel is not None:
        yield parcel


def _chunks(files: Sequence[SourceFile], is_full: Callable[[int], bool]) -> Iterator[tuple[int, Chunk | DataError]]:
    """(source, chunk or what ends the source) of every file, in order."""
    ended = set()
    for file in files:
        chunks = read_chunks(file)
        while file.category_id not in ended and not is_full(file.category_id):
            try:
                yield file.category_id, next(chunks)
            except StopIteration:
                break
            except DataError as error:
                ended.add(file.category_id)
                yield file.category_id, error
