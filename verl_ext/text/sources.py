"""Which files a category's paths, folders, globs and URLs stand for, and their bytes, decompressed.

    train.jsonl.gz   folder/   parts/*.parquet   file:///a.csv                 of this machine
    https://host/a.jsonl.gz   s3://bucket/folder/   gs://bucket/*.parquet      any URL that fsspec has a file system for
    hf://datasets/owner/name/data/a.parquet                                    a file of a Hub repository, likewise
    hf://datasets/owner/name[@revision][:config][:split]                       a Hub dataset, as `datasets` loads it

Nothing is downloaded as a whole. Credentials and hosts are configured in fsspec. fsspec and `datasets` are imported
where they are used: a command that reads local files starts without them.
"""

import bz2
import codecs
import glob
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from verl_ext.text.json_records import BadRecord
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
HUB_HINT = "hf://datasets/owner/name[:config][:split]"
_ARROW_FILES = ("state.json", "dataset_info.json")  # of a folder written by save_to_disk
_SPLITS = "dataset_dict.json"  # of one with a folder for each split
_URL = re.compile(r"[A-Za-z][\w+.-]*://")
_HUB = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[^@:/]+))?(:(?P<config>[^:/]+))??(:(?P<split>[^:/]+))?"
)
_BLOCK = 1 << 16  # bytes of a compressed file read at once
_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, MemoryError)


@dataclass(frozen=True)
class Part:
    """Of a file: JSONL lines or Arrow record batches that begin in bytes start..stop (of an Arrow folder those of its
    shards, one after the other), or row groups start..stop of a Parquet file.

    records, places: records, and lines or rows, of the file before it.
    """

    start: int
    stop: int
    records: int = 0
    places: int = 0


@dataclass(frozen=True)
class SourceFile:
    """One file, Arrow folder or Hub dataset of one category; `category_id` counts from 1 in the order of `sources`."""

    category_id: int
    path: str  # or URL
    kind: str  # jsonl | json | parquet | csv | tsv | text | arrow | hub
    num_bytes: int | None  # of the file, or of the part that is meant; None: not known before it is read
    part: Part | None = None  # None: all of it


def total_bytes(files: Iterable[SourceFile]) -> int | None:
    """The files' bytes together; None where those of one are not known."""
    sizes = [file.num_bytes for file in files]
    return None if None in sizes else sum(size or 0 for size in sizes)


def is_url(path: str) -> bool:
    """Whether a path is a URL, and not a local file's, whose `file://` `local_path` removes."""
    return bool(_URL.match(path)) and not path.startswith("file://")


def local_path(path: str) -> str:
    """A path without `file://`."""
    return path.removeprefix("file://")


def absolute_path(path: str | os.PathLike[str]) -> str:
    """A local path from the root, without `~`; a URL as it stands."""
    plain = local_path(os.fspath(path))
    return plain if is_url(plain) else os.path.abspath(os.path.expanduser(plain))


def file_name(path: str) -> str:
    """The last part of a path or URL, without a web address's query."""
    return Path(urlsplit(path).path if path.startswith(("http://", "https://")) else path).name


def without_compression(name: str) -> str:
    """A file's name without .gz, .bz2, .xz or .zst."""
    ending = Path(name).suffix
    return name.removesuffix(ending) if ending.lower() in COMPRESSIONS else name


def kind_of(path: str | Path) -> str | None:
    """The format by a file's extension, in upper or lower case; None for an unknown one."""
    name = file_name(str(path)).lower()
    plain = without_compression(name)
    kind = SUFFIXES.get(Path(plain).suffix)
    return None if kind == "parquet" and plain != name else kind


def find_source_files(patterns: dict[str, list[str]], key: str | None = None) -> list[SourceFile]:
    """Every file of every category, categories and patterns in the order given, files of a pattern sorted by name.

    Raises `UsageError` for a path that is missing or of no known format, naming `key`, by default
    `sources.<category>`; `DataError` for a file that cannot be read.
    """
    return [
        SourceFile(category_id, *found)
        for category_id, (name, category_patterns) in enumerate(patterns.items(), start=1)
        for pattern in category_patterns
        for found in _found(pattern, key or f"sources.{name}")
    ]


def _found(pattern: str, key: str) -> list[tuple[str, str, int | None]]:
    """(path, kind, bytes) of each file of a pattern."""
    if _HUB.fullmatch(pattern):
        return [_hub_split(pattern, key)]
    if is_url(pattern):
        return _found_remote(pattern, key)
    return [(path, kind, _size(path)) for path, kind in _found_local(local_path(pattern), key).items()]


