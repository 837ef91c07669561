"""Read Arrow and Parquet tables as records, some rows at a time.

    columns   messages   answer      notes               read: messages, answer
    record    [{…}]      "b"         UNREAD              {"messages": [{…}], "answer": "b", "notes": UNREAD}
                         BadRecord                       an answer that cannot be read, such as text that is not UTF-8

A record is that of the same row as a line of JSON: Arrow's type for JSON is parsed, a map is an object, and the null
fields of a struct, which Arrow adds because another row has them, are left out.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.options import DataError, first_line, must
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.json_records import TableRow, parse_json, repeated_name

UNREAD = BadRecord("unreadable_row", "the field is not read")  # the value of a field that is there
# ArrowInvalid is a ValueError, as are Python's errors for impossible dates and for text that is not UTF-8.
_ROW_ERRORS = (ValueError, OverflowError, NotImplementedError)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
_ENCODED = (pa.types.is_dictionary, pa.types.is_run_end_encoded)
Convert = Callable[[Any], Any]


def check_names(path: str, names: Iterable[str]) -> None:
    """Raise `DataError` if two columns of a file have one name."""
    if repeated := repeated_name(names):
        raise DataError(must(f"{path}:", "have columns of different names", f"{repeated!r} more than once"))


def check_bytes(path: str, batch: pa.RecordBatch, mapped: pa.Buffer | None) -> None:
    """Raise `DataError` if a column lies beyond the file, unchecked by Arrow.

    mapped: the whole file, if it is memory-mapped. Bytes that were decompressed are not in it, and may be written to.
    """
    arrays = [*batch.columns, *(column.dictionary for column in batch.columns if pa.types.is_dictionary(column.type))]
    for part in (part for array in arrays for part in array.buffers() if part is not None and not part.is_mutable):
        whole = mapped or part.parent or part
        if not whole.address <= part.address <= part.address + part.size <= whole.address + whole.size:
            raise DataError(f"{path}: cannot be read as Arrow: a column has more bytes than the file")


def table_records(
    table: Any, records: int, num_bytes: int, columns: Collection[str] | None
) -> Iterator[tuple[list[Any], int]]:
    """Yield (records, their bytes) of a table or batch, in order.

    records, num_bytes: the maximum of each part; a single row may have more bytes. columns: those that are read (None:
    all); the fields of the others are UNREAD.
    """
    names = table.schema.names
    read = table.select([name for name in names if columns is None or name in columns])
    converts = {field.name: conversion(field.type) for field in read.schema}
    is_there = {name: table.column(name).is_valid() for name in names if name not in converts}
    for first, rows, size in _parts(read, 0, table.num_rows, records, num_bytes):
        part, values = read.slice(first, rows), {}
        for name in names:
            if name in converts:
                values[name] = _column(part.select([name]), name, converts[name])
            else:
                values[name] = [UNREAD if it_is else None for it_is in is_there[name].slice(first, rows).to_pylist()]
        yield [TableRow(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)], size


def _parts(table: Any, first: int, rows: int, records: int, num_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, rows, bytes), halved until few and small enough."""
    part = table.slice(first, rows)
    try:
        part.validate()  # a damaged file may point beyond its own bytes, which `nbytes` would follow
        size = part.nbytes
    except _ROW_ERRORS:
        size = num_bytes + 1
    if rows > 1 and (rows > records or size > num_bytes):
        half = min(rows // 2, records)
        yield from _parts(table, first, half, records, num_bytes)
        yield from _parts(table, first + half, rows - half, records, num_bytes)
    elif rows:
        yield first, rows, size


def _column(column: Any, name: str, convert: Convert | None) -> list[Any]:
    """Return a column's values; an unreadable one is a `BadRecord`."""
    try:
        return _values(column, convert)
    except _ROW_ERRORS as error:
        if column.num_rows > 1:
            return [_column(column.slice(row, 1), name, convert)[0] for row in range(column.num_rows)]
        if isinstance(error, BadRecord):
            return [BadRecord(error.reason, f"column {name}: {error}")]
        if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error):
            return [BadRecord("not_utf8", f"column {name} must be UTF-8")]
        return [BadRecord("unreadable_row", f"column {name} cannot be read: {first_line(error)}")]


def _values(column: Any, convert: Convert | None) -> list[Any]:
    column.validate(full=True)
    values = column.column(0).to_pylist()
    return values if convert is None else [None if value is None else convert(value) for value in values]


