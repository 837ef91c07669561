"""Open tokenized folders memory-mapped, with their columns as numpy views.

No token is copied. Arrow keeps a list column in chunks (record batches). Each chunk has its rows' values back to back:

    rows      [7 8 9] [4] [] [5 6]
    offsets   0       3   4  4     6      one more than rows, int32 or int64
    values    7 8 9   4      5 6
"""

import io
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verl_ext.data.tokenized.categories import FolderCategories
from verl_ext.data.tokenized.files_in_use import DataFile
from verl_ext.data.tokenized.units import UnitRows, has_answers
from verl_ext.options import first_line, must
from verl_ext.packing.plan import offsets_of
from verl_ext.text.arrow_folder import DOCUMENT_COLUMNS, FIRST_BLOCK, MARK, TOKEN_COLUMNS
from verl_ext.text.read.shards import STATE, STREAM_END, Shard, read_shards


class OpenFolder(NamedTuple):
    """The rows of a tokenized folder."""

    table: pa.Table
    shards: tuple[Shard, ...]
    is_ours: bool  # the shards have facts of documents that verl-ext wrote


def open_folder(folder: str, key: str) -> OpenFolder:
    """Open the dataset in `folder`, memory-mapped.

    Raises ValueError, which names `key`, if there is no single dataset, no document, or a column is missing.
    """
    path = Path(folder)
    if problem := _folder_problem(path):
        raise ValueError(f"{key} must be {problem}")
    try:
        shards = read_shards(path)
        for shard in shards:
            _check_whole(path / shard.name, shard)
        # Like `datasets.load_from_disk`, whose import takes a second. An empty dataset is saved without a file.
        tables = [pa.ipc.open_stream(pa.memory_map(str(path / shard.name))).read_all() for shard in shards]
        table = pa.concat_tables(tables) if tables else pa.table({name: [] for name in TOKEN_COLUMNS})
        table.validate()  # a damaged file may point beyond its own bytes
        names = table.column_names  # which may not be text either
    except Exception as error:  # damaged bytes can make Arrow raise any error
        reason = first_line(error)
        raise ValueError(f"{key} must be a complete dataset folder; {folder} cannot be opened: {reason}") from error
    is_ours = all(MARK.items() <= (shard.schema.metadata or {}).items() for shard in tables)
    wanted = [*TOKEN_COLUMNS, *(DOCUMENT_COLUMNS if is_ours and tables else ())]
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(
            f"{key} must have the columns {', '.join(wanted)}; {folder} lacks {', '.join(missing)} "
            f"(it has {', '.join(names) or 'none'})"
        )
    if not len(table):
        raise ValueError(f"{key} must hold at least one document; {folder} has none")
    return OpenFolder(table, shards, is_ours)


