"""Which files a pretraining path stands for; the category of a file's documents is its name.

corpus/web.jsonl          category web
corpus/books.parquet      category books
more/web.jsonl.gz         category web
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_ext.tokenize.source_files import SourceFile


def find_files(given: Any, key: str) -> tuple[list["SourceFile"], dict[int, str]]:
    """(files, category number -> name) of a path or a list of paths: files, folders, globs and URLs, in the order
    given; those of a folder or a glob by name. A file's category_id is its number.

    Raises:
        ValueError: no file, a file of no known format, one that cannot be read; `key` is named.
    """
    # Here, because the tokenise command's modules import config and transformers' template tools.
    from verl_ext.tokenize.remote_files import absolute_path
    from verl_ext.tokenize.source_files import find_source_files

    paths = [given] if isinstance(given, (str, os.PathLike)) else list(given or [])
    if not paths or not all(isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in paths):
        raise ValueError(f"{key} must name files of records with a text; got {given!r}")
    found = find_source_files({"text": [absolute_path(path) for path in paths]}, key)
    return _by_category(found)


def category_of(file: "SourceFile") -> str:
    """The file's name without its endings; an Arrow folder's name."""
    from verl_ext.tokenize.source_files import file_name, without_compression  # here for the reason above

    name = file_name(file.path)
    return name if file.kind in ("arrow", "hub") else Path(without_compression(name)).stem


def _by_category(files: Sequence["SourceFile"]) -> tuple[list["SourceFile"], dict[int, str]]:
    names = list(dict.fromkeys(map(category_of, files)))
    numbers = {name: number for number, name in enumerate(names, start=1)}
    numbered = [replace(file, category_id=numbers[category_of(file)]) for file in files]
    return numbered, {number: name for name, number in numbers.items()}
