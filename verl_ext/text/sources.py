"""Which files a category's paths, folders, globs and URLs stand for, and their bytes, decompressed."""

import bz2
import codecs
import glob
import gzip
import io
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from verl_ext.text.json_records import BadRecord
from verl_ext.text.remote import (
    hub_split,
    is_hub_dataset,
    is_url,
    local_path,
    open_remote,
    remote_files,
)
from verl_ext.values import DataError, UsageError, first_line

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
}
KNOWN_FORMATS = (
    "jsonl, json, csv, tsv or txt (plain, or compressed as .gz, .bz2, .xz or .zst), parquet, an Arrow folder written by"
    " save_to_disk, a folder of these, a URL of these, or a Hub dataset (hf://datasets/owner/name)"
)


_ARROW_FILES = ("state.json", "dataset_info.json")  # of a folder written by save_to_disk
_SPLITS = "dataset_dict.json"  # of one with a folder for each split


def _zstd(raw: BinaryIO) -> BinaryIO:
    import pyarrow as pa  # heavy; and unlike zstandard's reader it refuses a truncated file

    stream: Any = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
    return io.BufferedReader(stream)


class _Members(io.RawIOBase):
    """Compressed members one after the other, as tools that compress in parallel write them.

    Python's BZ2File and LZMAFile take a damaged member after the first for the file's end.
    """

    def __init__(self, raw: BinaryIO, decompressor: Callable[[], Any]) -> None:
        self._raw, self._decompressor, self._member = raw, decompressor, decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            compressed = b""
            if self._member.eof:
                compressed = self._member.unused_data.lstrip(b"\0")  # zeros between members are padding
                while not compressed:
                    if not (block := self._raw.read(_BLOCK)):
                        return 0
                    compressed = block.lstrip(b"\0")
                self._member = self._decompressor()
            elif self._member.needs_input and not (compressed := self._raw.read(_BLOCK)):
                raise EOFError("it ends before its end-of-stream marker")
            data = self._member.decompress(compressed, len(buffer))
        buffer[: len(data)] = data
        return len(data)


# Readers of whole files: several members or frames one after the other are read as one.
COMPRESSIONS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw, mode="rb"),
    ".bz2": lambda raw: io.BufferedReader(_Members(raw, bz2.BZ2Decompressor), _BLOCK),
    ".xz": lambda raw: io.BufferedReader(_Members(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)), _BLOCK),
    ".zst": _zstd,
}
_BLOCK = 1 << 16  # bytes of a compressed file read at once
_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, MemoryError)


@dataclass(frozen=True)
class SourceFile:
    """One file, Arrow folder or Hub dataset of one category; `category_id` counts from 1 in the order of `sources`."""

    category_id: int
    path: str  # or URL
    kind: str  # jsonl | json | parquet | csv | tsv | text | arrow | hub
    num_bytes: int | None  # None: not known before it is read


def total_bytes(files: Iterable[SourceFile]) -> int | None:
    """The files' bytes together; None where those of one are not known."""
    sizes = [file.num_bytes for file in files]
    return None if None in sizes else sum(size or 0 for size in sizes)


class OpenedFile:
    """A file's decompressed bytes (`stream`), and how far in the file itself they were read."""

    def __init__(self, path: str, raw: Any) -> None:
        ending = Path(file_name(path)).suffix.lower()
        self.path, self._raw = path, raw
        self.size: int | None = getattr(raw, "size", None) if is_url(path) else os.fstat(raw.fileno()).st_size
        if ending in COMPRESSIONS and self.size == 0:
            raise EOFError(f"it is empty, which no {ending} file is")
        plain = io.BufferedReader(raw, 1 << 20) if is_url(path) else raw
        self.stream: Any = COMPRESSIONS[ending](plain) if ending in COMPRESSIONS else plain

    @property
    def position(self) -> int:
        """Bytes of the file, compressed where it is, that were read."""
        return (self.size or 0) if self._raw.closed else self._raw.tell()

    def check_end(self) -> None:
        """To be called at the stream's end: a host may answer with nothing where a file has become shorter."""
        if self.size is not None and self.position != self.size:
            raise DataError(f"{self.path}: must not change while it is read; {self.position} of {self.size} bytes came")


