"""Lengths of texts in tokens, and parts of texts by tokens."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from verl_ext.options import UsageError, must


class TokenLengths:
    """Token counts and places in texts, without special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """Take the trained model's tokenizer; raise UsageError without a tokenizer.json."""
        if not tokenizer.is_fast:
            needed = "a tokenizer with a tokenizer.json, which tells where tokens stand in a text"
            raise UsageError(must("model.path", f"have {needed}", type(tokenizer).__name__))
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def characters(self, text: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return (first character, end) for each non-empty span of tokens."""
        places = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return [(places[first][0], places[end - 1][1]) for first, end in spans]

    def tokens(self, text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return (first token, end) for each span of characters with tokens."""
        if not spans:
            return []
        places = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        starts = [first for first, _ in places]
        found = [(bisect_left(starts, first), bisect_left(starts, end)) for first, end in spans]
        return [(first, end) for first, end in found if first < end]

    def shortened(self, text: str, tokens: int) -> str:
        """Return the start of a text, with at most `tokens` tokens."""
        end = tokens
        while True:  # the start alone may have more tokens than it has within the whole text
            start = text[: self.characters(text, [(0, end)])[0][1]].rstrip()
            if self.count(start) <= tokens:
                return start
            end -= 1
