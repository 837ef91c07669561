"""From character spans to tokens: which tokens of the one-go tokenisation are targets."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from verl_ext.tokenize.bad_record import BadRecord
from verl_ext.tokenize.chat_template import Span


def mask_from_offsets(text: str, offsets: Sequence[Span], spans: Sequence[Span]) -> tuple[np.ndarray, int]:
    """mask[T] int8: 1 for the tokens that lie in a span; and how many of these hold text of others as well.

    `offsets` are the tokens' characters, which only move on along the text; few are looked at, by bisection. A token
    across a span's border belongs to the span: the template's last characters before a turn, and the first after it,
    may be bound to the turn's words.
    """
    tokens = range(len(offsets))
    mask = np.zeros(len(offsets), dtype=np.int8)
    across = 0

    def begin(token: int) -> int:
        # Tokenizers that trim a token's leading space from its characters leave a gap, which is the token's.
        start = offsets[token][0]
        return min(start, offsets[token - 1][1]) if token else start

    for start, end in spans:
        first = bisect_left(tokens, start + 1, key=lambda token: offsets[token][1])
        stop = bisect_left(tokens, end, lo=first, key=begin)
        if first >= stop:
            raise BadRecord("template_mismatch", f"no token lies in the assistant's turn at character {start}")
        mask[first:stop] = 1
        across += bool(text[begin(first) : start].strip()) + bool(text[end : offsets[stop - 1][1]].strip())
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
