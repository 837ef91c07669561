"""Token counts of texts, alone and inside a running text, for any tokenizer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_ext.tokenize.special_tokens import as_plain_text

ANCHOR = "So it was."  # what a text follows when it is counted inside a running text
BATCH = 1000


class TokenCounter:
    """Counts with one tokenizer, as `tokenizer(text)` gives them: special tokens that it adds count too."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._anchor = self.count(ANCHOR)
        self.overhead = self.opening(ANCHOR)  # of a usual text

    def count(self, text: str) -> int:
        """len(tokenizer(text).input_ids)."""
        return len(self._encode([text])[0])

    def opening(self, text: str) -> int:
        """Tokens that a text has more where it opens a whole than inside it: special tokens, and its first word's."""
        return self.count(text) - int(self.in_context([text])[0])

    def in_context(self, texts: Sequence[str]) -> np.ndarray:
        """counts[len(texts)] int64: the tokens that each text adds when it follows a sentence and a space."""
        counts: list[int] = []
        for start in range(0, len(texts), BATCH):
            batch = [f"{ANCHOR} {text}" for text in texts[start : start + BATCH]]
            counts += [len(ids) - self._anchor for ids in self._encode(batch)]
        return np.array(counts, dtype=np.int64)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        plain = as_plain_text(self.tokenizer)
        encoded = self.tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, **plain)
        return encoded["input_ids"]
