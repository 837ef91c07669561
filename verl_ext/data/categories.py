"""CategoryTable: the fixed list of categories that every rank uses, from categories.json and from the data.

CategoryNumbers: one number for each category's name over several folders, which were each numbered on their own.

folder         categories.json              number here
train          1 gsm8k    2 code            1, 2         the first folder keeps its numbers
papers         1 code     2 papers          2, 3         a name that is known gets its number, a new one that
                                                         another category's number would clash with the next free
notes          1 gsm8k                      1            a 2 or 3 in its data is refused: which category is it?
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FILE_NAME = "categories.json"
SMALL_NUMBERS = 1 << 16
_HIGHEST = (1 << 62) - 1
_AMBIGUOUS = np.iinfo(np.int64).min


@dataclass(frozen=True)
class FolderNumbers:
    """How one folder's category numbers are read. here: its numbers' numbers over all folders; ambiguous: number ->
    name of the categories that only other folders name, so that its own data must not hold them."""

    path: Path
    here: Mapping[int, int]
    ambiguous: Mapping[int, str]

    def __call__(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """The numbers over all folders, of the same shape; those that no file names stay as they are.

        Raises:
            ValueError: values with a number that is ambiguous.
        """
        wanted = values.astype(np.int64, copy=False)
        if wanted.size == 0:
            return wanted
        if wanted.min() >= 0 and wanted.max() < len(self._table):  # looking up is many times faster than searching
            found = self._table[wanted]
        else:
            known, numbers = self._sorted
            at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            found = np.where(known[at] == wanted, numbers[at], wanted)
        if self.ambiguous and (refused := found == _AMBIGUOUS).any():
            number = int(wanted[refused].max())
            if number in self.ambiguous:
                name = self.ambiguous[number]
                raise ValueError(f"{self.path} must name category {number}, which is {name!r} in another folder")
        return found

    @property
    def changes_nothing(self) -> bool:
        """Whether every value is read as it is."""
        return not self.ambiguous and all(number == here for number, here in self.here.items())

    @cached_property
    def _sorted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(known numbers ascending, what each is read as)."""
        numbers = {**self.here, **dict.fromkeys(self.ambiguous, _AMBIGUOUS)}
        return np.array(sorted(numbers)), np.array([numbers[number] for number in sorted(numbers)])

    @cached_property
    def _table(self) -> NDArray[np.int64]:
        """What 0, 1, … are read as, below SMALL_NUMBERS."""
        known, numbers = self._sorted
        small = known < SMALL_NUMBERS
        table = np.arange(max(known[small], default=0) + 1)
        table[known[small]] = numbers[small]
        return table


@dataclass(frozen=True)
class CategoryNumbers:
    """names: number -> name of all folders together; lookups: how each folder's numbers are read, None where as they
    are. A number that no file names is one category in all folders."""

    names: dict[int, str]
    lookups: tuple[FolderNumbers | None, ...]

    @classmethod
    def read(cls, folders: Iterable[str]) -> "CategoryNumbers":
        """From the folders' categories.json, where they have one.

        Raises:
            ValueError: a file that is not {"1": "name", …}, or that gives two numbers one name.
        """
        paths = [Path(folder) / FILE_NAME for folder in folders]
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
            numbers = FolderNumbers(path, here, ambiguous)
            lookups.append(None if numbers.changes_nothing else numbers)
        return cls(names, tuple(lookups))


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
        if int(text) > _HIGHEST:
            raise ValueError(f"{path} must have category numbers up to {_HIGHEST} as its keys; got {text}")
        if int(text) in names:
            raise ValueError(f"{path} must name each category once; got {text!r} twice")
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{path} must give category {text} a name; got {name!r}")
        if name in names.values():
            known = next(number for number, other in names.items() if other == name)
            raise ValueError(f"{path} must give every category its own name; got {name!r} for {known} and {int(text)}")
        names[int(text)] = name
    return names


SMALL_IDS = 1 << 16


@dataclass(frozen=True)
class CategoryTable:
    """ids ascending, without 0 (which means no category), and one name each. Dense index c belongs to ids[c-1]."""

    ids: tuple[int, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def index(self, category_ids: ArrayLike) -> NDArray[np.int64]:
        """Dense index 1..C of each category id, 0 for id 0; same shape. ValueError for an id not in the table."""
        wanted = np.asarray(category_ids, np.int64)
        if wanted.size == 0:
            return wanted
        if wanted.min() >= 0 and wanted.max() < len(self._dense):  # looking up is many times faster than searching
            dense = self._dense[wanted]
            unknown = dense < 0
        else:
            known = np.asarray((0, *self.ids), np.int64)
            dense = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            unknown = known[dense] != wanted
        if unknown.any():
            raise ValueError(f"category ids must be of the table {self.ids}; got {wanted[unknown][0]}")
        return dense

    @cached_property
    def _dense(self) -> NDArray[np.int64]:
        """Dense index by id, for ids below SMALL_IDS; -1 where there is none."""
        small = [number for number in (0, *self.ids) if number < SMALL_IDS]
        dense = np.full(small[-1] + 1, -1, np.int64)
        dense[small] = np.arange(len(small))
        return dense

    @classmethod
    def read(cls, folders: str | Sequence[str], category_ids: Iterable[int] = ()) -> "CategoryTable":
        """The ids of categories.json and of `category_ids`; an id without a name is named by its number.

        Raises:
            ValueError: a file that is not {"1": "name", …}, or two ids with one name.
        """
        names = CategoryNumbers.read([folders] if isinstance(folders, str) else folders).names
        ids = sorted({*names, *category_ids})
        return cls(tuple(ids), _unique([names.get(number, str(number)) for number in ids], ids))


def _unique(names: list[str], ids: list[int]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    for number, name in zip(ids, names, strict=True):
        if seen.setdefault(name, number) != number:
            raise ValueError(
                f"{FILE_NAME} must give every category its own name; got {name!r} for {seen[name]} and {number}"
            )
    return tuple(names)
