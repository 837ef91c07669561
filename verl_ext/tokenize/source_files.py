"""Which files a category's paths, folders and globs stand for, and their bytes, decompressed."""

import bz2
import glob
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from verl_ext.commands.errors import DataError, UsageError, first_line

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}
KNOWN_FORMATS = (
    "jsonl, json, csv or txt (plain, or compressed as .gz, .bz2, .xz or .zst), parquet, an Arrow folder written by"
    " save_to_disk, or a folder of these"
)


def _zstd(raw: BinaryIO) -> BinaryIO:
    import pyarrow as pa  # heavy; and unlike zstandard's reader it refuses a truncated file

    stream: Any = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
    return io.BufferedReader(stream)


# Readers of whole files: several members or frames one after the other are read as one.
COMPRESSIONS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw, mode="rb"),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstd,
}
_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)


@dataclass(frozen=True)
class SourceFile:
    """One file (or Arrow folder) of one category; `category_id` counts from 1 in the order of `sources`."""

    category_id: int
    path: str
    kind: str  # jsonl | json | parquet | csv | text | arrow
    num_bytes: int


class OpenedFile:
    """A file's decompressed bytes (`stream`), and how far in the file itself they were read."""

    def __init__(self, path: str, raw: BinaryIO) -> None:
        ending = Path(path).suffix.lower()
        self._raw = raw
        self._size = os.fstat(raw.fileno()).st_size
        if ending in COMPRESSIONS and not self._size:
            raise EOFError(f"it is empty, which no {ending} file is")
        self.stream = COMPRESSIONS[ending](raw) if ending in COMPRESSIONS else raw

    @property
    def position(self) -> int:
        """Bytes of the file, compressed where it is, that were read."""
        return self._size if self._raw.closed else self._raw.tell()


@contextmanager
def open_source(path: str) -> Iterator[OpenedFile]:
    """Open a file for its body to read; `DataError` where that fails: no permission, a truncated or corrupt file."""
    try:
        with open(path, "rb") as raw:
            yield OpenedFile(path, raw)
    except _READ_ERRORS as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{path}: cannot be read: {reason}") from error


def find_source_files(patterns: dict[str, list[str]], key: str | None = None) -> list[SourceFile]:
    """Every file of every category, categories and patterns in the order given, files of a pattern sorted by name.

    Raises `UsageError` for a path that is missing or of no known format, naming `key`, by default
    `sources.<category>`; `DataError` for a file that cannot be read.
    """
    files: list[SourceFile] = []
    for category_id, (name, category_patterns) in enumerate(patterns.items(), start=1):
        for pattern in category_patterns:
            found = _expand(pattern, key or f"sources.{name}")
            files += [SourceFile(category_id, str(path), kind, _size(path)) for path, kind in found]
    return files


def _expand(pattern: str, key: str) -> list[tuple[Path, str]]:
    pattern = os.path.expanduser(pattern)
    # A path that exists is meant literally, also where its name has glob characters.
    paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not paths:
        what = "matches no file" if glob.has_magic(pattern) else "does not exist"
        raise UsageError(f"{key} must name files that exist; {pattern} {what}")
    found: list[tuple[Path, str]] = []
    for path in map(Path, paths):
        found += _in_folder(path, key) if path.is_dir() else [_as_file(path, key)]
    return found


def _as_file(path: Path, key: str) -> tuple[Path, str]:
    kind = kind_of(path)
    if kind is None:
        raise UsageError(f"{key} must be {KNOWN_FORMATS}; got {path}")
    return path, kind


def kind_of(path: str | Path) -> str | None:
    """The format that a file's name tells, upper or lower case; None for an unknown one."""
    name = Path(path).name.lower()
    plain = without_compression(name)
    kind = SUFFIXES.get(Path(plain).suffix)
    return None if kind == "parquet" and plain != name else kind


def without_compression(name: str) -> str:
    """A file's name less .gz, .bz2, .xz or .zst."""
    ending = Path(name).suffix
    return name.removesuffix(ending) if ending.lower() in COMPRESSIONS else name


def _in_folder(folder: Path, key: str) -> list[tuple[Path, str]]:
    """Every file at or below a folder, sorted. Where any is of another format, the .txt files are notes: left out."""
    if (folder / "dataset_dict.json").exists():
        splits = sorted(child.name for child in folder.iterdir() if child.is_dir())
        raise UsageError(f"{key} must name one split of the Arrow folder {folder}; it has {', '.join(splits)}")
    if _is_arrow_folder(folder):
        return [(folder, "arrow")]
    found: list[tuple[Path, str]] = []
    for child in sorted(folder.iterdir()):
        if child.name.startswith("."):
            continue
        if child.is_dir():
            found += _in_folder(child, key) if _has_known_files(child) else []
        elif kind := kind_of(child):
            found.append((child, kind))
    if any(kind != "text" for _, kind in found):
        found = [(path, kind) for path, kind in found if kind != "text"]
    if not found:
        raise UsageError(f"{key} must be {KNOWN_FORMATS}; the folder {folder} has none")
    return found


def _has_known_files(folder: Path) -> bool:
    return any(kind_of(child) for child in folder.rglob("*") if child.is_file())


def _is_arrow_folder(folder: Path) -> bool:
    return (folder / "state.json").exists() and (folder / "dataset_info.json").exists()


def _size(path: Path) -> int:
    try:
        if path.is_dir():
            return sum(child.stat().st_size for child in path.iterdir() if child.is_file())
        with open(path, "rb"):
            return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