def conversion(kind: Any) -> Convert | None:
    """Return how an Arrow type's non-null values become JSON's; None: unchanged."""
    if isinstance(kind, pa.JsonType):
        return parse_json
    if isinstance(kind, pa.BaseExtensionType):
        return conversion(kind.storage_type)
    if any(is_kind(kind) for is_kind in _ENCODED):
        return conversion(kind.value_type)
    if pa.types.is_map(kind):
        of_key, of_item = _of_null(conversion(kind.key_type)), _of_null(conversion(kind.item_type))
        return lambda pairs: _object([(of_key(key), of_item(item)) for key, item in pairs])
    if any(is_kind(kind) for is_kind in _LISTS) or pa.types.is_large_list_view(kind):
        of_value = conversion(kind.value_type)
        return of_value and (lambda values: [None if value is None else of_value(value) for value in values])
    if pa.types.is_struct(kind):
        of_field = {field.name: conversion(field.type) for field in kind.fields}
        return lambda fields: {
            name: value if (convert := of_field[name]) is None else convert(value)
            for name, value in fields.items()
            if value is not None
        }
    return None


def _of_null(convert: Convert | None) -> Convert:
    return lambda value: value if value is None or convert is None else convert(value)


def _object(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    if repeated := repeated_name(key for key, _ in pairs):
        raise BadRecord("duplicate_key", f"a map has the key {str(repeated)[:80]!r} more than once")
    return dict(pairs)


def parquet_tables(
    file: pq.ParquetFile, records: int, num_bytes: int, columns: Collection[str] | None
) -> Iterator[Any]:
    """Yield a Parquet file's tables of at most `records` rows, about `num_bytes`.

    A column that nothing reads is not decoded if the file's statistics tell which of its rows have a value; booleans or
    nulls stand for it.
    """
    for group in range(file.num_row_groups):
        facts, names = file.metadata.row_group(group), file.schema_arrow.names
        leaves: dict[str, list[Any]] = {name: [] for name in names}
        for leaf in map(facts.column, range(facts.num_columns)):
            path = leaf.path_in_schema
            # A name may have points itself, and begin with that of another column.
            owners = [name for name in names if f"{path}.".startswith(f"{name}.")]
            if not owners:
                raise pa.ArrowInvalid(f"its schema has no column {path}")
            leaves[max(owners, key=len)].append(leaf)
        unread = [] if columns is None else [name for name in names if name not in columns]
        known = {name: _presence(leaves[name], facts.num_rows) for name in unread}
        fills = {name: pa.scalar(True if it_is else None) for name, it_is in known.items() if it_is is not None}
        read = [name for name in names if name not in fills]
        size = sum(leaf.total_uncompressed_size for name in read for leaf in leaves[name])
        rows = min(max(num_bytes * facts.num_rows // max(size, 1), 1), records)
        for batch in _batches(file, group, read, rows, num_bytes):
            arrays = {name: batch.column(name) for name in read}
            yield pa.table({name: arrays.get(name, pa.repeat(fills.get(name), len(batch))) for name in names})


def _presence(leaves: list[Any], rows: int) -> bool | None:
    """Return whether all rows have a value, or none has; None: unclear."""
    nulls = [leaf.statistics.null_count if leaf.statistics is not None else None for leaf in leaves]
    if 0 in nulls:
        return True
    return False if nulls == [rows] and leaves[0].num_values == rows else None


def _batches(file: pq.ParquetFile, group: int, read: list[str], rows: int, num_bytes: int) -> Iterator[Any]:
    """Yield a row group's columns, `rows` rows at a time or fewer.

    Values of a dictionary, and rows of very different sizes, may take far more bytes than the file's sizes say.
    """
    total, done = file.metadata.row_group(group).num_rows, 0
    if not read:
        yield from (pa.table({"": pa.nulls(min(rows, total - first))}) for first in range(0, total, rows))
        return
    while done < total:
        at, last = 0, rows
        try:
            for batch in file.iter_batches(rows, row_groups=[group], columns=read):
                at += len(batch)
                if at <= done:  # read once more, with fewer rows at a time
                    continue
                yield batch.slice(len(batch) - at + done)
                done = at
                if rows > 1 and batch.nbytes > 4 * num_bytes:
                    rows = max(rows // 8, 1)
                    break
        except pa.ArrowNotImplementedError:  # more than 2 GiB of text in a nested column
            if rows == 1:
                raise
            rows = max(rows // 8, 1)
        if rows == last:
            return