@contextmanager
def open_source(path: str) -> Iterator[OpenedFile]:
    """Open a file or URL for its body to read.

    Raises `DataError` where that fails: no permission, a truncated or corrupt file, a local one that changes meanwhile,
    a host that does not answer.
    """
    try:
        with open_remote(path) if is_url(path) else open(path, "rb") as raw:
            before = _state(path)
            yield OpenedFile(path, raw)
            if _state(path) != before:
                raise DataError(f"{path}: must not change while it is read; it did")
    except (DataError, UsageError, BadRecord):
        raise
    except Exception as error:
        if not is_url(path) and not isinstance(error, _READ_ERRORS):  # a remote file system raises errors of its own
            raise
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{path}: cannot be read: {reason}") from error


def _state(path: str) -> tuple[int, int, int] | None:
    if is_url(path):
        return None
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def check_is_utf8(path: str, opened: OpenedFile) -> None:
    """Refuse a text file in UTF-16 or UTF-32, which its mark tells, or the NUL bytes that plain English has there."""
    if problem := encoding_problem(opened.stream.peek(4)[:4]):
        raise DataError(f"{path}: must be UTF-8; {problem}")


def encoding_problem(start: bytes) -> str | None:
    """What a file is, by its first four bytes, that is not in UTF-8; None of one that may be."""
    if start in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        return "it is UTF-32"
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "it is UTF-16"
    return "its first bytes have a NUL, as those of UTF-16 and UTF-32" if b"\0" in start else None


def find_source_files(patterns: dict[str, list[str]], key: str | None = None) -> list[SourceFile]:
    """Every file of every category, categories and patterns in the order given, files of a pattern sorted by name.

    Raises `UsageError` for a path that is missing or of no known format, naming `key`, by default
    `sources.<category>`; `DataError` for a file that cannot be read.
    """
    files: list[SourceFile] = []
    for category_id, (name, category_patterns) in enumerate(patterns.items(), start=1):
        for pattern in category_patterns:
            found = _found(pattern, key or f"sources.{name}")
            files += [SourceFile(category_id, path, kind, size) for path, kind, size in found]
    return files


def _found(pattern: str, key: str) -> list[tuple[str, str, int | None]]:
    """(path, kind, bytes) of each file of a pattern."""
    if is_hub_dataset(pattern):
        url, size = hub_split(pattern, key)
        return [(url, "hub", size)]
    if is_url(pattern):
        return _remote(pattern, key)
    return [(str(path), kind, _size(path)) for path, kind in _expand(local_path(pattern), key)]


def _remote(url: str, key: str) -> list[tuple[str, str, int | None]]:
    found = dict(remote_files(url, key))
    if list(found) == [url]:
        return [(url, _known_kind(url, key), found[url])]
    if split := next((path for path in found if file_name(path) == _SPLITS), None):
        raise UsageError(f"{key} must name one split of the Arrow folder {os.path.dirname(split)}")
    kinds: dict[str, str] = {}
    sizes: dict[str, int | None] = {}
    for path, size in found.items():
        folder = os.path.dirname(path)
        if all(f"{folder}/{name}" in found for name in _ARROW_FILES):
            before = sizes.get(folder, 0)
            kinds[folder], sizes[folder] = "arrow", None if size is None or before is None else before + size
        elif not any(part.startswith(".") for part in path.split("/")) and (kind := kind_of(path)):
            kinds[path], sizes[path] = kind, size
    kinds = _without_notes(kinds)
    if not kinds:
        raise UsageError(f"{key} must be {KNOWN_FORMATS}; {url} has none")
    return [(path, kind, sizes[path]) for path, kind in kinds.items()]


