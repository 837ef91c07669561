"""Background sentences of samples, generated or a user's own, with the tokens that each adds to a running text."""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_ext.text.special_tokens import as_plain_text
from verl_ext.values import UsageError, reason_of

ANCHOR = "So it was."  # what a text follows when it is counted inside a running text
BATCH = 1000  # texts counted at once
MIN_TOKENS = 10  # of a background sentence, as in the benchmark
# A sentence ends at its full stop and what closes with it, or at an empty line.
_SENTENCE_END = re.compile(r"""(?<=[.!?])["'”’)\]]*\s+|(?<=[。！？])\s*|\n\s*\n""")


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
        return self.tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, **plain)["input_ids"]


@dataclass
class Background:
    """sentences[N], each of MIN_TOKENS tokens or more, and tokens[N] int64: what each adds to a running text.

    `is_prose`: neighbours belong together and are used side by side; otherwise sentences come in any order.
    """

    sentences: list[str]
    tokens: np.ndarray
    is_prose: bool

    @classmethod
    def counted(cls, sentences: list[str], counter: TokenCounter, is_prose: bool) -> "Background":
        """Those of the sentences that are long enough."""
        tokens = counter.in_context(sentences)
        kept = np.flatnonzero(tokens >= MIN_TOKENS)
        return cls([sentences[number] for number in kept], tokens[kept], is_prose)

    def walk(self, rng: random.Random, target: int, spare: int) -> np.ndarray:
        """Sentence numbers from a random start on, none twice: `target` tokens of them and `spare` sentences more."""
        total = len(self.sentences)
        start = rng.randrange(total)
        stride = 1
        while not self.is_prose and (stride == 1 or math.gcd(stride, total) > 1):
            stride = rng.randrange(1, max(total, 8))
        length = min(total, target // MIN_TOKENS + 1 + spare)
        return (start + stride * np.arange(length, dtype=np.int64)) % total


def filler_sentences(number: int) -> list[str]:
    """The first `number` sentences of one fixed sequence, put together from the phrases of filler.yaml."""
    file = resources.files("verl_ext.commands.babilong").joinpath("filler.yaml")
    phrases: Any = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))
    rng = random.Random("filler")
    sentences = []
    for _ in range(number):
        opening, subject, action, thing, detail, ending = map(rng.choice, phrases.values())
        sentences.append(f"{opening}, {subject} {action} {thing}, {detail}{ending}.")
    return sentences


def filler_background(number: int, counter: TokenCounter) -> Background:
    """Generated prose of `number` sentences."""
    return Background.counted(filler_sentences(number), counter, is_prose=False)


def folder_background(folder: str, counter: TokenCounter, least_tokens: int = 0) -> Background:
    """The sentences of every .txt file below `folder`, files by name, without each file's first and last sentence.

    Raises UsageError where there is no such file, one is not UTF-8 (its first bad byte is named), or all together have
    less than `least_tokens`, so that a sample of as many would need a sentence twice.
    """
    files = sorted(path for path in Path(folder).rglob("*.txt") if path.is_file())
    if not files:
        raise UsageError(f"background must be a folder with .txt files; {folder} has none")
    sentences = [sentence for file in files for sentence in split_sentences(_read(file))[1:-1]]
    background = Background.counted(sentences, counter, is_prose=True)
    tokens = int(background.tokens.sum())
    if tokens < least_tokens:
        raise UsageError(
            f"background must hold at least as many tokens as a sample ({least_tokens:,}) in sentences of {MIN_TOKENS}"
            f" or more; got {tokens:,} in {folder}"
        )
    return background


def split_sentences(text: str) -> list[str]:
    """A text's sentences, white space inside them made single spaces."""
    ends = [0, *(found.end() for found in _SENTENCE_END.finditer(text)), len(text)]
    sentences = (" ".join(text[start:end].split()) for start, end in pairwise(ends))
    return [sentence for sentence in sentences if sentence]


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"background must be UTF-8 text; {file} is not at byte {error.start}") from error
    except OSError as error:
        raise UsageError(f"background must be readable; {file}: {reason_of(error)}") from error
