"""Source files cut into chunks of records, read as a stream.

The cuts depend on the files alone, never on the number of workers, so that the output does not either. JSONL lines
travel as bytes and are parsed by the worker that tokenises them; the other formats are decoded here.
"""

import codecs
import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from verl_ext.commands.errors import DataError, first_line
from verl_ext.tokenize.bad_record import BadRecord
from verl_ext.tokenize.source_files import SourceFile

CHUNK_BYTES = 256 * 1024
CHUNK_RECORDS = 256
JSON_BLOCK = 1 << 20

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

    def place(self, number: int) -> str:
        """Where record `number` stands, as errors name it."""
        return self.path if self.whole_file else f"{self.path}:{number}"


def read_chunks(source: SourceFile) -> Iterator[Chunk]:
    """Yield a file's records in chunks; memory is that of a chunk, of a text file that of its text.

    Raises `DataError` with path and line for a file that cannot be read on (a JSON list or CSV with broken syntax).
    """
    is_text = source.kind == "text"
    try:
        for records, num_bytes in READERS[source.kind](source):
            yield Chunk(source.category_id, source.path, records, num_bytes, whole_file=is_text)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source.path}: cannot be read: {first_line(error)}") from error


Batches = Iterator[tuple[list[NumberedRecord], int]]


def _jsonl(source: SourceFile) -> Batches:
    with open(source.path, "rb") as raw:
        stream: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if source.path.endswith(".gz") else raw
        records: list[NumberedRecord] = []
        size = position = 0
        for number, line in enumerate(stream, start=1):
            size += len(line)
            if line.removeprefix(codecs.BOM_UTF8).strip():
                records.append((number, line))
            if size >= CHUNK_BYTES or len(records) >= CHUNK_RECORDS:
                yield records, raw.tell() - position
                records, size, position = [], 0, raw.tell()
        yield records, raw.tell() - position


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
    with open(source.path, "rb") as stream:
        start = stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    # Many published .json files hold one object per line.
    yield from _jsonl(source) if start == b"{" else _json_list(source)


def _json_list(source: SourceFile) -> Batches:
    scanner = _JsonListScanner(source.path)
    records: list[NumberedRecord] = []
    size = total = 0
    for line, record, length in scanner:
        records.append((line, record))
        size += length
        if size >= CHUNK_BYTES or len(records) >= CHUNK_RECORDS:
            yield records, size
            records, total, size = [], total + size, 0
    yield records, max(source.num_bytes - total, 0)


class _JsonListScanner:
    """Iterates over the elements of a JSON list without holding the file: yields (line, element, characters)."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.decoder = json.JSONDecoder()
        self.text = ""
        self.position = 0
        self.line = 1  # of `position`
        self.ended = False

    def __iter__(self) -> Iterator[tuple[int, Any, int]]:
        with open(self.path, encoding="utf-8-sig") as self.stream:
            try:
                yield from self._elements()
            except UnicodeDecodeError as error:
                raise DataError(f"{self.path}:{self.line}: malformed JSON: no UTF-8") from error

    def _elements(self) -> Iterator[tuple[int, Any, int]]:
        self._expect("[", "a list of records")
        if self._next_character() == "]":
            self._advance(1)
        else:
            while True:
                self._next_character()
                line = self.line
                value, length = self._decode()
                yield line, value, length
                if self._next_character() == "]":
                    self._advance(1)
                    break
                self._expect(",", "',' or ']' after a record")
        if self._next_character():
            self._fail("text after the list's end")

    def _decode(self) -> tuple[Any, int]:
        block = JSON_BLOCK
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
            self._read(JSON_BLOCK)

    def _expect(self, character: str, what: str) -> None:
        if self._next_character() != character:
            self._fail(f"expected {what}")
        self._advance(1)

    def _fail(self, message: str) -> None:
        # The records' borders are lost from here on, so that there is nothing to skip to.
        raise DataError(f"{self.path}:{self.line}: malformed JSON: {message}")


def _csv(source: SourceFile) -> Batches:
    csv.field_size_limit(sys.maxsize)
    with open(source.path, encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, strict=True)
        records: list[NumberedRecord] = []
        size = total = 0
        try:
            line = 2
            for row in reader:
                records.append((line, _csv_record(row)))
                line = reader.line_num + 1
                size += sum(len(value) for value in row.values() if isinstance(value, str))
                if size >= CHUNK_BYTES or len(records) >= CHUNK_RECORDS:
                    yield records, size
                    records, total, size = [], total + size, 0
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{source.path}:{reader.line_num}: malformed CSV: {first_line(error)}") from error
        yield records, max(source.num_bytes - total, 0)


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
    """The whole file as one record, its line ends as Python's text files have them."""
    with open(source.path, "rb") as stream:
        content = stream.read()
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        yield [(1, BadRecord("not_utf8", f"text must be UTF-8; byte {error.start + 1} is not"))], source.num_bytes
    else:
        yield [(1, {"text": text.replace("\r\n", "\n").replace("\r", "\n")})], source.num_bytes


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
        yield list(enumerate(rows, start=number + 1)), num_bytes * len(rows) // max(num_rows, 1)
        number += len(rows)


def _without_none(value: Any) -> Any:
    """`value` less the null fields of its structs: Arrow fills in every key that any row has."""
    if isinstance(value, dict):
        return {key: _without_none(child) for key, child in value.items() if child is not None}
    if isinstance(value, list):
        return [_without_none(child) for child in value]
    return value


READERS = {"jsonl": _jsonl, "json": _json, "parquet": _parquet, "csv": _csv, "text": _text, "arrow": _arrow}
