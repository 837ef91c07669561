"""The ranks that read data together, and its files, without torch."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from numpy.typing import NDArray


class Ranks:
    """The ranks of a run that read data together; this class itself is a process that runs alone."""

    rank, size = 0, 1

    def guard(self) -> AbstractContextManager[None]:
        """End the run on all ranks, with one report, if the body raises ValueError or OSError on one of them."""
        return nullcontext()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank."""
        return [value]

    def all_reduce(self, values: NDArray[Any]) -> None:
        """Sum the values over the ranks, in place."""


ONE_RANK = Ranks()


class DataFile(NamedTuple):
    """A file that is read during a run; the tokenizer recorded its checksum xxh3_128 at `recorded_ns`."""

    path: str
    xxh3_128: str | None = None
    recorded_ns: int = 0
