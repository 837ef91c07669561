"""Read source files as a stream of record chunks.

The chunks depend on the files alone, and not on the number of workers, so that the output does not depend on it either.
JSONL lines travel as bytes and are parsed by the worker that tokenizes them; the other formats are decoded here.

To add a format, add a function to READERS and a suffix to `sources.SUFFIXES`.
"""

import codecs
import csv
import io
import mmap
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby
from json import JSONDecodeError
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from verl_ext.options import DataError, first_line, must
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.hub import hub_tables
from verl_ext.text.read.json_records import JsonList, TableRow, parse_line, repeated_name
from verl_ext.text.read.shards import STATE, STREAM_END, parse_shards, read_shards
from verl_ext.text.read.sources import OpenedFile, SourceFile, encoding_problem, is_url, open_source
from verl_ext.text.read.text_file import BLOCK, TextFile, text_blocks

Columns = Collection[str] | None  # the columns of a table that are read; None: all

NumberedRecord = tuple[int, Any]  # its line of JSONL and CSV, else its number, and the record
Pieces = Iterator[tuple[list[NumberedRecord], int, int]]  # records, bytes of the file, size of the records
Records = Iterator[tuple[NumberedRecord | None, int]]  # a record, or None for text without one, and its size


class ChunkSize(NamedTuple):
    """The most records of a chunk, and about the most bytes."""

    records: int = 256
    bytes: int = 256 * 1024


CHUNK = ChunkSize()


@dataclass(frozen=True)
class Chunk:
    """Records of one source, in order.

    category_id: the source's number. records: the place of each, `file:line` as errors name it or the file of a
    `TextFile`, and the record, of which bytes are a line that is not parsed yet. num_bytes: the bytes of the files that
    they take, the unit of progress. text_bytes: their size, decompressed. failure: why the source ends here.
    """

    category_id: int
    records: list[tuple[str, Any]]
    num_bytes: int = 0
    text_bytes: int = 0
    failure: str | None = None


def read_files(
    files: Iterable[SourceFile],
    size: ChunkSize = CHUNK,
    read: Callable[[SourceFile, ChunkSize], Iterator[Chunk]] | None = None,
    is_full: Callable[[int], bool] = lambda source: False,
) -> Iterator[Chunk]:
    """Yield the files' records in order, with a chunk's memory or two.

    Small files of a source share a chunk.

    read: the reader of one file (None: `read_chunks`). An unreadable file becomes a chunk's `failure` and ends its
    source, however far it is found ahead of the documents before it. Nothing more is read of a source that `is_full`.
    """
    for source, own in groupby(files, key=lambda file: file.category_id):
        chunk = none = Chunk(source, [])
        for part in _until_failure(own, size, read or read_chunks):
            num_bytes, text_bytes = chunk.num_bytes + part.num_bytes, chunk.text_bytes + part.text_bytes
            chunk = Chunk(source, chunk.records + part.records, num_bytes, text_bytes, part.failure)
            if len(chunk.records) >= size.records or text_bytes >= size.bytes:
                yield chunk
                chunk = none
            if is_full(source):
                break
        if chunk != none:
            yield chunk


def _until_failure(
    files: Iterable[SourceFile], size: ChunkSize, read: Callable[[SourceFile, ChunkSize], Iterator[Chunk]]
) -> Iterator[Chunk]:
    for file in files:
        try:
            yield from read(file, size)
        except DataError as error:
            yield Chunk(file.category_id, [], failure=str(error))
            return


def read_chunks(source: SourceFile, size: ChunkSize = CHUNK, columns: Columns = None) -> Iterator[Chunk]:
    """Yield a file's records in chunks, with the memory of one chunk.

    columns: the fields that are read (None: all). Of a table, the values of others are replaced by `UNREAD`.

    Raises `DataError` with path and line if the rest of a file cannot be read (a JSON list or CSV with broken syntax, a
    truncated compressed file).
    """
    is_text = source.kind == "text"
    try:
        for records, num_bytes, text_bytes in READERS[source.kind](source, size, columns):
            placed = [(source.path if is_text else f"{source.path}:{number}", record) for number, record in records]
            yield Chunk(source.category_id, placed, num_bytes, text_bytes)
    except OSError as error:
        raise DataError(f"{source.path}: cannot be read: {first_line(error)}") from error


def read_record(raw: Any) -> dict[str, Any]:
    """Return a chunk's record, an object, parsed from bytes. Raises `BadRecord`."""
    record = parse_line(raw) if isinstance(raw, bytes) else raw
    if isinstance(record, BadRecord):
        raise record
    if isinstance(record, TextFile):
        return {"text": record.read()}
    if not isinstance(record, dict):
        raise BadRecord("not_an_object", must("a record", "be an object with fields", type(record).__name__))
    return record


