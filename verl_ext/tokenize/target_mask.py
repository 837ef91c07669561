"""From character spans to tokens: which tokens of the one-go tokenisation are targets."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from verl_ext.tokenize.bad_record import BadRecord
from verl_ext.tokenize.chat_template import Span


class TokenCharacters(Sequence[Span]):
    """The characters (begin, end) of each token of a text, which only move on along it; few are looked at."""

    def first_after(self, character: int) -> int:
        """The first token that ends after a character; the number of tokens where none does."""
        return bisect_left(range(len(self)), character + 1, key=lambda token: self[token][1])

    def first_from(self, character: int) -> int:
        """The first token that begins at a character or after it; the number of tokens where none does."""
        return bisect_left(range(len(self)), character, key=self.begin)

    def begin(self, token: int) -> int:
        """Where a token begins. Tokenizers that trim its leading space from its characters leave a gap, which is the
        token's."""
        start = self[token][0]
        return min(start, self[token - 1][1]) if token else start


class ListedCharacters(list[Span], TokenCharacters):
    """Those of a list."""


def mask_from_offsets(text: str, offsets: TokenCharacters, spans: Sequence[Span]) -> tuple[np.ndarray, int]:
    """mask[T] int8: 1 for the tokens that lie in a span; and how many of these hold text of others as well.

    A token across a span's border belongs to the span: the template's last characters before a turn, and the first
    after it, may be bound to the turn's words.
    """
    mask = np.zeros(len(offsets), dtype=np.int8)
    across = 0
    for start, end in spans:
        first, stop = offsets.first_after(start), offsets.first_from(end)
        if first >= stop:
            raise BadRecord("template_mismatch", f"no token lies in the assistant's turn at character {start}")
        mask[first:stop] = 1
        across += bool(text[offsets.begin(first) : start].strip()) + bool(text[end : offsets[stop - 1][1]].strip())
    return mask, across


def mask_from_prefixes(ids: list[int], text: str, spans: list[Span], encode: Callable[[str], list[int]]) -> np.ndarray:
    """mask[T] int8 for tokenizers that give no offsets: the text up to a border must give a prefix of the tokens."""
    mask = np.zeros(len(ids), dtype=np.int8)
    for start, end in spans:
        before, through = encode(text[:start]), encode(text[:end])
        if ids[: len(before)] != before:  # a space before the turn may be bound to its first word, as above
            before = encode(text[:start].rstrip())
        if ids[: len(before)] != before or ids[: len(through)] != through:
            raise BadRecord("template_mismatch", f"tokens change at the border of the turn at character {start}")
        mask[len(before) : len(through)] = 1
    return mask
