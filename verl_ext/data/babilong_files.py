"""BABILong's files, {input, question, target} records in a JSON list, found, read as a stream and checked.

data/qa1/1k.json     category qa1_1k        <task>_<size>, as the published set is laid out
data/qa1/32k.json    category qa1_32k
mine/stories.json    category stories       else the file's name
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FIELDS = ("input", "question", "target")


@dataclass(frozen=True)
class BABILongFile:
    """One JSON file and the category of its samples."""

    path: str
    category: str


class Record(NamedTuple):
    """One record; `number` counts from 0 in the list of the file at `path`."""

    path: str
    number: int
    input: str
    question: str
    target: str

    def __str__(self) -> str:
        return f"record {self.number} of {self.path}"


def find_files(given: Any, key: str) -> list[BABILongFile]:
    """The files of a path or of a list of paths, each a JSON file or a folder with *.json or */*.json in it.

    In the order given; those of a folder by name, numbers by their value. ValueError, which names `key`, where there
    are none.
    """
    paths = [given] if isinstance(given, (str, os.PathLike)) else list(given or [])
    if not paths or not all(isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in paths):
        raise ValueError(f"{key} must name a BABILong JSON file, or a folder of them; got {given!r}")
    return [
        BABILongFile(str(path), category_of(path))
        for path in (found for one in paths for found in _expand(Path(os.path.abspath(os.path.expanduser(one))), key))
    ]


def category_of(path: Path) -> str:
    """`<task>_<size>` of …/qa1/32k.json, else the file's name without its ending."""
    return f"{path.parent.name}_{path.stem}" if re.fullmatch(r"qa\d+", path.parent.name) else path.stem


def read_records(file: BABILongFile, key: str) -> Iterator[tuple[Record, int]]:
    """(record, about how many bytes of the file it stands for), in order; memory is that of a few records.

    Raises:
        ValueError: no JSON list, not UTF-8, no record; a record without a field, or with one that is no text.
    """
    # Here, because the tokenise command's modules import config and transformers' template tools.
    from verl_ext.commands.errors import DataError
    from verl_ext.tokenize.chunks import read_chunks
    from verl_ext.tokenize.source_files import SourceFile

    index = 0
    try:
        for chunk in read_chunks(SourceFile(0, file.path, "json", os.path.getsize(file.path))):
            for _, raw in chunk.records:
                if isinstance(raw, bytes):  # what read_chunks makes of lines that begin with an object
                    raise ValueError(f"{key} must hold JSON lists of records; {file.path} is no list")
                yield _checked(raw, file.path, index, key), chunk.num_bytes // len(chunk.records)
                index += 1
    except DataError as error:
        raise ValueError(f"{key} must hold JSON lists of records; {error}") from error
    if index == 0:
        raise ValueError(f"{key} must hold at least one record in every file; {file.path} has none")


def _expand(path: Path, key: str) -> Sequence[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise ValueError(f"{key} must name a BABILong JSON file, or a folder of them; {path} does not exist")
    found = [
        file
        for pattern in ("*.json", "*/*.json")
        for file in path.glob(pattern)
        if file.is_file() and not file.name.startswith(".")
    ]
    if not found:
        raise ValueError(f"{key} must name a BABILong JSON file, or a folder of them; {path} has no *.json or */*.json")
    return sorted(found, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts 2k before 10k."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _kind(value: Any) -> str:
    """What a value that is no text is in JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else "a number"


def _checked(raw: Any, path: str, index: int, key: str) -> Record:
    where = f"record {index} of {path}"
    if isinstance(raw, Exception):  # a BadRecord
        raise ValueError(f"{key} must hold records of {', '.join(FIELDS)}; {where}: {raw}")
    if not isinstance(raw, dict):
        raise ValueError(f"{key} must hold records of {', '.join(FIELDS)}; {where} is no object")
    for name in FIELDS:
        if name not in raw:
            raise ValueError(f"{key} must hold records of {', '.join(FIELDS)}; {where} has no {name}")
        if not isinstance(raw[name], str):
            raise ValueError(f"{key} must hold records of text; {name} of {where} is {_kind(raw[name])}")
        try:
            raw[name].encode()
        except UnicodeEncodeError as error:
            problem = "has half of a surrogate pair"
            raise ValueError(f"{key} must hold records of text; {name} of {where} {problem}") from error
    return Record(path, index, *(raw[name] for name in FIELDS))