def _expand(pattern: str, key: str) -> list[tuple[Path, str]]:
    """The files of a path, folder or glob. One that links lead to several times is read once."""
    pattern = os.path.expanduser(pattern)
    # A path that exists is meant literally, also where its name has glob characters.
    paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not paths:
        what = "matches no file" if glob.has_magic(pattern) else "does not exist"
        raise UsageError(f"{key} must name files that exist; {pattern} {what}")
    found: list[tuple[Path, str]] = []
    seen: set[str] = set()
    for path in map(Path, paths):
        if path.is_dir():
            found += _in_folder(path, key, seen)
        elif _is_new(path, seen):
            found.append((_regular(path, key), _known_kind(str(path), key)))
    if not found:
        raise UsageError(f"{key} must be {KNOWN_FORMATS}; the folder {pattern} has none")
    return found


def _is_new(path: Path, seen: set[str]) -> bool:
    real = os.path.realpath(path)
    is_new = real not in seen
    seen.add(real)
    return is_new


def _known_kind(path: str, key: str) -> str:
    kind = kind_of(path)
    if kind is None:
        raise UsageError(f"{key} must be {KNOWN_FORMATS}; got {path}")
    return kind


def _regular(path: Path, key: str) -> Path:
    """The path, refused where reading it might wait for ever, or where messages and reports could not name it."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{key} must name files whose names are UTF-8; got {os.fsencode(path)!r}") from error
    mode = path.stat().st_mode if path.exists() else stat.S_IFREG  # one that is missing is told where it is read
    if not stat.S_ISREG(mode):
        kinds = ((stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
        what = next((name for is_one, name in kinds if is_one(mode)), "a device")
        raise UsageError(f"{key} must name regular files; {path} is {what}")
    return path


def kind_of(path: str | Path) -> str | None:
    """The format that a file's name tells, upper or lower case; None for an unknown one."""
    name = file_name(str(path)).lower()
    plain = without_compression(name)
    kind = SUFFIXES.get(Path(plain).suffix)
    return None if kind == "parquet" and plain != name else kind


def file_name(path: str) -> str:
    """The last part of a path or URL, less a web address's query."""
    return Path(urlsplit(path).path if path.startswith(("http://", "https://")) else path).name


def without_compression(name: str) -> str:
    """A file's name less .gz, .bz2, .xz or .zst."""
    ending = Path(name).suffix
    return name.removesuffix(ending) if ending.lower() in COMPRESSIONS else name


def _in_folder(folder: Path, key: str, seen: set[str]) -> list[tuple[Path, str]]:
    """Every file at or below a folder, sorted. Where any is of another format, the .txt files are notes: left out."""
    return list(_without_notes(dict(_walk(folder, key, seen))).items())


def _walk(folder: Path, key: str, seen: set[str]) -> Iterator[tuple[Path, str]]:
    if not _is_new(folder, seen):
        return
    if (folder / _SPLITS).exists():
        splits = sorted(child.name for child in folder.iterdir() if child.is_dir())
        raise UsageError(f"{key} must name one split of the Arrow folder {folder}; it has {', '.join(splits)}")
    if all((folder / name).exists() for name in _ARROW_FILES):
        yield folder, "arrow"
        return
    for child in sorted(folder.iterdir()):
        if child.name.startswith("."):
            continue
        if child.is_dir():
            yield from _walk(child, key, seen)
        elif (kind := kind_of(child)) and _is_new(child, seen):
            yield _regular(child, key), kind


_Found = TypeVar("_Found")


def _without_notes(found: dict[_Found, str]) -> dict[_Found, str]:
    if any(kind != "text" for kind in found.values()):
        return {path: kind for path, kind in found.items() if kind != "text"}
    return found


def _size(path: Path) -> int:
    try:
        if path.is_dir():
            return sum(child.stat().st_size for child in path.iterdir() if child.is_file())
        with open(path, "rb"):
            return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