def _found_local(pattern: str, key: str) -> dict[str, str]:
    """The files of a path, folder or glob, and their kinds. One that links lead to several times is read once."""
    pattern = os.path.expanduser(pattern)
    # A path that exists is meant literally, also where its name has glob characters.
    paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not paths:
        what = "matches no file" if glob.has_magic(pattern) else "does not exist"
        raise UsageError(f"{key} must name files that exist; {pattern} {what}")
    found: dict[str, str] = {}
    seen: set[str] = set()
    for path in map(Path, paths):
        if path.is_dir():
            found |= _kinds_below(_files_below(path, seen), key)
        elif _is_new(path, seen):
            found[str(path)] = _known_kind(str(path), key)
    if not found:
        raise UsageError(f"{key} must be {KNOWN_FORMATS}; the folder {pattern} has none")
    for name, kind in found.items():
        if kind != "arrow":
            _check_regular(Path(name), key)
    return found


def _files_below(folder: Path, seen: set[str]) -> Iterator[str]:
    if _is_new(folder, seen):
        for child in sorted(child for child in folder.iterdir() if not child.name.startswith(".")):
            if child.is_dir():
                yield from _files_below(child, seen)
            elif _is_new(child, seen):
                yield str(child)


def _is_new(path: Path, seen: set[str]) -> bool:
    before = len(seen)
    seen.add(os.path.realpath(path))
    return len(seen) > before


def _kinds_below(paths: Iterable[str], key: str) -> dict[str, str]:
    """Of all files below a folder those of a known kind, and Arrow folders in place of their files; .txt files are
    notes, and left out, where any is of another format."""
    files = dict.fromkeys(paths)
    kinds: dict[str, str] = {}
    for path in files:
        folder, name = os.path.split(path)
        if name == _SPLITS:
            below = (file.removeprefix(f"{folder}/").split("/") for file in files if file.startswith(f"{folder}/"))
            splits = sorted({parts[0] for parts in below if len(parts) > 1})
            raise UsageError(f"{key} must name one split of the Arrow folder {folder}; it has {', '.join(splits)}")
        if all(f"{folder}/{name}" in files for name in _ARROW_FILES):
            kinds[folder] = "arrow"
        elif kind := kind_of(path):
            kinds[path] = kind
    return {path: kind for path, kind in kinds.items() if kind != "text"} or kinds


def _known_kind(path: str, key: str) -> str:
    if kind := kind_of(path):
        return kind
    raise UsageError(f"{key} must be {KNOWN_FORMATS}; got {path}")


