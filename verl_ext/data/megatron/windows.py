"""Windows: samples of up to seq_len tokens of a stream of documents, at random or one after the other.

stream      a a a b b b b b c c         seq_len 4
in order    [a a a b][b b b b][c c]     every token once, the last window partial
followed    [a a a b b][b b b b c][c c]  with the token after each: windows of 5, starts 4 apart
random      ⌊10/4⌋ = 2 of the starts 0..6, all different, any order

TokenStream: documents one after the other as one stream of tokens, and where its token p lies.

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


DENSE = 4  # fewer candidates than this for each start are shuffled as a whole


class Windows:
    """Sample k: tokens starts[k]..starts[k]+seq_len-1 of the stream, as far as it goes."""

    def __init__(self, stream: TokenStream, starts: NDArray[np.int64], seq_len: int) -> None:
        self.stream, self.starts, self.seq_len = stream, starts, seq_len

    def __len__(self) -> int:
        return len(self.starts)

    def pieces(self, k: int) -> Pieces:
        """The tokens of sample k as pieces of documents, none of them empty: (document, start, stop) int64[P] each."""
        start = self.starts.item(k)
        return self.stream.pieces(start, min(start + self.seq_len, self.stream.num_tokens))

    def token_counts(self) -> NDArray[np.int64]:
        """int64[n]: tokens of each sample."""
        return np.minimum(self.starts + self.seq_len, self.stream.num_tokens) - self.starts

    def piece_counts(self) -> NDArray[np.int64]:
        """int64[n]: pieces of each sample."""
        return self.stream.piece_counts(self.starts, self.starts + self.token_counts())


def random_starts(num_tokens: int, seq_len: int, seed: int, key: str = "data.train_dir") -> NDArray[np.int64]:
    """int64[⌊num_tokens/seq_len⌋]: different starts of 0..num_tokens-seq_len, every choice and order as likely.

    Memory grows with the number of starts, not with the number of tokens. Drawing with replacement until enough
    different starts are there gives each set of them the same chance, since the candidates are interchangeable.

    Raises:
        ValueError: fewer tokens than one sample has; `key` is named.
    """
    check_has_sample(num_tokens, seq_len, key)
    rng = np.random.default_rng(seed)
    wanted, candidates = num_tokens // seq_len, num_tokens - seq_len + 1
    if candidates < DENSE * wanted:
        return rng.permutation(candidates)[:wanted].copy()
    starts = np.empty(0, np.int64)
    while len(starts) < wanted:
        more = rng.integers(candidates, size=wanted - len(starts), dtype=np.int64)
        starts = np.sort(np.concatenate([starts, more]))  # np.unique hashes, at many times the cost
        starts = starts[np.diff(starts, prepend=-1) > 0]
    rng.shuffle(starts)
    return starts


def in_order_starts(num_tokens: int, seq_len: int) -> NDArray[np.int64]:
    """int64[⌈num_tokens/seq_len⌉]: 0, seq_len, 2·seq_len, … below num_tokens."""
    return np.arange(0, num_tokens, seq_len, dtype=np.int64)


def check_has_sample(num_tokens: int, needed: int, key: str) -> None:
    """ValueError where a corpus has fewer tokens than one sample needs."""
    if num_tokens < needed:
        raise ValueError(
            f"{key} must have the {needed} tokens that a sample of data.seq_len needs; got {num_tokens} tokens"
        )
