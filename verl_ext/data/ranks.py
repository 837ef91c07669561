"""The ranks that read data together, and their cached arrays."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from verl_ext.cache import Arrays, cached_arrays, default_root, is_complete, stored_arrays


class Ranks:
    """The ranks of a run; this class itself is a process alone."""

    rank, size = 0, 1

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """End the run on all ranks if one raises ValueError or OSError."""
        return contextlib.nullcontext()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank."""
        return [value]

    def all_reduce(self, values: NDArray[Any]) -> None:
        """Sum the values over the ranks, in place."""


ONE_RANK = Ranks()


def arrays_of_ranks(ranks: Ranks, name: str, make: Callable[[], Arrays], root: Path | None = None) -> Arrays:
    """Return the arrays of `make`, a collective call, or the cached ones.

    A cache that cannot be written or read only costs time. root: the folder of the cache; None: that of `datasets`.
    """
    root, arrays = default_root("verl_ext_facts", None) if root is None else root, None
    if ranks.rank == 0 and is_complete(root / name):
        try:
            arrays = stored_arrays(root / name, in_memory=True)
        except Exception:  # whatever is wrong with the files, the data can be read instead
            shutil.rmtree(root / name, ignore_errors=True)
    arrays = ranks.broadcast(arrays)
    if arrays is not None:
        return arrays
    made = make()
    if ranks.rank == 0:
        with contextlib.suppress(ValueError, NotImplementedError):  # NotImplementedError if a file system has no locks
            cached_arrays(root, name, lambda: made)
    return made


def arrays_of_rank0(ranks: Ranks, name: Callable[[], str] | None, make: Callable[[], Arrays]) -> Arrays:
    """Return what `make` gives rank 0, cached by `name` (None: not); collective."""

    def made() -> Arrays:
        with ranks.guard():
            arrays = make() if ranks.rank == 0 else None
        return ranks.broadcast(arrays)

    return made() if name is None else arrays_of_ranks(ranks, name() if ranks.rank == 0 else "", made)
