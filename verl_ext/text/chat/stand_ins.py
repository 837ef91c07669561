"""Texts that stand for words, or for their beginning and end, while a template prints a chat.

    Zq7w3x              the words with number 3 themselves
    Zq7b3xhelloZq7e3x   the same words between marks

They are ASCII letters and digits, which no template trims, splits or escapes. Some templates change their case.
"""

import re
from collections.abc import Iterable
from itertools import count

WORD, BEGIN, END = "w", "b", "e"


class StandIns:
    """An alphabet of stand-ins that occur in none of some texts."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        whole = "\0".join(texts).lower()
        self._stem = next(stem for number in count(7) if (stem := f"Zq{number}").lower() not in whole)
        self.pattern = re.compile(f"{self._stem}([{WORD}{BEGIN}{END}])([0-9]+)x", re.IGNORECASE)

    def of(self, number: int, letter: str = WORD, length: int = 0) -> str:
        """Return the stand-in of a number, which is at least `length` characters long."""
        head = f"{self._stem}{letter}"
        return f"{head}{number:0{max(length - len(head) - 1, 1)}}x"

    def in_own_case(self, text: str) -> str:
        """Return a text with its stand-ins as they were before a template changed their case."""
        return self.pattern.sub(lambda match: match[0].capitalize(), text)
