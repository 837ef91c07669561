"""CategoryNumbers: one number for each category's name over several folders, which were each numbered on their own.

folder         categories.json              number here
train          1 gsm8k    2 code            1, 2         the first folder keeps its numbers
papers         1 code     2 papers          2, 3         a name that is known gets its number, a new one that
                                                         another category's number would clash with the next free
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FILE_NAME = "categories.json"


@dataclass(frozen=True)
class CategoryNumbers:
    """names: number -> name of all folders together; lookups: for each folder, its numbers' numbers here, int64 by the
    number there; None where they are the same. A category that no file names keeps its number."""

    names: dict[int, str]
    lookups: tuple[NDArray[np.int64] | None, ...]

    @classmethod
    def read(cls, folders: Iterable[str]) -> "CategoryNumbers":
        """From the folders' categories.json, where they have one.

        Raises:
            ValueError: a file that is not {"1": "name", …}, or that gives two numbers one name.
        """
        files = [_read_file(Path(folder) / FILE_NAME) for folder in folders]
        free = max((number for file in files for number in file), default=0) + 1
        names: dict[int, str] = {}
        known: dict[str, int] = {}
        lookups = []
        for file in files:
            numbers = {}
            for number, name in file.items():
                if name not in known:
                    known[name] = free if number in names else number
                    free += number in names
                    names[known[name]] = name
                numbers[number] = known[name]
            lookups.append(_lookup(numbers))
        return cls(names, tuple(lookups))


def _lookup(numbers: Mapping[int, int]) -> NDArray[np.int64] | None:
    if all(number == here for number, here in numbers.items()):
        return None
    lookup = np.arange(max(numbers) + 1)
    lookup[list(numbers)] = list(numbers.values())
    return lookup


def _read_file(path: Path) -> dict[int, str]:
    if not path.exists():
        return {}
    try:
        pairs = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=list)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be JSON; {str(error).splitlines()[0]}") from error
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError(f'{path} must be an object like {{"1": "gsm8k"}}; got {str(pairs)[:60]}')
    names: dict[int, str] = {}
    for text, name in pairs:
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            raise ValueError(f"{path} must have category numbers above 0 as its keys; got {text!r}")
        if int(text) in names:
            raise ValueError(f"{path} must name each category once; got {text!r} twice")
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{path} must give category {text} a name; got {name!r}")
        if name in names.values():
            known = next(number for number, other in names.items() if other == name)
            raise ValueError(f"{path} must give every category its own name; got {name!r} for {known} and {int(text)}")
        names[int(text)] = name
    return names
