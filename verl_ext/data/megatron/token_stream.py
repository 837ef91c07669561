"""TokenStream: documents one after the other as one stream of tokens, and where its token p lies.

    documents   7        2              5         3 has no token and is left out
    lengths     3        5              2
    position    0 1 2  | 3 4 5 6 7    | 8 9
    ends            3             8       10      int64 cumulative sum

Token p lies in the first document whose end is greater than p. Positions are int64 throughout: exact to 2^63.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Pieces = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # document, start, stop: int64[P] each


class TokenStream:
    """The tokens of `documents` (numbers into `lengths`, in the order given; None: all of them)."""

    def __init__(self, lengths: NDArray[Any], documents: NDArray[Any] | None = None) -> None:
        length = np.asarray(lengths) if documents is None else np.asarray(lengths)[documents]
        kept = np.flatnonzero(length)
        self.documents = (kept if documents is None else np.asarray(documents)[kept]).astype(np.int32)
        self.ends = np.cumsum(length[kept], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def locate(self, position: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where tokens of the stream lie: (int64: places in `documents`, int64: offsets in those documents)."""
        place = np.searchsorted(self.ends, position, side="right")
        begin = np.where(place > 0, self.ends[place - 1], 0)
        return place, position - begin

    def pieces(self, start: int, stop: int) -> Pieces:
        """Tokens start..stop-1 of the stream, at least one, as pieces of documents."""
        first, last = np.searchsorted(self.ends, (start, stop - 1), side="right").tolist()
        document = self.documents[first : last + 1].astype(np.int64)
        piece_stop = self.ends[first : last + 1].copy()
        piece_start = np.zeros(len(document), np.int64)
        begin = self.ends.item(first - 1) if first else 0
        piece_stop[1:] -= self.ends[first:last]
        piece_stop[0] -= begin
        piece_start[0] = start - begin
        piece_stop[-1] = stop - (self.ends.item(last - 1) if last else 0)
        return document, piece_start, piece_stop

    def piece_counts(self, start: NDArray[Any], stop: NDArray[Any]) -> NDArray[np.int64]:
        """How many pieces tokens start..stop-1 are, for every pair."""
        first = np.searchsorted(self.ends, start, side="right")
        return np.searchsorted(self.ends, stop - 1, side="right") - first + 1