def _pieces(
    source: SourceFile, limit: ChunkSize, _: Columns = None, *, read: Callable[[SourceFile, BinaryIO], Records]
) -> Pieces:
    """Yield the records that `read` finds in the file's bytes."""
    with open_source(source.path) as file:
        if problem := encoding_problem(file.stream.peek(4)[:4]):
            raise DataError(f"{source.path}: must be UTF-8; {problem}")
        records: list[NumberedRecord] = []
        size = position = 0
        for record, length in read(source, file.stream):
            size += length
            if record is not None:
                records.append(record)
            if size >= limit.bytes or len(records) >= limit.records:
                yield records, file.position - position, size
                records, size, position = [], 0, file.position
        file.check_end()
        yield records, max((source.num_bytes or file.position) - position, 0), size


def _lines(_: SourceFile, stream: BinaryIO) -> Records:
    """Yield a file's lines, numbered from 1; None for a blank line."""
    for number, line in enumerate(stream, start=1):
        yield ((number, line) if _has_text(line) else None), len(line)


def _has_text(line: bytes) -> bool:
    return bool(line.removeprefix(codecs.BOM_UTF8).strip())


def _json(source: SourceFile, limit: ChunkSize, _: Columns) -> Pieces:
    """Read a list, or an object per line as many .json files."""
    with open_source(source.path) as file:
        blocks = iter(lambda: file.stream.readline(BLOCK), b"")
        first = next((line for line in blocks if _has_text(line)), None)
    if first is None:
        raise DataError(f"{source.path}: must be JSON; it is empty")
    if not first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
        return _pieces(source, limit, read=lambda source, stream: iter(JsonList(source.path, stream)))
    try:
        parse_line(first)
    except BadRecord as error:
        cause = error.__cause__
        if first.endswith(b"\n") and isinstance(cause, JSONDecodeError) and cause.pos >= len(cause.doc.rstrip()):
            what = "a list of records, or one object on each line"
            raise DataError(f"{source.path}: must be {what}; its first object goes on after its first line") from error
    return _pieces(source, limit, read=_lines)


def _rows(source: SourceFile, stream: BinaryIO) -> Records:
    """Yield the rows of a file, numbered by their first line."""
    csv.field_size_limit(sys.maxsize)
    text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    reader = csv.reader(text, delimiter="\t" if source.kind == "tsv" else ",", strict=True)
    try:
        header = next(filter(None, reader), [])
        if repeated := repeated_name(name for name in header if name):
            got = f"got {repeated!r} more than once"
            raise DataError(f"{source.path}:{reader.line_num}: the header's columns must have different names; {got}")
        line = reader.line_num + 1
        for row in reader:
            if row:
                yield (line, _row_record(header, row)), sum(map(len, row))
            line = reader.line_num + 1
        text.detach()  # it would close the file, whose end is yet to be checked
    except csv.Error as error:
        raise DataError(f"{source.path}:{reader.line_num}: malformed CSV: {first_line(error)}") from error
    except UnicodeDecodeError as error:
        raise DataError(_undecodable_line(source.path)) from error  # the text was decoded far ahead of the rows


