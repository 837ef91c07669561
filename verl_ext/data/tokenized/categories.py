"""Number the categories of several folders by name, and list a run's.

folder         categories.json              number here
train          1 gsm8k    2 code            1, 2         the first folder keeps its numbers
papers         1 code     2 papers          2, 3         a known name gets its number; a new name whose number is
                                                         taken by another category gets the next free number
notes          1 gsm8k                      1            a 2 or 3 in its data is refused, because it is ambiguous

Packs hold these numbers. The loss counts categories by their place in a CategoryTable, which is complete only when the
tokens are read: it also has the numbers of the data that no folder names.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_ext.files import CATEGORIES
from verl_ext.options import first_line, must
from verl_ext.text.read.json_records import parse_json, repeated_name

SMALL, LEAST = 1 << 16, 1 << 10  # the most and, for numbers without a name, the least numbers in a table
_HIGHEST = (1 << 62) - 1


class NumberMap:
    """A map of category numbers.

    refused: the numbers that are refused, by the line of `problem(n)`; others stay as they are. None: all that the map
    lacks.
    """

    def __init__(
        self, numbers: Mapping[int, int], problem: Callable[[int], str], refused: Collection[int] | None = None
    ) -> None:
        self._problem, self._refused = problem, refused
        self._keys, self._values = np.array(sorted({0: 0, **numbers}.items()), np.int64).T
        # Small numbers are looked up in a table, which is many times faster than searching.
        small = [number for number in (*self._keys.tolist(), *(refused or ())) if number < SMALL]
        self._table = np.full(max(small) + 1, -1) if refused is None else np.arange(max(max(small) + 1, LEAST))
        self._table[small] = -1
        self._table[self._keys[self._keys < SMALL]] = self._values[self._keys < SMALL]

    def __call__(self, numbers: ArrayLike) -> NDArray[np.int64]:
        """Map numbers of any shape. Raises ValueError if one is refused."""
        wanted = np.asarray(numbers, np.int64)
        if wanted.size and wanted.min() >= 0 and wanted.max() < len(self._table):
            found = self._table[wanted]
            if found.min() >= 0:
                return found
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        lacking = self._keys[at] != wanted
        for number in np.unique(wanted[lacking]).tolist():
            if self._refused is None or number in self._refused:
                raise ValueError(self._problem(number))
        return np.where(lacking, wanted, self._values[at])


@dataclass(frozen=True)
class FolderCategories:
    """The categories of several folders together.

    names: number -> name; maps: that of each folder's numbers, None if they stay as they are. A number without a name
    is one category in all folders.
    """

    names: dict[int, str]
    maps: tuple[NumberMap | None, ...]

    @classmethod
    def read(cls, folders: Iterable[str]) -> "FolderCategories":
        """Read the folders' categories.json, if they have one.

        Raises ValueError if a file is not {"1": "name", …}, or gives two numbers the same name.
        """
        paths = [Path(folder) / CATEGORIES for folder in folders]
        files = [_read_file(path) for path in paths]
        # A name has one number in all folders: the first that it has, or a free one if that is taken.
        free = max((number for file in files for number in file), default=0) + 1
        names: dict[int, str] = {}
        numbers: dict[str, int] = {}
        for number, name in (pair for file in files for pair in file.items()):
            if name not in numbers:
                numbers[name] = free if number in names else number
                free += number in names
                names[numbers[name]] = name
        # In a folder's data, a number that only other folders use could be of two categories.
        used = {**names, **{number: name for file in reversed(files) for number, name in file.items()}}
        maps = []
        for path, file in zip(paths, files, strict=True):
            own, ambiguous = {number: numbers[name] for number, name in file.items()}, used.keys() - file.keys()
            stays = not ambiguous and all(number == other for number, other in own.items())
            maps.append(None if stays else NumberMap(own, partial(_ambiguous, path, used), ambiguous))
        return cls(names, tuple(maps))


def _ambiguous(path: Path, names: Mapping[int, str], number: int) -> str:
    return f"{path} must name category {number}, which is {names[number]!r} in another folder"


def _read_file(path: Path) -> dict[int, str]:
    if not path.exists():
        return {}
    try:
        names = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be JSON; {first_line(error)}") from error
    return read_names(names, str(path))


def read_names(names: Any, source: str) -> dict[int, str]:
    """Return {number: name} of a mapping, whose keys may be texts.

    Raises ValueError, which names the `source`, if it is not a mapping, or gives two numbers the same name.
    """
    if not isinstance(names, Mapping):
        raise ValueError(must(source, 'be an object like {"1": "gsm8k"}', str(names)[:60]))
    numbered: dict[int, str] = {}
    for key, name in names.items():
        text = str(key)
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(_HIGHEST)) else 0
        if not 0 < number <= _HIGHEST:
            raise ValueError(must(source, f"have category numbers of 1 to {_HIGHEST} as its keys", repr(text[:80])))
        if number in numbered:
            raise ValueError(must(source, "name each category once", f"{text!r} twice"))
        if not isinstance(name, str) or not name.strip():
            raise ValueError(must(source, f"give category {text} a name", repr(name)))
        numbered[number] = name
    return _distinct(numbered, source)


def _distinct(names: dict[int, str], source: str) -> dict[int, str]:
    """Return the names; raise ValueError if two numbers have the same name."""
    if (name := repeated_name(names.values())) is not None:
        got = " and ".join(str(number) for number, other in names.items() if other == name)
        raise ValueError(must(source, "give every category its own name", f"{name!r} for {got}"))
    return names


@dataclass(frozen=True)
class CategoryTable:
    """The fixed list of categories that every rank uses.

    ids: ascending, without 0, which means no category; names: one for each id. Dense index c belongs to ids[c-1].
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, names: Mapping[int, str], numbers: Iterable[int] = (), source: str = CATEGORIES) -> "CategoryTable":
        """Return the table of named categories and of `numbers`, which name themselves.

        Raises ValueError, which names the `source`, if two numbers have the same name.
        """
        table = {number: names.get(number, str(number)) for number in sorted({*names, *numbers})}
        return cls(tuple(table), tuple(_distinct(table, source).values()))

    @cached_property
    def index(self) -> NumberMap:
        """The map of ids to dense indices 1..C, of 0 to 0; it refuses others."""
        return NumberMap({number: index for index, number in enumerate(self.ids, start=1)}, self._problem)

    def _problem(self, number: int) -> str:
        return must("category ids", f"be of the table {self.ids}", number)
