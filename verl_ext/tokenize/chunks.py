"""Source files cut into chunks of records, read as a stream.

The cuts depend on the files alone, never on the number of workers, so that the output does not either. JSONL lines
travel as bytes and are parsed by the worker that tokenises them; the other formats are decoded here.
"""

import codecs
import csv
import io
import json
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, TextIO

from verl_ext.commands.errors import DataError, first_line
from verl_ext.tokenize.bad_record import BadRecord
from verl_ext.tokenize.source_files import SourceFile, open_source

CHUNK_BYTES = 256 * 1024
CHUNK_RECORDS = 256
BLOCK = 1 << 20  # of a JSON list or a text file, taken at once

# (line of the file, or number of the record where there are no lines; the record, still unparsed where it is bytes)
NumberedRecord = tuple[int, Any]


@dataclass(frozen=True)
class Chunk:
    """Records of one file, in order."""

    category_id: int
    path: str
    records: list[NumberedRecord]
    num_bytes: int  # how much of the file they stand for: the unit of progress
    whole_file: bool = False  # the one record is the file's text
    text_bytes: int = 0  # about how much the records are once read, which of a compressed file is more

    def place(self, number: int) -> str:
        """Where record `number` stands, as errors name it."""
        return self.path if self.whole_file else f"{self.path}:{number}"


@dataclass(frozen=True)
class TextFile:
    """The text of a file of more than a block, for whoever tokenises it to read as a stream."""

    path: str

    def blocks(self) -> Iterator[str]:
        """The text, a block at a time; see `text_blocks`."""
        return (text for text, _ in text_blocks(self.path))


def read_chunks(source: SourceFile) -> Iterator[Chunk]:
    """Yield a file's records in chunks; memory is that of a chunk.

    Raises `DataError` with path and line for a file that cannot be read on (a JSON list or CSV with broken syntax, a
    compressed file that is truncated).
    """
    is_text = source.kind == "text"
    try:
        for records, num_bytes, size in READERS[source.kind](source):
            yield Chunk(source.category_id, source.path, records, num_bytes, is_text, size)
    except OSError as error:
        raise DataError(f"{source.path}: cannot be read: {first_line(error)}") from error


Batches = Iterator[tuple[list[NumberedRecord], int, int]]  # records, bytes of the file, size of the records
Read = Iterator[tuple[NumberedRecord | None, int]]  # a record or what holds none, and its size


def _batches(source: SourceFile, read: Callable[[BinaryIO], Read]) -> Batches:
    """What `read` finds in the file's bytes, in batches of about CHUNK_BYTES and at most CHUNK_RECORDS."""
    with open_source(source.path) as file:
        records: list[NumberedRecord] = []
        size = position = 0
        for record, length in read(file.stream):
            size += length
            if record is not None:
                records.append(record)
            if size >= CHUNK_BYTES or len(records) >= CHUNK_RECORDS:
                yield records, file.position - position, size
                records, size, position = [], 0, file.position
        yield records, max(source.num_bytes - position, 0), size


def _jsonl(source: SourceFile) -> Batches:
    return _batches(source, _lines)


def _lines(stream: BinaryIO) -> Read:
    for number, line in enumerate(stream, start=1):
        has_record = line.removeprefix(codecs.BOM_UTF8).strip()
        yield ((number, line) if has_record else None), len(line)


def parse_line(line: bytes) -> Any:
    """The record of one JSONL line; `BadRecord` where it is no JSON."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise BadRecord("malformed_json", f"malformed JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise BadRecord("malformed_json", f"malformed JSON: no UTF-8 at byte {error.start + 1}") from error
    except RecursionError as error:
        raise BadRecord("malformed_json", "malformed JSON: nested too deep") from error


def _json(source: SourceFile) -> Batches:
    with open_source(source.path) as file:
        start = file.stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    # Many published .json files hold one object per line.
    if start == b"{":
        return _jsonl(source)
    return _batches(source, lambda stream: iter(_JsonListScanner(source.path, stream)))


class _JsonListScanner:
    """Iterates over the elements of a JSON list without holding the file: yields ((line, element), characters)."""

    def __init__(self, path: str, stream: BinaryIO) -> None:
        self.path = path
        self.stream = io.TextIOWrapper(stream, encoding="utf-8-sig")
        self.decoder = json.JSONDecoder()
        self.text = ""
        self.position = 0
        self.line = 1  # of `position`
        self.ended = False

    def __iter__(self) -> Read:
        try:
            yield from self._elements()
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}:{self.line}: malformed JSON: no UTF-8") from error

    def _elements(self) -> Read:
        self._expect("[", "a list of records")
        if self._next_character() == "]":
            self._advance(1)
        else:
            while True:
                self._next_character()
                line = self.line
                value, length = self._decode()
                yield (line, value), length
                if self._next_character() == "]":
                    self._advance(1)
                    break
                self._expect(",", "',' or ']' after a record")
        if self._next_character():
            self._fail("text after the list's end")

    def _decode(self) -> tuple[Any, int]:
        block = BLOCK
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.position)
            except json.JSONDecodeError as error:
                # A value cut off by the buffer's end looks malformed: read on, twice as far, before saying so.
                if self.ended:
                    self.line += self.text.count("\n", self.position, error.pos)
                    self._fail(error.msg)
                self._read(block)
                block *= 2
                continue
            except RecursionError:
                self._fail("nested too deep")
            if end == len(self.text) and not self.ended:  # a number might go on
                self._read(block)
                continue
            length = end - self.position
            self._advance(length)
            return value, length

    def _read(self, size: int) -> None:
        more = self.stream.read(size)
        self.text, self.position = self.text[self.position :] + more, 0
        self.ended = len(more) < size

    def _advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.position, self.position + count)
        self.position += count

    def _next_character(self) -> str:
        """Skip white space; the character there, empty at the file's end."""
        while True:
            while self.position < len(self.text):
                if not self.text[self.position].isspace():
                    return self.text[self.position]
                self._advance(1)
            if self.ended:
                return ""
            self._read(BLOCK)

    def _expect(self, character: str, what: str) -> None:
        if self._next_character() != character:
            self._fail(f"expected {what}")
        self._advance(1)

    def _fail(self, message: str) -> None:
        # The records' borders are lost from here on, so that there is nothing to skip to.
        raise DataError(f"{self.path}:{self.line}: malformed JSON: {message}")


