"""Which files a category's paths, folders and globs stand for."""

import glob
import os
from dataclasses import dataclass
from pathlib import Path

from verl_ext.commands.errors import DataError, UsageError

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}
KNOWN_FORMATS = (
    "jsonl, jsonl.gz, json, parquet, csv, txt, an Arrow folder written by save_to_disk, or a folder of these"
)


@dataclass(frozen=True)
class SourceFile:
    """One file (or Arrow folder) of one category; `category_id` counts from 1 in the order of `sources`."""

    category_id: int
    path: str
    kind: str  # jsonl | json | parquet | csv | text | arrow
    num_bytes: int


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
    kind = _kind(path)
    if kind is None:
        raise UsageError(f"{key} must be {KNOWN_FORMATS}; got {path}")
    return path, kind


def _kind(path: Path) -> str | None:
    suffixes = path.suffixes[-2:]
    if suffixes[-1:] == [".gz"]:
        return "jsonl" if suffixes[0] in (".jsonl", ".ndjson") else None
    return SUFFIXES.get(path.suffix)


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
        elif kind := _kind(child):
            found.append((child, kind))
    if any(kind != "text" for _, kind in found):
        found = [(path, kind) for path, kind in found if kind != "text"]
    if not found:
        raise UsageError(f"{key} must be {KNOWN_FORMATS}; the folder {folder} has none")
    return found


def _has_known_files(folder: Path) -> bool:
    return any(_kind(child) for child in folder.rglob("*") if child.is_file())


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
