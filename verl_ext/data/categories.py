"""Number the categories of one folder, of several folders, and of a whole run.

folder         categories.json              number here
train          1 gsm8k    2 code            1, 2         the first folder keeps its numbers
papers         1 code     2 papers          2, 3         a known name gets its number; a new name whose number is
                                                         taken by another category gets the next free number
notes          1 gsm8k                      1            a 2 or 3 in its data is refused, because it is ambiguous
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_ext.data.babilong_answers import CATEGORY as BABILONG
from verl_ext.files import CATEGORIES
from verl_ext.options import first_line

# The names of families' categories that have fields, by which tables of scores have rows and columns.
NAMES_WITH_FIELDS = (BABILONG,)
SMALL = 1 << 16  # smaller numbers are looked up in a table, which is many times faster than searching
_HIGHEST = (1 << 62) - 1
_MISSING = np.iinfo(np.int64).min


class _Lookup:
    """A map from integers to integers; numbers without an entry stay as they are, or become `missing`."""

    def __init__(self, mapping: Mapping[int, int], missing: int | None = None) -> None:
        self.missing = missing
        self.known, self.numbers = np.array(sorted(mapping.items()), np.int64).T
        small = self.known < SMALL
        size = int(max(self.known[small], default=0)) + 1
        self.table = np.arange(size) if missing is None else np.full(size, missing)
        self.table[self.known[small]] = self.numbers[small]

    def __call__(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        if values.size == 0:
            return values
        if values.min() >= 0 and values.max() < len(self.table):
            return self.table[values]
        at = np.minimum(np.searchsorted(self.known, values), len(self.known) - 1)
        return np.where(self.known[at] == values, self.numbers[at], values if self.missing is None else self.missing)


@dataclass(frozen=True)
class FolderNumbers:
    """A map from one folder's category numbers to those over all folders.

    here: the folder's numbers -> the numbers over all folders; ambiguous: number -> name of the categories that only
    other folders name, so that this folder's data must not hold them.
    """

    path: Path
    here: Mapping[int, int]
    ambiguous: Mapping[int, str]

    def __call__(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the numbers over all folders; unnamed numbers stay. Raises ValueError if a number is ambiguous."""
        wanted = values.astype(np.int64, copy=False)
        found = self._lookup(wanted)
        if self.ambiguous and (refused := found == _MISSING).any():
            number = int(wanted[refused].max())
            if number in self.ambiguous:
                name = self.ambiguous[number]
                raise ValueError(f"{self.path} must name category {number}, which is {name!r} in another folder")
        return found

    @cached_property
    def _lookup(self) -> _Lookup:
        return _Lookup({**self.here, **dict.fromkeys(self.ambiguous, _MISSING)})


@dataclass(frozen=True)
class CategoryNumbers:
    """The categories of several folders together; a number without a name is one category in all folders.

    names: number -> name; lookups: the map of each folder's numbers, None if they stay as they are.
    """

    names: dict[int, str]
    lookups: tuple[FolderNumbers | None, ...]

    @classmethod
    def read(cls, folders: Iterable[str]) -> "CategoryNumbers":
        """Read the folders' categories.json, if they have one.

        Raises:
            ValueError: if a file is not {"1": "name", …}, or gives two numbers the same name.
        """
        paths = [Path(folder) / CATEGORIES for folder in folders]
        files = [_read_file(path) for path in paths]
        free = max((number for file in files for number in file), default=0) + 1
        names: dict[int, str] = {}
        known: dict[str, int] = {}
        by_folder: list[dict[int, int]] = []
        for file in files:
            by_folder.append({})
            for number, name in file.items():
                if name not in known:
                    known[name] = free if number in names else number
                    free += number in names
                    names[known[name]] = name
                by_folder[-1][number] = known[name]
        named = {**names, **{number: name for file in reversed(files) for number, name in file.items()}}
        lookups = []
        for path, here in zip(paths, by_folder, strict=True):
            ambiguous = {number: name for number, name in named.items() if number not in here}
            is_plain = not ambiguous and all(number == other for number, other in here.items())
            lookups.append(None if is_plain else FolderNumbers(path, here, ambiguous))
        return cls(names, tuple(lookups))


def _read_file(path: Path) -> dict[int, str]:
    if not path.exists():
        return {}
    try:
        pairs = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=list)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON; {first_line(error)}") from error
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError(f'{path} must be an object like {{"1": "gsm8k"}}; got {str(pairs)[:60]}')
    return _names_of(path, pairs)


def read_names(given: Any) -> dict[int, str]:
    """Return the names of {number: name}, whose keys may be texts; {} for None. Raises ValueError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"it must be a mapping; got {given!r}")
    return _names_of("it", [(str(number), name) for number, name in given.items()])


def _names_of(source: object, pairs: Iterable[tuple[str, Any]]) -> dict[int, str]:
    names: dict[int, str] = {}
    for text, name in pairs:
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_HIGHEST))
        number = int(text) if is_number else 0
        if not 0 < number <= _HIGHEST:
            raise ValueError(f"{source} must have category numbers of 1 to {_HIGHEST} as its keys; got {text[:80]!r}")
        if number in names:
            raise ValueError(f"{source} must name each category once; got {text!r} twice")
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{source} must give category {text} a name; got {name!r}")
        names[number] = name
    _check_names(source, names)
    return names


def _check_names(file: object, names: Mapping[int, str]) -> None:
    """Raise ValueError if two numbers have the same name."""
    first: dict[str, int] = {}
    for number, name in names.items():
        if first.setdefault(name, number) != number:
            raise ValueError(
                f"{file} must give every category its own name; got {name!r} for {first[name]} and {number}"
            )


@dataclass(frozen=True)
class CategoryTable:
    """The fixed list of categories that every rank uses.

    ids: ascending, without 0, which means no category; names: one for each id. Dense index c belongs to ids[c-1].
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def index(self, category_ids: ArrayLike) -> NDArray[np.int64]:
        """Return the dense index 1..C of each category id, 0 for id 0. Raises ValueError for an unknown id."""
        wanted = np.asarray(category_ids, np.int64)
        dense = self._dense(wanted)
        if (unknown := dense < 0).any():
            raise ValueError(f"category ids must be of the table {self.ids}; got {wanted[unknown][0]}")
        return dense

    @cached_property
    def _dense(self) -> _Lookup:
        return _Lookup({number: index for index, number in enumerate((0, *self.ids))}, missing=-1)

    @classmethod
    def read(
        cls,
        folders: str | Sequence[str],
        category_ids: Iterable[int] = (),
        given: Mapping[int, str] | None = None,
    ) -> "CategoryTable":
        """Return the table of categories.json and `category_ids`; an id without a name is named by its number.

        given: names of these numbers, which win.

        Raises:
            ValueError: if a file is not {"1": "name", …}, or two ids have the same name.
        """
        names = CategoryNumbers.read([folders] if isinstance(folders, str) else folders).names
        numbers, names = sorted({*names, *category_ids}), {**names, **(given or {})}
        named = {number: names.get(number, str(number)) for number in numbers}
        _check_names(f"data.category_names and {CATEGORIES}" if given else CATEGORIES, named)
        return cls(tuple(named), tuple(named.values()))


def category_fields(name: str) -> dict[str, str]:
    """Return the fields in a category's name, such as task and length; or {}."""
    found = next(filter(None, (pattern.fullmatch(name) for pattern in NAMES_WITH_FIELDS)), None)
    return {} if found is None else found.groupdict()
