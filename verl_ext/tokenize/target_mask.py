"""From character spans to tokens: which tokens of the one-go tokenisation are targets."""

from collections.abc import Callable, Sequence

import numpy as np

from verl_ext.tokenize.bad_record import BadRecord
from verl_ext.tokenize.chat_spans import Span


def mask_from_offsets(text: str, offsets: Sequence[Span] | np.ndarray, spans: list[Span]) -> np.ndarray:
    """mask[T] int8: 1 for the tokens that lie in a span. `offsets` are the tokens' characters.

    A token across a span's border whose outer part is white space belongs to the span: the template's own text ends in
    a space that the tokenizer binds to the first word. Any other such token would be unlike what the model is given at
    inference: `BadRecord`, `template_mismatch`.
    """
    raw = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    mask = np.zeros(len(raw), dtype=np.int8)
    if not len(raw):
        return mask
    ends = np.maximum.accumulate(raw[:, 1])
    # Tokenizers that trim a token's leading space from its offsets leave a gap, which is the token's.
    starts = np.minimum(raw[:, 0], np.concatenate([[0], ends[:-1]]))
    starts = np.maximum.accumulate(np.where(raw[:, 0] < raw[:, 1], starts, raw[:, 0]))
    for start, end in spans:
        first, stop = np.searchsorted(starts, start), np.searchsorted(starts, end)
        if first > 0 and ends[first - 1] > start:
            _check_border(text[starts[first - 1] : start], start)
            first -= 1
        if stop > first and ends[stop - 1] > end:
            _check_border(text[end : ends[stop - 1]], end)
        if first >= stop:
            raise BadRecord("template_mismatch", f"no token lies in the assistant's turn at character {start}")
        mask[first:stop] = 1
    return mask


def _check_border(outside: str, at: int) -> None:
    if outside.strip():
        raise BadRecord("template_mismatch", f"a token crosses the border of the assistant's turn at character {at}")


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