def _undecodable_line(path: str) -> str:
    """Return an error for the first line of a file that is not UTF-8."""
    with open_source(path) as file:
        for number, line in enumerate(file.stream, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"{path}:{number}: must be UTF-8; byte {error.start + 1} of the line is not"
    return f"{path}: must be UTF-8; a character is cut"


def _row_record(header: list[str], row: list[str]) -> Any:
    """Return a row's record; empty cells are null, weights numbers."""
    if len(row) != len(header):
        return BadRecord("malformed_row", f"malformed CSV: {len(row)} cells in a row, {len(header)} in the header")
    if any("\0" in cell for cell in row):
        return BadRecord("nul_byte", "malformed CSV: a cell has a NUL byte")
    record = TableRow({key: value or None for key, value in zip(header, row, strict=True)})
    for key in ("loss_weight", "weight"):
        if record.get(key) is not None:
            try:
                record[key] = float(record[key])
            except ValueError:
                continue  # the check of weights refuses it and shows its text
    return record


def _text(source: SourceFile, _: ChunkSize, __: Columns) -> Pieces:
    text, is_long = "", False
    try:
        with closing(text_blocks(source.path)) as blocks:
            text, _size = next(blocks, ("", 0))
            is_long = next(blocks, None) is not None
        record: Any = TextFile(source.path, None if is_long else text)
    except BadRecord as error:
        record = error
    yield [(1, record)], source.num_bytes or 0, len(text) * (1 + is_long)


def _parquet(source: SourceFile, limit: ChunkSize, columns: Columns) -> Pieces:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl_ext.text.read.table_records import check_names, parquet_tables, table_records

    # Without a buffer, Arrow reads a column of a row group as a whole. A host's own blocks come on top of each read.
    by_blocks = {"buffer_size": BLOCK << 4 if is_url(source.path) else BLOCK, "pre_buffer": False}
    try:
        with open_source(source.path) as opened, pq.ParquetFile(opened.stream, **by_blocks) as file:
            check_names(source.path, file.schema_arrow.names)
            rows, found, numbers = file.metadata.num_rows, 0, count(1)
            for table in parquet_tables(file, *limit, columns):
                for records, size in table_records(table, *limit, columns):
                    share = (source.num_bytes or 0) * len(records) // max(rows, 1)
                    yield [(next(numbers), record) for record in records], share, size
                found += len(table)
            if found != rows:
                raise DataError(f"{source.path}: cannot be read as parquet: it has {found} of its {rows} rows")
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: of a column's name
        raise DataError(f"{source.path}: cannot be read as parquet: {first_line(error)}") from error


def _arrow(source: SourceFile, limit: ChunkSize, columns: Columns) -> Pieces:
    """Read the shards of an Arrow folder's state.json, streams of record batches.

    `load_from_disk` would accept a shard that is cut off between two batches.
    """
    import pyarrow as pa

    from verl_ext.text.read.table_records import check_bytes, check_names, table_records

    numbers, schema = count(1), None
    for shard in arrow_shards(source.path):
        try:
            with open_source(shard) as opened:
                opened.stream.seek(-len(STREAM_END), io.SEEK_END)
                is_whole = opened.stream.read() == STREAM_END
                opened.stream.seek(0)
                stream, whole, mapped = opened.stream, None, None
                if not is_url(shard):  # read without a copy, as a record batch may be larger than the memory
                    mapped = mmap.mmap(opened.stream.fileno(), 0, access=mmap.ACCESS_READ)
                    whole = pa.py_buffer(mapped)
                    stream = pa.BufferReader(whole)
                read = position = 0
                with pa.ipc.open_stream(stream) as batches:
                    schema = schema or batches.schema
                    if not batches.schema.equals(schema):
                        raise DataError(f"{shard}: must have the columns of the folder's first file")
                    check_names(shard, schema.names)
                    for batch in batches:
                        check_bytes(shard, batch, whole)
                        first, position, done = position, stream.tell(), 0
                        for records, size in table_records(pa.Table.from_batches([batch]), *limit, columns):
                            done += len(records)
                            reached = first + (position - first) * done // len(batch)
                            yield [(next(numbers), record) for record in records], reached - read, size
                            read = reached
                            if mapped is not None:
                                _release(mapped, opened)
                if not is_whole or stream.read(1):
                    raise DataError(
                        f"{shard}: cannot be read as Arrow: it does not end where its stream of records does"
                    )
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: of a column's name
            raise DataError(f"{shard}: cannot be read as Arrow: {first_line(error)}") from error


def _release(mapped: mmap.mmap, file: OpenedFile) -> None:
    """Give back read memory; raise `DataError` if the file has shrunk."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
    if os.fstat(file.stream.fileno()).st_size != file.size:
        raise DataError(f"{file.path}: must not change while it is read; it did")


def arrow_shards(folder: str) -> list[str]:
    """Return the files of an Arrow folder's state.json. Raises `DataError`."""
    try:
        if is_url(folder):
            with open_source(f"{folder}/{STATE}") as file:
                shards = parse_shards(file.stream.read().decode("utf-8"))
        else:
            shards = read_shards(Path(folder))
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: cannot be read as an Arrow folder: {first_line(error)}") from error
    return [f"{folder}/{shard.name}" for shard in shards]


def _hub(source: SourceFile, limit: ChunkSize, columns: Columns) -> Pieces:
    from verl_ext.text.read.table_records import check_names, table_records

    numbers = count(1)
    for table in hub_tables(source.path, *limit):
        check_names(source.path, table.schema.names)
        for records, size in table_records(table, *limit, columns):
            yield [(next(numbers), record) for record in records], size, size


READERS: dict[str, Callable[[SourceFile, ChunkSize, Columns], Pieces]] = {
    "jsonl": partial(_pieces, read=_lines),
    "json": _json,
    "parquet": _parquet,
    "csv": partial(_pieces, read=_rows),
    "tsv": partial(_pieces, read=_rows),
    "text": _text,
    "arrow": _arrow,
    "hub": _hub,
}