def _check_whole(path: Path, shard: Shard) -> None:
    """Raise ValueError if a shard is cut short, which Arrow may accept."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - len(STREAM_END)))
        end = file.read()
    if shard.bytes not in (None, size):
        raise ValueError(f"{path.name} has {size:,} bytes and had {shard.bytes:,} when it was tokenized")
    if end != STREAM_END:
        raise ValueError(f"{path.name} does not end as a stream of record batches does")


def _folder_problem(path: Path) -> str | None:
    """Return the requirement that `path` does not meet, if any."""
    wanted = "a folder written by `verl-ext tokenize` or by datasets' save_to_disk"
    if not path.is_dir():
        return f"{wanted}; {path} {'is a file' if path.exists() else 'does not exist'}"
    if not any(path.iterdir()):
        return f"{wanted}; {path} is empty"
    if (path / "dataset_dict.json").exists():
        names = [entry.name for entry in path.iterdir() if entry.is_dir()]
        splits = sorted(names, key=lambda name: (name != "train", name))
        example = path / (splits[0] if splits else "train")
        return f"one split; {path} is a DatasetDict of {', '.join(splits) or 'no splits'}: give {example}"
    if not (path / "state.json").exists() or not (path / "dataset_info.json").exists():
        return f"{wanted}; {path} has no state.json and dataset_info.json"
    return None


LIST_KINDS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)

Convert = Callable[[Any], NDArray[Any]]
Piece = tuple[int, int, int]  # chunk, begin, end: values of one chunk, counted from the first value of its first row


class ListColumn:
    """A list column of rows 0..N-1, whose chunks may differ in type.

    Columns with the same chunks and row lengths have the same pieces: the pieces that `pieces` of one of them finds
    suit `gather` of each.
    """

    def __init__(
        self, chunks: list[pa.Array], name: str, kinds: tuple[str, ...], key: str, maps: Sequence[Convert | None] = ()
    ) -> None:
        """Check the chunks; raise ValueError, which names `key`.

        kinds: the kinds that the values may have, of `integer`, `boolean`, `floating`. maps: how to convert the values
        of each chunk, None to leave them as they are.
        """
        self._chunks = [chunk for chunk in chunks if len(chunk)]
        of_chunks = maps or [None] * len(chunks)
        self._maps = [of_chunk for chunk, of_chunk in zip(chunks, of_chunks, strict=True) if len(chunk)]
        for kind in {chunk.type for chunk in self._chunks}:
            is_list = any(is_kind(kind) for is_kind in LIST_KINDS)
            if not is_list or not any(getattr(pa.types, f"is_{wanted}")(kind.value_type) for wanted in kinds):
                wanted = " or ".join(kinds)
                raise ValueError(must(key, f"have column {name} as a list of {wanted} values", kind))
        self.first_row = np.concatenate([[0], np.cumsum([len(chunk) for chunk in self._chunks], dtype=np.int64)])
        for first, chunk in zip(self.first_row, self._chunks, strict=False):
            begin, end = (int(at) for at in _offsets(chunk)[[0, -1]])
            if not 0 <= begin <= end <= (most := len(chunk.values)):
                raise ValueError(must(key, f"have column {name} inside its {most} values", f"{begin}..{end}"))
            if chunk.null_count or chunk.values.null_count:
                rows = f"rows {first}..{first + len(chunk) - 1}"
                raise ValueError(f"{key} must have no null in column {name}; {rows} hold one")
        self._views: list[tuple[NDArray[Any], Any] | None] = [None] * len(self._chunks)

    def __len__(self) -> int:
        return int(self.first_row[-1])

    def row_lengths(self) -> NDArray[np.integer]:
        """Return the number of values in each row, integer[N]."""
        return np.concatenate([np.diff(_offsets(chunk)) for chunk in self._chunks])

    def block(self, first: int, last: int) -> NDArray[Any]:
        """Return the values of rows first..last-1, all in one chunk."""
        number = int(np.searchsorted(self.first_row, first, side="right")) - 1
        offsets, values = self._view(number)
        row = first - int(self.first_row[number])
        assert row + last - first < len(offsets), "a block must lie in one chunk"
        begin, end = (int(offsets[at]) - int(offsets[0]) for at in (row, row + last - first))
        return values[begin:end]

    def pieces(self, row: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64]) -> list[Piece]:
        """Locate tokens start..start+length-1 of each row."""
        chunk = np.searchsorted(self.first_row, row, side="right") - 1
        within = row - self.first_row[chunk]
        pieces = []
        for number, local, skip, count in zip(
            chunk.tolist(), within.tolist(), start.tolist(), length.tolist(), strict=True
        ):
            offsets = self._view(number)[0]
            begin = offsets.item(local) - offsets.item(0) + skip
            pieces.append((number, begin, begin + count))
        return pieces

    def gather(self, pieces: Sequence[Piece], out: NDArray[Any]) -> None:
        """Write the values of `pieces` to `out`, one after the other."""
        values = {number: self._view(number)[1] for number in {number for number, _, _ in pieces}}
        # Slices beat an index of every token, even for documents of 200 tokens: 1.4 against 1.9 ns a token.
        parts = [values[number][begin:end] for number, begin, end in pieces]
        np.concatenate(parts, out=out, casting="same_kind")

    def _view(self, number: int) -> tuple[NDArray[Any], Any]:
        """Return a chunk's offsets and values, from its first row on.

        Slices of values are numpy arrays. They are views unless the values are bit-packed or converted.
        """
        view = self._views[number]
        if view is None:
            chunk = self._chunks[number]
            offsets = _offsets(chunk)
            values = chunk.flatten()
            if pa.types.is_boolean(values.type):
                flat: Any = _Converted(values, lambda bits: bits.to_numpy(zero_copy_only=False))
            else:
                flat = values.to_numpy(zero_copy_only=True)
            if (convert := self._maps[number]) is not None:
                flat = _Converted(flat, convert)
            view = self._views[number] = (offsets, flat)
        return view


class _Converted:
    """Values that are converted slice by slice."""

    def __init__(self, values: Any, convert: Convert) -> None:
        self._values, self._convert = values, convert

    def __getitem__(self, part: slice) -> NDArray[Any]:
        return self._convert(self._values[part])


def _offsets(chunk: pa.Array) -> NDArray[Any]:
    if pa.types.is_fixed_size_list(chunk.type):
        return (np.arange(len(chunk) + 1) + chunk.offset) * chunk.type.list_size
    return chunk.offsets.to_numpy()


VALUE_KINDS = {
    "input_ids": ("integer",),
    "loss_mask": ("integer", "boolean"),
    "category_ids": ("integer",),
    "loss_weight": ("floating", "integer"),
}


def fitting(first: int, lengths: NDArray[np.integer], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of at most `max_tokens` tokens, or one row."""
    offsets, row = offsets_of(lengths), 0
    while row < len(lengths):
        until = max(int(np.searchsorted(offsets, offsets[row] + max_tokens, side="right")) - 1, row + 1)
        yield first + row, first + until
        row = until


