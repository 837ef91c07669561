"""Find source files of paths, folders, globs and URLs; decompress them.

    train.jsonl.gz   folder/   parts/*.parquet   file:///a.csv                 of this machine
    https://host/a.jsonl.gz   s3://bucket/folder/   gs://bucket/*.parquet      any URL that fsspec has a file system for
    hf://datasets/owner/name/data/a.parquet                                    a file of a Hub repository, likewise
    [hf://datasets/]owner/name[@revision][:config][:split][[:1000]]            a Hub dataset, as `datasets` loads it

No file is downloaded as a whole. Credentials and hosts are configured in fsspec. fsspec and `datasets` are imported
only when they are used, so that a command that reads local files starts without them.
"""

import codecs
import contextlib
import glob
import io
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn
from urllib.parse import urlsplit

from verl_ext.files import CATEGORIES, REPORT, file_state
from verl_ext.options import DataError, UsageError, first_line, must
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.compression import COMPRESSIONS
from verl_ext.text.read.hub import HUB, host_errors, hub_split, hub_version

# The kind of a file by its suffix; `readers.READERS` has the reader of each kind.
SUFFIXES = {
    ".jsonl": "jsonl",
    ".jsonlines": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
}
_ARROW_FILES = ("state.json", "dataset_info.json")  # the files of a folder written by save_to_disk
_SPLITS = "dataset_dict.json"  # the file of a folder that has one folder for each split
# Files that accompany data: nobody expects them to be read.
_NOTES = (
    "readme",
    "license",
    "licence",
    "copying",
    "notice",
    "authors",
    "citation",
    "changelog",
    "makefile",
    "dockerfile",
)
_NOTE_SUFFIXES = (".md", ".rst", ".py", ".sh", ".ipynb", ".cff", ".bib", ".md5", ".sha1", ".sha256", ".crc", ".lock")
_URL = re.compile(r"[A-Za-z][\w+.-]*://")
_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, MemoryError)
_Sizes = dict[str, int | None]  # bytes of files by path or URL; None if unknown


@dataclass(frozen=True)
class SourceFile:
    """A file, Arrow folder or Hub dataset of category `category_id`, from 1."""

    category_id: int
    path: str  # or URL
    kind: str  # one of SUFFIXES, arrow or hub
    num_bytes: int | None  # None: not known before it is read
    left_out: tuple[str, ...] = ()  # on the first file of a folder: those below it that are not read


def total_bytes(files: Iterable[SourceFile]) -> int | None:
    """Return all files' bytes; None if the size of one is unknown."""
    sizes = [file.num_bytes for file in files]
    return None if None in sizes else sum(size or 0 for size in sizes)


def files_left_out(files: Iterable[SourceFile]) -> Counter[str]:
    """Count the files of the sources' folders that are not read, by their suffix."""
    return Counter(Path(path).suffix or file_name(path) for file in files for path in file.left_out)


def is_url(path: str) -> bool:
    """Return whether a path is a URL of another machine, not `file://`."""
    return bool(_URL.match(path)) and not path.startswith("file://")


def is_hub_name(path: str) -> bool:
    """Return whether a source is a Hub dataset.

    Without hf://, a file of this machine comes first.
    """
    match = HUB.fullmatch(path)
    if match is None or match["prefix"]:
        return match is not None
    return kind_of(match["name"]) is None and not os.path.exists(path) and not glob.glob(path)


def local_path(path: str) -> str:
    """Return a path without `file://`."""
    return path.removeprefix("file://")


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return a local path made absolute, `~` expanded, or a URL unchanged."""
    plain = local_path(os.fspath(path))
    return plain if is_url(plain) else os.path.abspath(os.path.expanduser(plain))


def is_there(path: str) -> bool:
    """Return whether a path or glob leads to something on this machine; of a URL only reading it tells."""
    path = os.path.expanduser(local_path(path))
    return is_url(path) or os.path.exists(path) or bool(glob.glob(path, recursive=True))


def file_name(path: str) -> str:
    """Return the last part of a path or URL, without a query."""
    return Path(urlsplit(path).path if path.startswith(("http://", "https://")) else path).name


def without_compression(name: str) -> str:
    """Return a file's name without its compression suffix."""
    ending = Path(name).suffix
    return name.removesuffix(ending) if ending.lower() in COMPRESSIONS else name


def kind_of(path: str | Path) -> str | None:
    """Return a file's kind by its suffix in any case, or None."""
    name = file_name(str(path)).lower()
    plain = without_compression(name)
    kind = SUFFIXES.get(Path(plain).suffix)
    return None if kind == "parquet" and plain != name else kind


def find_source_files(patterns: dict[str, list[str]], key: str | None = None) -> list[SourceFile]:
    """Return every category's files, in the order of categories and patterns.

    The files of one pattern are sorted by name. Of a folder, files of other formats are left out, which its first file
    lists, and notes such as README.md are passed over. Raises `UsageError`, which names `key` (by default
    `sources.<category>`), if a path is missing or of no known format, or if a folder has a file whose name hides its
    format, and `DataError` if a file cannot be read.
    """
    return [
        SourceFile(category_id, *found)
        for category_id, (name, category_patterns) in enumerate(patterns.items(), start=1)
        for pattern in category_patterns
        for found in _found(pattern, key or f"sources.{name}")
    ]


