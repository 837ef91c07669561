"""What reading data needs without torch: the ranks that read it together, and its files."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from numpy.typing import NDArray


class Ranks:
    """The ranks of a run that read their data together; of this class itself, a process that runs alone."""

    rank, size = 0, 1

    def guard(self) -> AbstractContextManager[None]:
        """End the run on all ranks, reported once, if a ValueError or OSError is raised inside on one."""
        return nullcontext()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank."""
        return [value]

    def all_reduce(self, values: NDArray[Any]) -> None:
        """Sum over the ranks, in place."""


ONE_RANK = Ranks()


class DataFile(NamedTuple):
    """A file that is read during a run. xxh3_128: of its content, as recorded at `recorded_ns` by the tokenizer."""

    path: str
    xxh3_128: str | None = None
    recorded_ns: int = 0