def _check_regular(path: Path, key: str) -> None:
    """Refuse a file that is not regular, which may block its reader, or whose name is not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{key} must name files whose names are UTF-8; got {os.fsencode(path)!r}") from error
    if path.exists() and not path.is_file():  # a missing one is reported when it is read
        what = "a FIFO" if path.is_fifo() else "a socket" if path.is_socket() else "a device"
        raise UsageError(f"{key} must name regular files; {path} is {what}")


def _size(path: str) -> int:
    try:
        if os.path.isdir(path):
            return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _found_remote(url: str, key: str) -> list[tuple[str, str, int | None]]:
    sizes = _remote_files(url, key)
    if list(sizes) == [url]:
        return [(url, _known_kind(url, key), sizes[url])]
    kinds = _kinds_below((path for path in sizes if "/." not in path), key)
    if not kinds:
        raise UsageError(f"{key} must be {KNOWN_FORMATS}; {url} has none")
    in_folder: dict[str, list[int | None]] = {}
    for path, size in sizes.items():
        in_folder.setdefault(os.path.dirname(path), []).append(size)
    totals = {folder: None if None in own else sum(size or 0 for size in own) for folder, own in in_folder.items()}
    return [(path, kind, totals[path] if kind == "arrow" else sizes[path]) for path, kind in kinds.items()]


def _remote_files(url: str, key: str) -> dict[str, int | None]:
    """The bytes, where they are known, of a file, of what a glob matches, or of everything below a folder, sorted.

    Only `*` and `[…]` are a glob's, since `?` begins a web address's query.
    """
    system, path = _file_system(url, key)
    found: dict[str, Any] = {}
    with _host_errors(url):
        try:
            if "*" in path or "[" in path:
                matches = system.glob(path, detail=True)
                found = {name: info for name, info in matches.items() if info["type"] == "file"}
            elif system.info(path)["type"] == "directory" or path.endswith("/"):
                found = system.find(path, detail=True)
            else:
                return {url: system.info(path).get("size")}
            sizes = {name: info.get("size") or system.info(name).get("size") for name, info in found.items()}
        except FileNotFoundError:
            sizes = {}
    if not sizes:
        raise UsageError(f"{key} must name files that exist; {url} has none")
    names = sorted(sizes, key=lambda name: name.split("/"))
    return {system.unstrip_protocol(name): sizes[name] for name in names}


def open_remote(url: str) -> BinaryIO:
    """A file behind a URL, read in ranges where the server has them. Raises whatever its file system does."""
    system, path = _file_system(url, "sources")
    return system.open(path, "rb")


def remote_facts(url: str) -> Any:
    """What changes with the content of a file or Hub dataset: size, version, time of change, as its host reports."""
    with _host_errors(url):
        if match := _HUB.fullmatch(url):
            from huggingface_hub import dataset_info

            return [url, dataset_info(match["name"], revision=match["revision"]).sha]
        system, path = _file_system(url, "sources")
        return [url, *(f"{name}={value}" for name, value in sorted(system.info(path).items()))]


def _file_system(url: str, key: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    if "::" in url:
        raise UsageError(f"{key} must be URLs without '::'; got {url}")
    with _host_errors(url):
        try:
            return url_to_fs(url)
        except ImportError as error:
            extra = "pip install 'verl-ext[remote]' brings those of s3:// and gs://"
            raise UsageError(f"{key} needs a package for {url}: {first_line(error)}; {extra}") from error
        except ValueError as error:
            raise UsageError(f"{key} must be a URL that fsspec knows; got {url}: {first_line(error)}") from error


@contextmanager
def _host_errors(url: str, what: str = "") -> Iterator[None]:
    """Turns what the body raises into `DataError`: every file system has its own errors of network and credentials."""
    try:
        yield
    except (DataError, UsageError):
        raise
    except Exception as error:
        raise DataError(f"{url}: cannot be read{what}: {first_line(error)}") from error


def _hub_split(url: str, key: str) -> tuple[str, str, int | None]:
    """A Hub dataset's URL with its split, by default `train`, and the bytes of its tables where they are known."""
    builder, splits, split = _hub_dataset(url)
    if split not in splits:
        raise UsageError(f"{key} must name a split, as in {HUB_HINT}; got {url}, which has {', '.join(splits)}")
    info = (builder.info.splits or {}).get(split)
    named = _HUB.fullmatch(url)
    assert named is not None
    return url if named["split"] else f"{url}:{split}", "hub", (info.num_bytes if info else None) or None


def hub_tables(url: str, rows: int) -> Iterator[Any]:
    """The tables of a Hub dataset that `find_source_files` found, of up to so many rows, as they are downloaded."""
    _, splits, split = _hub_dataset(url)
    with _host_errors(url):
        yield from splits[split].with_format("arrow").iter(batch_size=rows)


def _hub_dataset(url: str) -> tuple[Any, dict[str, Any], str]:
    """(builder, streams by split, the split asked for) of a Hub dataset."""
    import datasets

    match = _HUB.fullmatch(url)
    assert match is not None
    with _host_errors(url, f" as a Hub dataset, {HUB_HINT}"):
        name, config = f"hf://datasets/{match['name']}", match["config"]
        builder = datasets.load_dataset_builder(name, config, revision=match["revision"])
        return builder, dict(builder.as_streaming_dataset()), match["split"] or "train"


class OpenedFile:
    """A file's decompressed bytes (`stream`), and the position reached in the file itself."""

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

    def check_end(self, stop: int | None = None) -> None:
        """To be called at the stream's end, or where at least `stop` bytes must have been read: a host may answer with
        nothing where a file has become shorter."""
        is_short = self.size is not None and self.position != self.size if stop is None else self.position < stop
        if is_short:
            whole = self.size if stop is None else stop
            raise DataError(f"{self.path}: must not change while it is read; {self.position} of {whole} bytes came")


def encoding_problem(start: bytes) -> str | None:
    """What a file is, by its first four bytes, that is not in UTF-8; None of one that may be."""
    if start in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        return "it is UTF-32"
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "it is UTF-16"
    return "its first bytes have a NUL, as those of UTF-16 and UTF-32" if b"\0" in start else None


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


def _state(path: str) -> tuple[int, ...]:
    if is_url(path):
        return ()
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


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


def _zstd(raw: BinaryIO) -> BinaryIO:
    import pyarrow as pa  # heavy; and unlike zstandard's reader it refuses a truncated file

    stream: Any = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
    return io.BufferedReader(stream)


# Readers of whole files: several members or frames one after the other are read as one.
COMPRESSIONS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw, mode="rb"),
    ".bz2": lambda raw: io.BufferedReader(_Members(raw, bz2.BZ2Decompressor), _BLOCK),
    ".xz": lambda raw: io.BufferedReader(_Members(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)), _BLOCK),
    ".zst": _zstd,
}