def _found(pattern: str, key: str) -> Iterator[tuple[Any, ...]]:
    """Yield (path, kind, bytes) of each file of a pattern, and with the first of a folder what is left out."""
    if is_hub_name(pattern):
        yield hub_split(pattern, key)
        return
    is_empty = True
    for sizes, is_folder in _remote_files(pattern, key) if is_url(pattern) else _local_files(pattern, key):
        kinds, left_out = _kinds_below(sizes, key) if is_folder else ({path: kind_of(path) for path in sizes}, [])
        for path, kind in kinds.items():
            if kind is None:
                raise UsageError(must(key, f"be {KNOWN_FORMATS}", path))
            own = [sizes[path]] if kind != "arrow" else [sizes[name] for name in sizes if os.path.dirname(name) == path]
            if kind != "arrow" and not is_url(path):
                _check_regular(path, key)
            yield path, kind, None if None in own else sum(size or 0 for size in own), tuple(left_out)
            is_empty, left_out = False, []
    if is_empty:
        raise UsageError(f"{key} must be {KNOWN_FORMATS}; {pattern} has none")


def _local_files(pattern: str, key: str) -> Iterator[tuple[_Sizes, bool]]:
    """Yield the files of a path, glob or folder, once despite links.

    An existing path is taken literally, even if its name has glob characters.
    """
    pattern = os.path.expanduser(local_path(pattern))
    paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not paths:
        problem = "matches no file" if glob.has_magic(pattern) else "does not exist"
        raise UsageError(f"{key} must name files that exist; {pattern} {problem}")
    seen: set[str] = set()

    def is_new(*path: str) -> bool:
        before = len(seen)
        seen.add(os.path.realpath(os.path.join(*path)))
        return len(seen) > before

    for path in map(str, map(Path, filter(is_new, paths))):
        if not os.path.isdir(path):
            yield {path: _size(path)}, False
            continue
        files = []
        for folder, below, names in os.walk(path, onerror=_refuse, followlinks=True):
            below[:] = [name for name in sorted(below) if not name.startswith(".") and is_new(folder, name)]
            names = [name for name in sorted(names) if not name.startswith(".") and is_new(folder, name)]
            files += [os.path.join(folder, name) for name in names]
        yield {file: _size(file) for file in sorted(files, key=lambda file: file.split("/"))}, True


def _size(path: str) -> int | None:
    with contextlib.suppress(OSError):  # reported when the file is read
        return os.path.getsize(path)
    return None


