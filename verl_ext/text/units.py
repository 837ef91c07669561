"""Source files as units of work: what one process tokenizes, and what is done anew where it fails.

    big.jsonl    [ lines that begin in bytes 0..32M | 32M..64M | .. ]       a unit each
    big.parquet  [ row groups 0..3                  | 3..6     | .. ]       a unit each
    Arrow folder [ record batches of its shards     | ..            ]       a unit each
    a.json.gz, b.csv, c.txt, d.txt                                          read from their starts: consecutive small
                                                                            files share a unit, a large one is one

Units follow from the files and their sizes alone, and have an order: that of the files. What needs to know how many
records and lines lie before a part (numbers of lines, samples) gets it from `count`, which any process may do for any
part, and `numbered`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from verl_ext.text.readers import arrow_shards, lines, read_chunks
from verl_ext.text.sources import Part, SourceFile, file_name, is_url, open_source, without_compression
from verl_ext.values import DataError

LEAST_UNIT, MOST_UNIT = 4 << 20, 128 << 20  # bytes of a unit's files
UNITS = 256  # at most about so many, where the corpus is small enough


@dataclass(frozen=True)
class Unit:
    """Consecutive files of one source, or a part of a file; places: those of the files among their source's."""

    files: tuple[SourceFile, ...]
    places: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the files, as far as they are known."""
        return sum(file.num_bytes or 0 for file in self.files)


def unit_bytes(files: Iterable[SourceFile]) -> int:
    """How large a unit should be: a power of two, so that a corpus that grows a little keeps its units."""
    size, num_bytes = LEAST_UNIT, sum(file.num_bytes or 0 for file in files)
    while size < MOST_UNIT and num_bytes > size * UNITS:
        size *= 2
    return size


def units_of(files: Sequence[SourceFile], size: int) -> list[Unit]:
    """The units of about `size` bytes that files become; parts lack their numbers yet."""
    units: list[Unit] = []
    shared: list[tuple[SourceFile, int]] = []
    used = 0  # bytes of the shared files
    places: dict[int, int] = {}

    def close() -> None:
        units.append(Unit(tuple(file for file, _ in shared), tuple(place for _, place in shared)))
        shared.clear()

    for file in files:
        place = places[file.category_id] = places.get(file.category_id, -1) + 1
        parts = split(file, size)
        fits = file.num_bytes is not None and used + file.num_bytes <= size
        if shared and (len(parts) > 1 or not fits or shared[0][0].category_id != file.category_id):
            close()
            used = 0
        if len(parts) > 1:
            units += [Unit((part,), (place,)) for part in parts]
        else:
            shared.append((file, place))
            used += size if file.num_bytes is None else file.num_bytes
    if shared:
        close()
    return units


def split(file: SourceFile, size: int) -> list[SourceFile]:
    """The parts of about `size` bytes of a file; one that cannot be split, or be read, is its only part."""
    if (file.num_bytes or 0) <= size or file.path.startswith(("http://", "https://")):  # hosts may have no ranges
        return [file]
    if file.kind == "jsonl" and without_compression(file_name(file.path)) == file_name(file.path):
        assert file.num_bytes is not None
        borders = range(0, file.num_bytes, size)
        parts = [Part(start, min(start + size, file.num_bytes)) for start in borders]
        return [replace(file, num_bytes=part.stop - part.start, part=part) for part in parts]
    try:
        if file.kind == "parquet":
            return _joined(file, _row_groups(file.path), size)
        if file.kind == "arrow" and not is_url(file.path):
            return _joined(file, _record_batches(file.path), size)
    except (DataError, OSError, ValueError):  # reported when the file is read; Arrow's errors are ValueErrors
        return [file]
    return [file]


def _row_groups(path: str) -> Iterator[tuple[Part, int]]:
    """Each row group of a Parquet file, without what is before it, and its bytes, decoded."""
    import pyarrow.parquet as pq

    with open_source(path) as opened, pq.ParquetFile(opened.stream) as file:
        rows = 0
        for group in range(file.num_row_groups):
            facts = file.metadata.row_group(group)
            yield Part(group, group + 1, rows, rows), facts.total_byte_size
            rows += facts.num_rows


def _record_batches(folder: str) -> Iterator[tuple[Part, int]]:
    """Each record batch of an Arrow folder, and its bytes. ValueError for dictionaries, which batches share."""
    import pyarrow as pa

    begin = rows = 0
    for shard in arrow_shards(folder):
        size = os.path.getsize(shard)
        with pa.memory_map(shard) as file, pa.ipc.open_stream(file) as batches:
            if "dictionary<" in str(batches.schema):
                raise ValueError(f"{shard} has dictionaries")
            piece = Part(begin, begin, rows, rows)  # the schema goes with the first batch, the end with the last
            for batch in batches:
                if piece.stop > piece.start:
                    yield piece, piece.stop - piece.start
                    piece = Part(piece.stop, piece.stop, rows, rows)
                piece = replace(piece, stop=begin + file.tell())
                rows += batch.num_rows
            yield replace(piece, stop=begin + size), begin + size - piece.start
        begin += size


def _joined(file: SourceFile, pieces: Iterable[tuple[Part, int]], size: int) -> list[SourceFile]:
    """Consecutive pieces joined to parts of about `size` bytes; num_bytes is each part's share of the file's."""
    parts: list[tuple[Part, int]] = []
    for piece, num_bytes in pieces:
        if parts and parts[-1][1] < size:
            part, used = parts.pop()
            parts.append((replace(part, stop=piece.stop), used + num_bytes))
        else:
            parts.append((piece, num_bytes))
    whole = sum(num_bytes for _, num_bytes in parts)
    shares = [(file.num_bytes or 0) * num_bytes // max(whole, 1) for _, num_bytes in parts]
    split_file = [replace(file, num_bytes=own, part=part) for (part, _), own in zip(parts, shares, strict=True)]
    return split_file if len(parts) > 1 else [file]


def count(file: SourceFile) -> tuple[int, int]:
    """(records, lines or rows) of a file or a part of one, less cheaply than its size. Raises `DataError`."""
    if file.kind == "jsonl":
        with open_source(file.path) as opened:
            records = places = 0
            for record, _ in lines(opened.stream, file.part):
                records, places = records + (record is not None), places + 1
        return records, places
    records = sum(len(chunk.records) for chunk in read_chunks(file))
    return records, records


def numbered(units: Iterable[Unit], counts: Mapping[SourceFile, tuple[int, int]]) -> Iterator[Unit]:
    """The units, in order, with what lies before the parts of the files that `counts` has."""
    key, records, places = (0, 0), 0, 0
    for unit in units:
        (file, *_), (place, *_) = unit.files, unit.places
        if key != (file.category_id, place):
            key, records, places = (file.category_id, place), 0, 0
        if file.part is None or file not in counts:
            yield unit
            continue
        yield Unit((replace(file, part=replace(file.part, records=records, places=places)),), unit.places)
        records, places = records + counts[file][0], places + counts[file][1]
