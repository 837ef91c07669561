"""CategoryTable: the fixed list of categories that every rank uses, from categories.json and from the data."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_ext.data.category_numbers import FILE_NAME, CategoryNumbers
from verl_ext.data.scan import DocumentScan

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
    def read(cls, folders: str | Sequence[str], scan: DocumentScan | None = None) -> "CategoryTable":
        """The ids of categories.json and those that `scan` met; an id without a name is named by its number.

        Raises:
            ValueError: a file that is not {"1": "name", …}, or two ids with one name.
        """
        names = CategoryNumbers.read([folders] if isinstance(folders, str) else folders).names
        ids = sorted({*names, *(scan.category_ids if scan else ())})
        return cls(tuple(ids), _unique([names.get(number, str(number)) for number in ids], ids))


def _unique(names: list[str], ids: list[int]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    for number, name in zip(ids, names, strict=True):
        if seen.setdefault(name, number) != number:
            raise ValueError(
                f"{FILE_NAME} must give every category its own name; got {name!r} for {seen[name]} and {number}"
            )
    return tuple(names)