def _refuse(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _kinds_below(files: _Sizes, key: str) -> tuple[dict[str, str | None], list[str]]:
    """Return the kinds of a folder's files, and those that are left out; Arrow folders replace their files.

    Text files next to files of another format are left out. Raises `UsageError` for a name that hides a file's format,
    such as data.jsonl.zip or part-00001: half of the data might be missing.
    """
    kinds: dict[str, str | None] = {}
    left_out = []
    for path in files:
        folder, name = os.path.split(path)
        if name == _SPLITS:
            below = (file.removeprefix(f"{folder}/").split("/") for file in files if file.startswith(f"{folder}/"))
            splits = sorted({parts[0] for parts in below if len(parts) > 1})
            raise UsageError(f"{key} must name one split of the Arrow folder {folder}; it has {', '.join(splits)}")
        kind = kind_of(path)
        if all(f"{folder}/{name}" in files for name in _ARROW_FILES):
            kinds[folder] = "arrow"
            if not name.endswith(".arrow") and name not in (*_ARROW_FILES, REPORT, CATEGORIES):
                left_out += [] if _is_note(name) else [path]
        elif kind:
            kinds[path] = kind
        elif not _is_note(name):
            plain = without_compression(name.lower())
            ending = Path(plain).suffix
            if kind_of(plain) or kind_of(plain.removesuffix(ending)) or ending[1:].isdigit() or not ending:
                needed = "have files alone whose names end in the suffix of their format"
                way_out = f"a glob such as {folder}/*.jsonl names those to read"
                raise UsageError(must(key, f"{needed}, or {way_out}", path))
            left_out.append(path)
    read = {path: kind for path, kind in kinds.items() if kind != "text"} or kinds
    notes = [path for path in kinds if path not in read]
    return read, sorted([*left_out, *(path for path in notes if not _is_note(os.path.basename(path)))])


def _is_note(name: str) -> bool:
    """Return whether a file accompanies data by its name, as README.txt, LICENSE, _SUCCESS and code do."""
    path = Path(name.lower())
    return path.stem in _NOTES or path.suffix in _NOTE_SUFFIXES or (name.startswith("_") and not path.suffix)


def _check_regular(path: str, key: str) -> None:
    """Refuse files that block their reader, or whose names are not UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise UsageError(must(key, "name files whose names are UTF-8", os.fsencode(path))) from error
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"{key} must name regular files; {path} is a FIFO, a socket or a device")


def _remote_files(url: str, key: str) -> list[tuple[_Sizes, bool]]:
    """Return the files of a URL, folder or glob; `?` begins queries."""
    system, path = _file_system(url, key)
    found: dict[str, Any] = {}
    with host_errors(url):
        try:
            if "*" in path or "[" in path:
                matches = system.glob(path, detail=True)
                found = {name: info for name, info in matches.items() if info["type"] == "file"}
            elif system.info(path)["type"] == "directory" or path.endswith("/"):
                found = system.find(path, detail=True)
            else:
                return [({url: system.info(path).get("size")}, False)]
            sizes = {name: info.get("size") or system.info(name).get("size") for name, info in found.items()}
        except FileNotFoundError:
            sizes = {}
    if not sizes:
        raise UsageError(f"{key} must name files that exist; {url} has none")
    names = sorted((name for name in sizes if "/." not in name), key=lambda name: name.split("/"))
    return [({system.unstrip_protocol(name): sizes[name] for name in names}, True)]


def open_remote(url: str) -> BinaryIO:
    """Open a remote file, in ranges if supported; its errors are raised."""
    system, path = _file_system(url, "sources")
    return system.open(path, "rb")


def remote_facts(url: str) -> Any:
    """Return a remote source's size, version and modification time."""
    with host_errors(url):
        if match := HUB.fullmatch(url):
            return [url, hub_version(match)]
        system, path = _file_system(url, "sources")
        return [url, *(f"{name}={value}" for name, value in sorted(system.info(path).items()))]


def _file_system(url: str, key: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    if "::" in url:
        raise UsageError(must(key, "be URLs without '::'", url))
    with host_errors(url):
        try:
            return url_to_fs(url)
        except ImportError as error:
            extra = "pip install 'verl-ext[remote]' brings those of s3:// and gs://"
            raise UsageError(f"{key} needs a package for {url}: {first_line(error)}; {extra}") from error
        except ValueError as error:
            raise UsageError(must(key, "be a URL that fsspec knows", f"{url}: {first_line(error)}")) from error


class OpenedFile:
    """A file's decompressed bytes (`stream`), and the file's own position."""

    def __init__(self, path: str, raw: Any) -> None:
        """Start reading `raw`, a file opened in binary mode."""
        ending = Path(file_name(path)).suffix.lower()
        self.path, self._raw = path, raw
        self.size: int | None = getattr(raw, "size", None) if is_url(path) else os.fstat(raw.fileno()).st_size
        if ending in COMPRESSIONS and self.size == 0:
            raise EOFError(f"it is empty, which no {ending} file is")
        plain = io.BufferedReader(raw, 1 << 20) if is_url(path) else raw
        self.stream: Any = COMPRESSIONS[ending](plain) if ending in COMPRESSIONS else plain

    @property
    def position(self) -> int:
        """The number of bytes read from the file itself, before decompression."""
        return (self.size or 0) if self._raw.closed else self._raw.tell()

    def check_end(self) -> None:
        """Raise `DataError` if bytes are missing, as hosts silently cut files."""
        if self.size is not None and self.position != self.size:
            raise DataError(f"{self.path}: must not change while it is read; {self.position} of {self.size} bytes came")


def encoding_problem(start: bytes) -> str | None:
    """Return why a file's first four bytes are not UTF-8, or None."""
    if start in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        return "it is UTF-32"
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "it is UTF-16"
    return "its first bytes have a NUL, as those of UTF-16 and UTF-32" if b"\0" in start else None


@contextlib.contextmanager
def open_source(path: str) -> Iterator[OpenedFile]:
    """Open a file or URL for the body to read.

    Raises `DataError` if reading fails: no permission, a truncated or corrupt file, a local file that changes
    meanwhile, a host that does not answer.
    """
    try:
        with open_remote(path) if is_url(path) else open(path, "rb") as raw:
            before = None if is_url(path) else file_state(path)
            yield OpenedFile(path, raw)
            if before is not None and file_state(path) != before:
                raise DataError(f"{path}: must not change while it is read; it did")
    except (DataError, UsageError, BadRecord):
        raise
    except Exception as error:
        if "Frame requires too much memory" in str(error):
            needed = "it was packed with a window above 128 MiB: unpack it with zstd -d --long=31"
            raise DataError(f"{path}: cannot be read: {needed}") from error
        if not is_url(path) and not isinstance(error, _READ_ERRORS):  # a remote file system raises errors of its own
            raise
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{path}: cannot be read: {reason}") from error


FORMATS = f"{', '.join(SUFFIXES)} (all but .parquet also as {', '.join(COMPRESSIONS)}), Arrow folders of save_to_disk"
KNOWN_FORMATS = f"{FORMATS}, a folder of these, a URL of these, or a Hub dataset (owner/name)"
