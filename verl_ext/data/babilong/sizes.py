"""Sizes as the published files are named: 0k, 1k, 32k, 1M, or a plain number of tokens."""

import re
from dataclasses import dataclass

UNITS = {"": 1, "k": 1000, "M": 1_000_000}


@dataclass(frozen=True)
class Size:
    """`label` names the file; `tokens` is what the label says, 0 for facts without background."""

    label: str
    tokens: int

    @classmethod
    def parse(cls, value: object) -> "Size | None":
        """The size that a label or number stands for, None for anything else."""
        match = re.fullmatch(r"(\d{1,12})([kM]?)", str(value)) if not isinstance(value, bool) else None
        return cls(str(value), int(match[1]) * UNITS[match[2]]) if match else None

    def target(self, reserve_tokens: int) -> int:
        """Tokens that an `input` of this size has: the label's, less what is kept for question and prompt."""
        return self.tokens - reserve_tokens if self.tokens else 0
