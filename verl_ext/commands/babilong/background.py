"""Background sentences with their token counts, counted once and used by every sample.

Token counts of texts, alone and inside a running text, for any tokenizer.

Background prose without any download: sentences put together from phrases about an old harbour town.

Nothing in it is an actor, place or object of bAbI, nor a point of the compass, so that no sentence reads as a fact.
Every sentence has 15 words or more; there are over ten million different ones.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.text.special_tokens import as_plain_text
from verl_ext.values import UsageError

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


OPENINGS = (
    "In the autumn of that year",
    "Some weeks after the great storm",
    "Before the first carts had arrived",
    "During the long winter that followed",
    "On the third day of the fair",
    "When the tide had turned again",
    "According to an entry in the town records",
    "Shortly after the bells had stopped ringing",
    "While the rain was still falling",
    "Towards the end of a quiet summer",
    "Once the new bridge had been paid for",
    "As far as anybody could remember",
    "In spite of all that had been promised",
    "Late in the evening of a market day",
    "By the time the snow had melted",
    "To the surprise of the whole council",
    "Not long before the harvest was brought in",
    "Because the mail coach was late once more",
)
SUBJECTS = (
    "the keeper of the lighthouse",
    "an elderly clockmaker",
    "the captain of a small trading ship",
    "a travelling painter and his nephew",
    "the two daughters of the miller",
    "the youngest member of the council",
    "a retired judge with a wooden leg",
    "the schoolteacher of the lower town",
    "several fishermen and their families",
    "the owner of the printing house",
    "a doctor who had studied abroad",
    "the widow of the former mayor",
    "an apprentice from the shipyard",
    "the musicians of the summer theatre",
    "a merchant who dealt in wool and salt",
    "the librarian and two of her friends",
    "a surveyor sent by the government",
)
ACTIONS = (
    "began to repair",
    "wrote a long report about",
    "complained bitterly about",
    "quarrelled for hours over",
    "refused to pay for",
    "told everybody a story about",
    "made a careful drawing of",
    "dreamed almost every night of",
    "spent a small fortune on",
    "could not stop thinking about",
    "asked for permission to remove",
    "gathered a crowd in front of",
    "gave a lecture on the history of",
    "took great pride in",
    "had long forgotten about",
    "looked with some suspicion at",
    "promised to take better care of",
)
THINGS = (
    "the broken weather vane",
    "an ancient map of the coast",
    "the stone lions beside the fountain",
    "a collection of pressed flowers",
    "the clock above the town gate",
    "a heavy chest filled with letters",
    "the painted ceiling of the chapel",
    "an iron bell without a clapper",
    "the narrow staircase to the tower",
    "a flock of grey geese",
    "the toll house near the river",
    "a telescope made of brass",
    "the wooden figure of a sailor",
    "an unfinished portrait of the duke",
    "the ropes and sails of a wrecked ship",
    "a barrel of very old wine",
    "the long row of poplar trees",
)
DETAILS = (
    "which had stood there for three generations",
    "which nobody had seen since the flood",
    "although the matter was of little importance",
    "and hardly a word was said against it",
    "which was known far beyond the valley",
    "and the news spread quickly from house to house",
    "although two engineers had warned against it",
    "which was said to bring good luck to travellers",
    "and even the children came to watch",
    "which the old chronicle describes in great detail",
    "although there was not enough money for it",
    "and for a while there was peace again",
    "which had once belonged to a foreign prince",
    "and nobody ever found out the reason",
    "although the newspapers took no notice of it",
)
ENDINGS = (
    "",
    ", or so the story goes",
    ", as was the custom in those days",
    ", and the whole street talked about it until spring",
    ", while smoke rose slowly from the chimneys",
    ", much to the annoyance of the neighbours",
    ", as a letter from that time still shows",
    ", and that was the end of the affair",
    ", although opinions differ on this point",
    ", with a patience that surprised everyone",
    ", and the boats stayed in port for another week",
)


def filler_sentences(number: int) -> list[str]:
    """The first `number` sentences of one fixed sequence."""
    rng = random.Random("filler")
    return [_sentence(rng) for _ in range(number)]


def _sentence(rng: random.Random) -> str:
    opening, subject, action, thing, detail, ending = (
        rng.choice(part) for part in (OPENINGS, SUBJECTS, ACTIONS, THINGS, DETAILS, ENDINGS)
    )
    return f"{opening}, {subject} {action} {thing}, {detail}{ending}."


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
