"""Background sentences with their token counts, counted once and used by every sample."""

import math
import random
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from verl_ext.commands.errors import UsageError
from verl_ext.data.babilong.filler import filler_sentences
from verl_ext.data.babilong.tokens import TokenCounter

MIN_TOKENS = 10  # of a background sentence, as in the benchmark
FILLER_SENTENCES = 20_000  # at least: 0.5 M tokens, which are counted in a second
# A sentence ends at its full stop and what closes with it, or at an empty line.
_BREAK = re.compile(r"""(?<=[.!?])["'”’)\]]*\s+|(?<=[。！？])\s*|\n\s*\n""")


@dataclass
class Background:
    """sentences[N], each of MIN_TOKENS tokens or more, and tokens[N] int64: what each adds to a running text.

    `is_prose`: neighbours belong together and are used side by side; otherwise sentences come in any order.
    """

    sentences: list[str]
    tokens: np.ndarray
    is_prose: bool

    def walk(self, rng: random.Random, target: int, spare: int) -> np.ndarray:
        """Sentence numbers from a random start on, none twice: `target` tokens of them and `spare` sentences more."""
        total = len(self.sentences)
        start = rng.randrange(total)
        stride = 1
        while not self.is_prose and (stride == 1 or math.gcd(stride, total) > 1):
            stride = rng.randrange(1, max(total, 8))
        length = min(total, target // MIN_TOKENS + 1 + spare)
        return (start + stride * np.arange(length, dtype=np.int64)) % total

    def check_room(self, target: int, folder: str | None) -> None:
        """`UsageError` unless a sample of `target` tokens needs no sentence twice."""
        have = int(self.tokens.sum())
        if have < target:
            raise UsageError(
                f"background must hold at least as many tokens as a sample ({target:,}) in sentences of {MIN_TOKENS} or"
                f" more; got {have:,} in {folder}"
            )


def filler_size(target: int) -> int:
    """Generated sentences that samples of `target` tokens draw from, whatever else is generated beside them."""
    return max(FILLER_SENTENCES, target // MIN_TOKENS + 1)


def filler_background(number: int, counter: TokenCounter) -> Background:
    """Generated prose of `number` sentences."""
    return _counted(filler_sentences(number), counter, is_prose=False)


def folder_background(folder: str, counter: TokenCounter) -> Background:
    """The sentences of every .txt file below `folder`, files by name, without each file's first and last sentence.

    Raises `UsageError` where there is no such file, or one is not UTF-8 (its first bad byte is named).
    """
    files = sorted(path for path in Path(folder).rglob("*.txt") if path.is_file())
    if not files:
        raise UsageError(f"background must be a folder with .txt files; {folder} has none")
    sentences = [sentence for file in files for sentence in split_sentences(_read(file))[1:-1]]
    return _counted(sentences, counter, is_prose=True)


def split_sentences(text: str) -> list[str]:
    """A text's sentences, white space inside them made single spaces."""
    sentences = []
    start = 0
    for found in chain(_BREAK.finditer(text), [None]):
        end = len(text) if found is None else found.end()
        sentence = " ".join(text[start:end].split())
        start = end
        if sentence:
            sentences.append(sentence)
    return sentences


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"background must be UTF-8 text; {file} is not at byte {error.start}") from error
    except OSError as error:
        raise UsageError(f"background must be readable; {file}: {error.strerror}") from error


def _counted(sentences: list[str], counter: TokenCounter, is_prose: bool) -> Background:
    tokens = counter.in_context(sentences)
    kept = np.flatnonzero(tokens >= MIN_TOKENS)
    return Background([sentences[number] for number in kept], tokens[kept], is_prose)
