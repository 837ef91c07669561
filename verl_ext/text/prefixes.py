"""Find a text's borders among its tokens where tokenizers give no offsets.

text      ………………… lead | piece | …      the lead: some characters before a border that is known
tokens    … t t t t t t t|t t t t t …      of lead and piece together: those of the lead, then the text's own

A border lies between two tokens if this holds. The characters encoded are as many as the text's, and a lead for each
border; a longer lead is tried where it does not hold.
"""

from collections.abc import Callable, Sequence

import numpy as np

from verl_ext.text.chat.template import Span
from verl_ext.text.read.bad_record import BadRecord

LEADS = (64, 1024)  # characters before a piece that are encoded with it; at last all of them


class Prefixes:
    """The numbers of tokens before ascending characters of a text."""

    def __init__(self, ids: Sequence[int], text: str, encode: Callable[[str], list[int]]) -> None:
        self._ids, self._text, self._encode = list(ids), text, encode
        self._at = self._tokens = 0  # the last border that was found

    def before(self, character: int) -> int | None:
        """Return the tokens before a character; None if inside a token."""
        if character <= self._at:
            return self._tokens
        for length in (*LEADS, self._at):
            tokens, is_border = self._counted(character, max(self._at - length, 0))
            if is_border:
                self._at, self._tokens = character, tokens
                return tokens
        return None

    def before_words(self, character: int) -> int | None:
        """Return the number of tokens before words, or before the space there."""
        if (tokens := self.before(character)) is None:
            while character > self._at and self._text[character - 1].isspace():
                character -= 1
            tokens = self.before(character)
        return tokens

    def about(self, character: int) -> int:
        """Return how many tokens lie before a character, about if inside one."""
        tokens = self.before(character)
        return self._counted(character, max(self._at - LEADS[0], 0))[0] if tokens is None else tokens

    def _counted(self, character: int, begin: int) -> tuple[int, bool]:
        lead = self._encode(self._text[begin : self._at]) if begin < self._at else []
        both = self._encode(self._text[begin:character])
        tokens = self._tokens + len(both) - len(lead)
        return tokens, both[: len(lead)] == lead and self._ids[self._tokens : tokens] == both[len(lead) :]


def mask_from_prefixes(
    ids: list[int], text: str, spans: Sequence[Span], encode: Callable[[str], list[int]]
) -> np.ndarray:
    """Return mask[T] int8 of a text's spans, with borders between tokens."""
    mask, prefixes = np.zeros(len(ids), dtype=np.int8), Prefixes(ids, text, encode)
    for start, end in spans:
        before, through = prefixes.before_words(start), prefixes.before(end)
        if before is None or through is None:
            raise BadRecord("template_mismatch", f"tokens change at the border of the turn at character {start}")
        mask[before:through] = 1
    return mask