def _csv(source: SourceFile) -> Batches:
    csv.field_size_limit(sys.maxsize)
    return _batches(source, lambda stream: _rows(source.path, io.TextIOWrapper(stream, "utf-8-sig", newline="")))


def _rows(path: str, stream: TextIO) -> Read:
    reader = csv.DictReader(stream, strict=True)
    try:
        line = 2
        for row in reader:
            yield (line, _csv_record(row)), sum(len(value) for value in row.values() if isinstance(value, str))
            line = reader.line_num + 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}:{reader.line_num}: malformed CSV: {first_line(error)}") from error


def _csv_record(row: dict[Any, Any]) -> Any:
    """A row as a record: an empty cell is an absent field, a weight is a number."""
    if None in row or None in row.values():
        return BadRecord("malformed_row", "malformed CSV: the row's cells and the header's do not match")
    record: dict[str, Any] = {key: value for key, value in row.items() if value != ""}
    for key in ("loss_weight", "weight"):
        if key in record:
            try:
                record[key] = float(record[key])
            except ValueError:
                continue  # refused, with its text, where weights are checked
    return record


def _text(source: SourceFile) -> Batches:
    """The file as one record: its text, or a `TextFile` where that is more than a block."""
    blocks = text_blocks(source.path)
    try:
        text, _ = next(blocks, ("", 0))
        is_long = next(blocks, None) is not None
    except BadRecord as error:
        yield [(1, error)], source.num_bytes, 0
    else:
        blocks.close()
        yield [(1, {"text": TextFile(source.path) if is_long else text})], source.num_bytes, len(text) * (1 + is_long)


def text_blocks(path: str) -> Generator[tuple[str, int], None, None]:
    """A text file in blocks, line ends as Python's text files have them, and the bytes of the file that each took.

    A block ends with a line, where no line is longer than a block. Raises `BadRecord` where the text is not UTF-8,
    `DataError` where the file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = io.IncrementalNewlineDecoder(None, translate=True)
    position = done = 0  # of the text, of the file
    with open_source(path) as file:
        while True:
            data = file.stream.read(BLOCK)
            data += file.stream.readline(BLOCK)
            begun = len(decoder.getstate()[0])  # bytes of a character that the last block cut
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                byte = position - begun + error.start + 1
                raise BadRecord("not_utf8", f"text must be UTF-8; byte {byte} is not") from error
            if text := lines.decode(text if position else text.removeprefix("\ufeff"), final=not data):
                yield text, file.position - done
                done = file.position
            if not data:
                return
            position += len(data)


def _parquet(source: SourceFile) -> Batches:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(source.path) as file:
            batches = (pa.Table.from_batches([b]) for b in file.iter_batches(batch_size=CHUNK_RECORDS))
            yield from _table_records(batches, source.num_bytes, file.metadata.num_rows)
    except pa.ArrowException as error:
        raise DataError(f"{source.path}: cannot be read as parquet: {first_line(error)}") from error


def _arrow(source: SourceFile) -> Batches:
    from datasets import load_from_disk

    try:
        dataset = load_from_disk(source.path).with_format("arrow")
    except Exception as error:  # damaged folders fail in many ways inside datasets and pyarrow
        raise DataError(f"{source.path}: cannot be read as an Arrow folder: {first_line(error)}") from error
    yield from _table_records(dataset.iter(batch_size=CHUNK_RECORDS), source.num_bytes, len(dataset))


def _table_records(tables: Iterator[Any], num_bytes: int, num_rows: int) -> Batches:
    number = 0
    for table in tables:
        rows = [_without_none(row) for row in table.to_pylist()]
        yield list(enumerate(rows, start=number + 1)), num_bytes * len(rows) // max(num_rows, 1), table.nbytes
        number += len(rows)


def _without_none(value: Any) -> Any:
    """`value` less the null fields of its structs: Arrow fills in every key that any row has."""
    if isinstance(value, dict):
        return {key: _without_none(child) for key, child in value.items() if child is not None}
    if isinstance(value, list):
        return [_without_none(child) for child in value]
    return value


READERS = {"jsonl": _jsonl, "json": _json, "parquet": _parquet, "csv": _csv, "text": _text, "arrow": _arrow}
