"""The ranks that read data together, and their cached arrays."""

import contextlib
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

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

SelfT = TypeVar("SelfT")
ValueT = TypeVar("ValueT")


def together(read: Callable[[SelfT, Ranks | None], ValueT]) -> Callable[..., ValueT]:
    """Make a method keep what the ranks found together at its first call.

    `ranks`: all of the run, a collective call that may use the cache; None: this process alone, without the cache.
    """
    name = f"_{read.__name__}"

    @wraps(read)
    def kept(self: Any, ranks: Ranks | None = None) -> ValueT:
        if name not in vars(self):
            vars(self)[name] = read(self, ranks)
        return vars(self)[name]

    return kept


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


def arrays_of_rank0(ranks: Ranks | None, name: Callable[[], str] | None, make: Callable[[], Arrays]) -> Arrays:
    """Return what `make` gives rank 0, cached by `name` (None: not); collective, unless `ranks` is None."""

    def made(ranks: Ranks) -> Arrays:
        with ranks.guard():
            arrays = make() if ranks.rank == 0 else None
        return ranks.broadcast(arrays)

    if ranks is None:
        return make()
    if name is None:
        return made(ranks)
    return arrays_of_ranks(ranks, name() if ranks.rank == 0 else "", lambda: made(ranks))