class DocumentColumns(NamedTuple):
    """Facts of each document, integer[N]; -1 where a folder lacks them."""

    num_targets: NDArray[Any]
    lowest_token_id: NDArray[Any]
    highest_token_id: NDArray[Any]
    full_length: NDArray[Any]  # before it was cut
    category: NDArray[Any]  # of the document's record, which its targets have


class TokenizedData:
    """The columns of tokenized folders, in order; they pickle as paths.

    `columns[name]` is a ListColumn of N rows for input_ids, loss_mask, category_ids and, if the folders have it,
    loss_weight. Categories of one name have one number in all folders, with its name in `category_names`; reading a
    value that could be of two categories raises ValueError.
    """

    def __init__(
        self,
        folders: Sequence[str],
        key: str = "data.train_dir",
        check: bool = True,
        with_answers: bool = False,
    ) -> None:
        """Open `folders`.

        check: compare the rows of every list column with `length`. with_answers: the caller reads `units`.

        Raises ValueError if a folder is not a tokenized dataset, columns have a wrong type, or lengths disagree; also
        if rows are answers, of which some are rejected, unless `with_answers`.
        """
        self.folders, self.key, self._with_answers = tuple(folders), key, with_answers
        self._folders = [open_folder(folder, key) for folder in self.folders]
        tables = [folder.table for folder in self._folders]
        with_preferences = (path for path, table in zip(self.folders, tables, strict=True) if has_answers(table))
        if not with_answers and (path := next(with_preferences, None)):
            remedy = ": data=chosen trains on the preferred ones" if key.startswith("data.") else ""
            got = f"preferences in {path}, whose rejected answers are not to be learnt{remedy}"
            raise ValueError(must(key, "hold documents to learn", got))
        names = list(VALUE_KINDS)
        with_weight = ["loss_weight" in table.column_names for table in tables]
        if not any(with_weight):
            names.remove("loss_weight")
        elif not all(with_weight):
            lacking = self.folders[with_weight.index(False)]
            raise ValueError(f"{key} must have loss_weight in all of its folders or in none; {lacking} lacks it")
        # Each folder has numbers of categories of its own, which are converted when they are read.
        categories = FolderCategories.read(self.folders)
        self.category_names, self._maps = categories.names, categories.maps
        of_table = zip(tables, self._maps, strict=True)
        maps = {"category_ids": [numbers for table, numbers in of_table for _ in table.column("category_ids").chunks]}
        self.columns = {
            name: ListColumn(self._chunks(name), name, VALUE_KINDS[name], key, maps.get(name, ())) for name in names
        }
        # Arrow files keep all columns in the same record batches, so that pieces of one column are those of all.
        first_row = self.columns["input_ids"].first_row
        assert all(np.array_equal(column.first_row, first_row) for column in self.columns.values())
        if check:
            self._check_lengths()

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def __reduce__(self) -> tuple[type, tuple[Sequence[str], str, bool, bool]]:
        return type(self), (self.folders, self.key, False, self._with_answers)

    @cached_property
    def files(self) -> tuple[DataFile, ...]:
        """The shards of all folders, in the order of their rows."""
        files = []
        for path, folder in zip(map(Path, self.folders), self._folders, strict=True):
            recorded = (path / STATE).stat().st_mtime_ns
            files += [DataFile(str(path / shard.name), shard.xxh3_128, recorded) for shard in folder.shards]
        return tuple(files)

    @cached_property
    def lengths(self) -> NDArray[np.integer]:
        """The `length` column, int32[N], or int64[N] if a value needs it."""
        chunks = self._chunks("length")
        for chunk in chunks:
            if not pa.types.is_integer(chunk.type):
                raise ValueError(must(self.key, "have column length as integer", chunk.type))
            if chunk.null_count:
                raise ValueError(f"{self.key} must have no null in column length")
        lengths = np.concatenate([chunk.to_numpy() for chunk in chunks])
        if (lowest := lengths.min()) < 0:
            raise ValueError(must(self.key, "have column length at least 0", lowest))
        return lengths.astype(np.int32 if lengths.max() <= np.iinfo(np.int32).max else np.int64, copy=False)

    @cached_property
    def document_columns(self) -> DocumentColumns | None:
        """The columns of verl-ext's folders; None if there is none."""
        if not any(folder.is_ours for folder in self._folders):
            return None
        columns = []
        for name in DOCUMENT_COLUMNS:
            parts = []
            for (table, _, is_ours), numbers in zip(self._folders, self._maps, strict=True):
                part = table.column(name).to_numpy() if is_ours else np.full(table.num_rows, -1, np.int32)
                parts.append(numbers(part) if name == "document_category" and is_ours and numbers else part)
            columns.append(np.concatenate(parts))
        return DocumentColumns(*columns)

    @property
    def first_blocks(self) -> NDArray[np.uint64] | None:
        """The hashes that `verl-ext tokenize` writes; None if a folder lacks them."""
        if not all(folder.is_ours and FIRST_BLOCK in folder.table.column_names for folder in self._folders):
            return None
        parts = [folder.table.column(FIRST_BLOCK).to_numpy() for folder in self._folders]
        return np.concatenate(parts).view(np.uint64)

    @cached_property
    def units(self) -> UnitRows | None:
        """The preferences among the rows; raise ValueError for broken units."""
        if not any(has_answers(folder.table) for folder in self._folders):
            return None
        of_folders = zip((folder.table for folder in self._folders), self.folders, strict=True)
        return UnitRows.joined([UnitRows.of_table(table, self.key, folder) for table, folder in of_folders])

    def block(self, first: int, last: int) -> dict[str, NDArray[Any]]:
        """Return the values of rows first..last-1, all in one chunk, by column."""
        return {name: column.block(first, last) for name, column in self.columns.items()}

    def gather(
        self, row: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64], out: dict[str, NDArray[Any]]
    ) -> None:
        """Write tokens start..start+length-1 of each row to `out`, by column."""
        pieces = self.columns["input_ids"].pieces(row, start, length)
        for name, values in out.items():
            self.columns[name].gather(pieces, values)

    def text(self, name: str, row: int) -> str:
        """Return a text of the first folder."""
        return self._folders[0].table.column(name)[row].as_py()

    def first_rows(self) -> NDArray[np.int64]:
        """Return the first row of every folder and their number, int64[F+1]."""
        return np.cumsum([0, *(folder.table.num_rows for folder in self._folders)], dtype=np.int64)

    def blocks(self, first: int, last: int, max_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield ranges like `fitting`, each in one chunk of every column."""
        edges = np.unique(np.append(self.columns["input_ids"].first_row.clip(first, last), [first, last]))
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            yield from fitting(begin, self.lengths[begin:end], max_tokens)

    def _chunks(self, name: str) -> list[pa.Array]:
        return [chunk for folder in self._folders for chunk in folder.table.column(name).chunks]

    def _check_lengths(self) -> None:
        for name, column in self.columns.items():
            counts = column.row_lengths()
            wrong = np.flatnonzero(counts != self.lengths)
            if len(wrong):
                row = wrong[0]
                raise ValueError(
                    f"{self.key} must have as many {name} as length says in every row; row {row} has length "
                    f"{self.lengths[row]} and {counts[row]} {name} ({len(wrong)} such rows)"
                )
