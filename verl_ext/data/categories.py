"""Number the categories of several folders together, by name, and list those of a run.

folder         categories.json              number here
train          1 gsm8k    2 code            1, 2         the first folder keeps its numbers
papers         1 code     2 papers          2, 3         a known name gets its number; a new name whose number is
                                                         taken by another category gets the next free number
notes          1 gsm8k                      1            a 2 or 3 in its data is refused, because it is ambiguous

Packs hold these numbers. The loss counts categories by their place in a CategoryTable, which is complete only when the
tokens are read: it also has the numbers of the data that no folder names.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_ext.files import CATEGORIES
from verl_ext.options import first_line
from verl_ext.text.read.json_records import parse_json

SMALL = 1 << 16  # smaller numbers are looked up in a table, which is many times faster than searching
_HIGHEST = (1 << 62) - 1
_REFUSED = np.iinfo(np.int64).min


class NumberMap:
    """A map of whole numbers; one that it lacks stays as it is, or becomes `missing`."""

    def __init__(self, numbers: Mapping[int, int], missing: int | None = None) -> None:
        self._missing = missing
        self._keys, self._values = np.array(sorted({0: 0, **numbers}.items()), np.int64).T
        small = self._keys[self._keys < SMALL]
        self._table = np.arange(small[-1] + 1) if missing is None else np.full(small[-1] + 1, missing)
        self._table[small] = self._values[: len(small)]

    def __call__(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map numbers of any shape."""
        if numbers.size and numbers.min() >= 0 and numbers.max() < len(self._table):
            return self._table[numbers]
        at = np.minimum(np.searchsorted(self._keys, numbers), len(self._keys) - 1)
        others = numbers if self._missing is None else self._missing
        return np.where(self._keys[at] == numbers, self._values[at], others)


class FolderMap(NumberMap):
    """A map of a folder's numbers to those over all folders.

    ambiguous: number -> name of the categories that only other folders name, so that this folder must not hold them.
    """

    def __init__(self, path: Path, numbers: Mapping[int, int], ambiguous: Mapping[int, str]) -> None:
        super().__init__({**numbers, **dict.fromkeys(ambiguous, _REFUSED)})
        self._path, self._ambiguous = path, ambiguous

    def __call__(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """Map numbers. Raises ValueError if one is ambiguous."""
        wanted = numbers.astype(np.int64, copy=False)
        found = super().__call__(wanted)
        if self._ambiguous and (refused := found == _REFUSED).any():
            number = int(wanted[refused].max())
            if name := self._ambiguous.get(number):  # else the data has this very number, which the scan refuses
                raise ValueError(f"{self._path} must name category {number}, which is {name!r} in another folder")
        return found


@dataclass(frozen=True)
class FolderCategories:
    """The categories of several folders together; a number without a name is one category in all folders.

    names: number -> name; maps: that of each folder's numbers, None if they stay as they are.
    """

    names: dict[int, str]
    maps: tuple[FolderMap | None, ...]

    @classmethod
    def read(cls, folders: Iterable[str]) -> "FolderCategories":
        """Read the folders' categories.json, if they have one.

        Raises:
            ValueError: if a file is not {"1": "name", …}, or gives two numbers the same name.
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
        # In a folder's data, a number that only others use could be of two categories.
        used = {**names, **{number: name for file in reversed(files) for number, name in file.items()}}
        maps = []
        for path, file in zip(paths, files, strict=True):
            ambiguous = {number: name for number, name in used.items() if number not in file}
            stays = not ambiguous and all(number == numbers[name] for number, name in file.items())
            own = {number: numbers[name] for number, name in file.items()}
            maps.append(None if stays else FolderMap(path, own, ambiguous))
        return cls(names, tuple(maps))


def _read_file(path: Path) -> dict[int, str]:
    if not path.exists():
        return {}
    try:
        names = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be JSON; {first_line(error)}") from error
    return read_names(names, path)


def read_names(names: Any, source: object) -> dict[int, str]:
    """Return {number: name} of a mapping with whole numbers or their texts as keys.

    Raises ValueError, which names the `source`, if it is none, or gives two numbers the same name.
    """
    if not isinstance(names, Mapping):
        raise ValueError(f'{source} must be an object like {{"1": "gsm8k"}}; got {str(names)[:60]}')
    numbered: dict[int, str] = {}
    for key, name in names.items():
        text = str(key)
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(_HIGHEST)) else 0
        if not 0 < number <= _HIGHEST:
            raise ValueError(f"{source} must have category numbers of 1 to {_HIGHEST} as its keys; got {text[:80]!r}")
        if number in numbered:
            raise ValueError(f"{source} must name each category once; got {text!r} twice")
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{source} must give category {text} a name; got {name!r}")
        numbered[number] = name
    return _distinct(numbered, source)


def _distinct(names: dict[int, str], source: object) -> dict[int, str]:
    """Return the names; raise ValueError if two numbers have the same name."""
    for name, count in Counter(names.values()).items():
        if count > 1:
            got = " and ".join(str(number) for number, other in names.items() if other == name)
            raise ValueError(f"{source} must give every category its own name; got {name!r} for {got}")
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
        """Return the table of named categories and of `numbers`; one without a name is named by its number.

        Raises ValueError if two numbers have the same name; it names their `source`.
        """
        table = {number: names.get(number, str(number)) for number in sorted({*names, *numbers})}
        return cls(tuple(table), tuple(_distinct(table, source).values()))

    def index(self, category_ids: ArrayLike) -> NDArray[np.int64]:
        """Return the dense index 1..C of each category id, 0 for id 0. Raises ValueError for an unknown id."""
        wanted = np.asarray(category_ids, np.int64)
        dense = self._dense(wanted)
        if (unknown := dense < 0).any():
            raise ValueError(f"category ids must be of the table {self.ids}; got {wanted[unknown][0]}")
        return dense

    @cached_property
    def _dense(self) -> NumberMap:
        return NumberMap({number: index for index, number in enumerate((0, *self.ids))}, missing=-1)
