"""DocumentSource: the documents of tokenized folders, or of a user's class, in one form."""

from collections.abc import Collection, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.tokenized.arrow import DocumentColumns
from verl_ext.data.tokenized.files_in_use import DataFile
from verl_ext.data.tokenized.units import UnitRows


class DocumentSource(Protocol):
    """The N documents that packs are made of.

    key: the config key that messages name; folders: the documents' paths; category_names: those of numbers.
    """

    key: str
    folders: tuple[str, ...]
    category_names: dict[int, str]

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The files of the tokens, whose changes end a run."""

    @property
    def lengths(self) -> NDArray[np.integer]:
        """The tokens of each document, integer[N]."""

    @property
    def columns(self) -> Collection[str]:
        """The names of the columns of tokens."""

    @property
    def document_columns(self) -> DocumentColumns | None:
        """The facts of the documents; None if only their tokens show them."""

    @property
    def units(self) -> UnitRows | None:
        """The preferences among the rows; None if no document is an answer."""

    @property
    def first_blocks(self) -> NDArray[np.uint64] | None:
        """The hash of each document's first block, uint64[N]; None: not known."""

    def first_rows(self) -> NDArray[np.int64]:
        """Return the first row of every folder and their number, int64[F+1]."""

    def blocks(self, first: int, last: int, max_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows of at most `max_tokens` tokens, or one row."""

    def block(self, first: int, last: int) -> dict[str, NDArray[Any]]:
        """Return the values of rows first..last-1, a range of `blocks`, by column."""

    def gather(
        self, row: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64], out: dict[str, NDArray[Any]]
    ) -> None:
        """Write tokens start..start+length-1 of each row to `out`, by column."""
