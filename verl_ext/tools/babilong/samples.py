"""BABILong samples: a story's facts inside exactly sized background text.

The token count of a text is not the sum of its parts' counts: a tokenizer may merge tokens across a join, add special
tokens, or treat the first word of a text differently. So the parts' counts, taken inside a running text, only plan a
sample: whole background sentences, the places of the facts between them, and one more sentence, of which a start fills
the rest. Then the whole text is tokenized, and a new plan allows for the difference. If no start of the last sentence
fits, other background is taken. A tokenizer that yields only even counts, for example, ends the run with an error. For
tokenizers that split at spaces most first plans are right, and a sample costs one pass over its text.
"""

import math
import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_ext.options import UsageError, must
from verl_ext.text.chat.special_tokens import as_plain_text
from verl_ext.tools.babilong.babi import Sample, utf8_text
from verl_ext.tools.babilong.stories import StoryOptions, make_story

UNITS = {"": 1, "k": 1000, "M": 1_000_000}
STORIES_TRIED = 1000  # to find one whose facts fit
WALKS_TRIED = 20  # stretches of background per sample
PLANS_TRIED = 6  # per stretch
TOKENS_PER_FACT = 8  # the benchmark uses no story with more than one fact (or question) per 8 tokens
ANCHOR = "So it was."  # precedes a text when it is counted inside a running text
BATCH = 1000  # texts that are counted at once
MIN_TOKENS = 10  # of a background sentence, as in the benchmark
# A sentence ends at its full stop with the closing marks after it, or at an empty line.
_SENTENCE_END = re.compile(r"""(?<=[.!?])["'”’)\]]*\s+|(?<=[。！？])\s*|\n\s*\n""")


class TokenCounter:
    """The token counts of `tokenizer(text)`, with the special tokens it adds."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._anchor = self.count(ANCHOR)
        self.overhead = self._anchor - self.inside(ANCHOR)  # of an ordinary text; below 0 if its first word needs fewer

    def count(self, text: str) -> int:
        """Return len(tokenizer(text).input_ids)."""
        return len(self._encode([text])[0])

    def inside(self, text: str) -> int:
        """Return the tokens that `text` adds after a sentence."""
        return int(self.in_context([text])[0])

    def in_context(self, texts: Sequence[str]) -> np.ndarray:
        """Return int64[len(texts)], the tokens that each adds after a sentence."""
        anchored = [f"{ANCHOR} {text}".rstrip() for text in texts]
        batches = (self._encode(anchored[start : start + BATCH]) for start in range(0, len(texts), BATCH))
        return np.array([len(ids) - self._anchor for batch in batches for ids in batch], dtype=np.int64)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        plain = as_plain_text(self.tokenizer)
        return self.tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, **plain)["input_ids"]


class Background:
    """The `sentences` of MIN_TOKENS or more, and the `tokens` they add.

    is_prose: whether neighbours belong together and are used side by side; else sentences are used in any order.
    """

    def __init__(self, sentences: list[str], counter: TokenCounter, is_prose: bool) -> None:
        tokens = counter.in_context(sentences)
        indices = np.flatnonzero(tokens >= MIN_TOKENS)
        self.sentences, self.tokens, self.is_prose = [sentences[index] for index in indices], tokens[indices], is_prose

    def walk(self, rng: random.Random, target: int) -> np.ndarray:
        """Return sentence numbers from a random start, of more than `target` tokens.

        No sentence repeats before all have been used.
        """
        total = len(self.sentences)
        start = rng.randrange(total)
        stride = 1
        while not self.is_prose and (stride == 1 or math.gcd(stride, total) > 1):
            stride = rng.randrange(1, max(total, 8))
        return (start + stride * np.arange(target // MIN_TOKENS + 1, dtype=np.int64)) % total


def filler_sentences(number: int) -> list[str]:
    """Return the first sentences of a fixed sequence from filler.yaml."""
    file = resources.files("verl_ext.tools.babilong").joinpath("filler.yaml")
    phrases: Any = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))
    rng = random.Random("filler")
    sentences = []
    for _ in range(number):
        opening, subject, action, thing, detail, ending = map(rng.choice, phrases.values())
        sentences.append(f"{opening}, {subject} {action} {thing}, {detail}{ending}.")
    return sentences


def folder_background(folder: str, counter: TokenCounter) -> Background:
    """Return a folder's .txt sentences, without each file's first and last.

    Raises UsageError if a file is not UTF-8, or no sentence is long enough.
    """
    files = sorted(path for path in Path(folder).rglob("*.txt") if path.is_file())
    sentences = [each for file in files for each in split_sentences(utf8_text(file, "background"))[1:-1]]
    background = Background(sentences, counter, is_prose=True)
    if not background.sentences:
        needed = f"hold a sentence of {MIN_TOKENS} tokens or more beside the first and last of its file"
        raise UsageError(must("background", needed, f"none in {len(files):,} .txt files of {folder}"))
    return background


def split_sentences(text: str) -> list[str]:
    """Return a text's sentences, with white space as single spaces."""
    ends = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    sentences = (" ".join(text[start:end].split()) for start, end in pairwise(ends))
    return [sentence for sentence in sentences if sentence]


def size_tokens(size: object) -> int | None:
    """Return the tokens of a number or name (1k, 1M), else None."""
    match = re.fullmatch(r"(\d{1,12})([kM]?)", str(size)) if not isinstance(size, bool) else None
    return int(match[1]) * UNITS[match[2]] if match else None


def target_tokens(size: object, reserve_tokens: int) -> int:
    """Return an `input`'s tokens, without the reserve; 0: facts alone (0k)."""
    tokens = size_tokens(size)
    return tokens - reserve_tokens if tokens else 0


@dataclass
class SampleMaker:
    """The samples of a task and size, each independent of others."""

    task: str
    size: str
    counter: TokenCounter
    background: Background | None  # None for 0k alone
    seed: int
    reserve_tokens: int = 300
    facts_within: Any = None  # None: anywhere; a share of the sample from its start; [first token, end token]
    story: StoryOptions = field(default_factory=StoryOptions)
    questions: list[Sample] | None = None  # from bAbI's own file, one per sample; None: stories are generated

    def __post_init__(self) -> None:
        self.target = target_tokens(self.size, self.reserve_tokens)
        by_size = max(self.target // TOKENS_PER_FACT - 1, 0) if self.target else math.inf
        self.max_facts = by_size if self.story.max_facts is None else self.story.max_facts
        # Every fact lies entirely within the tokens [first, end).
        self.first, self.end = 0, math.inf
        if isinstance(self.facts_within, (list, tuple)):
            self.first, self.end = self.facts_within[0], min(self.facts_within[1], self.target)
        elif self.facts_within is not None:
            self.end = int(self.facts_within * self.target)
        # Without room for the start of a sentence, the count cannot be exact.
        self.room = max(min(self.end - self.first, self.target - MIN_TOKENS), 0) if self.target else math.inf
        # A story is made once for its questions, which are neighbouring samples.
        self._story = lru_cache(maxsize=4)(lambda *which: make_story(self.task, self._rng("story", *which), self.story))
        self._fact_tokens = cache(self.counter.inside)

    def sample(self, number: int) -> dict[str, str]:
        """Return {input, question, target}; raise UsageError if no story or text fits."""
        facts, question, answer = self.story_part(number)
        text = self._text(facts, number) if self.target else " ".join(facts)
        return {"input": text, "question": question, "target": answer}

    def story_part(self, number: int) -> Sample:
        """Return a sample's facts, question and answer; raise UsageError if none fits.

        It is a question of bAbI's file, or question `number` % questions of generated story `number` // questions.
        """
        if self.questions is not None:
            if number < len(self._fitting):
                return self._fitting[number]
            fitting = f"the questions of {self.task}'s file whose facts fit into size {self.size}"
            needed = f"be at most {len(self._fitting):,}, {fitting} (of {len(self.questions):,})"
            raise UsageError(must("samples", needed, f"{number + 1:,} or more"))
        story, question = divmod(number, self.story.questions_of(self.task))
        tried: list[Sample] = []
        for attempt in range(STORIES_TRIED):
            tried.append(self._story(story, attempt)[question])
            if self._fits(tried[-1].facts):
                return tried[-1]
        fewest = min(len(sample.facts) for sample in tried)
        least_tokens = min(self._tokens(sample.facts) for sample in tried) + self.counter.overhead
        key = "sizes" if self.facts_within is None else "facts_within"
        if fewest > self.max_facts and self.story.max_facts is not None:
            key = "story.max_facts"
        of_story = f"question {question + 1} of a {self.task} story"
        needed = f"leave room for {of_story}, which needs {fewest} facts and {least_tokens} tokens or more"
        of_size = f"(size {self.size}, reserve_tokens {self.reserve_tokens})"
        raise UsageError(must(key, needed, f"at most {self.max_facts} facts in {self.room} tokens {of_size}"))

    @cached_property
    def _fitting(self) -> list[Sample]:
        """The questions of bAbI's file whose facts fit, in random order."""
        assert self.questions is not None
        shuffled = self.questions.copy()
        self._rng("order").shuffle(shuffled)
        return [sample for sample in shuffled if self._fits(sample.facts)]

    def _fits(self, facts: list[str]) -> bool:
        return len(facts) <= self.max_facts and self._tokens(facts) + self.counter.overhead <= self.room

    def _tokens(self, facts: list[str]) -> int:
        return sum(map(self._fact_tokens, facts))

    def _rng(self, *key: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, self.task, self.size, *key))))

    def _text(self, facts: list[str], number: int) -> str:
        """Return exactly `target` tokens of background, with facts at random places."""
        assert self.background is not None
        of_text = 1 if self.questions is not None else self.story.of_text(self.task)
        rng = self._rng("background", number - number % of_text)
        draws = sorted(rng.random() for _ in facts)  # sorted, so that facts keep their order
        overhead, fact_tokens = self.counter.overhead, self._tokens(facts)
        within = f"[{self.first}, {self.end}]"
        problem = f"facts_within must hold the start of a background sentence; none found in tokens {within}"
        for _ in range(WALKS_TRIED):
            walk = self.background.walk(rng, self.target)
            ends = np.cumsum(self.background.tokens[walk])
            room = self.target - overhead - fact_tokens  # for background
            for _ in range(PLANS_TRIED):
                # The cut sentence is the first that does not end before the room does, so it keeps a token or more.
                whole = int(np.searchsorted(ends, room))
                before = overhead + np.array([0, *ends[:whole], room])  # tokens before each place
                # All facts or none may come before a fact's own tokens, so a place must fit both cases.
                places = np.flatnonzero((before.clip(0) >= self.first) & (before + fact_tokens <= self.end))
                if not len(places):
                    break
                problem = f"no text of exactly {self.target} tokens was found with this tokenizer and background"
                *units, last = (self.background.sentences[index] for index in walk[: whole + 1])
                piece = cut_to(last, int(before[-1] - before[-2]), self.counter)
                if piece is None:
                    break
                units.append(piece)
                for fact, draw in zip(reversed(facts), reversed(draws), strict=True):
                    units.insert(int(places[int(draw * len(places))]), fact)
                text = " ".join(filter(None, units))
                excess = self.counter.count(text) - self.target
                if not excess:
                    return text
                room -= excess
        raise UsageError(f"{problem} (task {self.task}, size {self.size}, sample {number})")


def cut_to(sentence: str, tokens: int, counter: TokenCounter) -> str | None:
    """Return the start of `sentence` with exactly `tokens` tokens, or None.

    It ends after a word if possible, else inside a word, as in the benchmark's last sentence.
    """

    def longest(ends: list[int]) -> int:
        """Return the last end with at most `tokens`, or the first."""
        return ends[bisect_right(ends, tokens, lo=1, key=lambda end: counter.inside(sentence[:end])) - 1]

    words = [0, *(word.end() for word in re.finditer(r"\S+", sentence))]
    end = longest(words)
    if end < len(sentence) and counter.inside(sentence[:end]) != tokens:
        end = longest(list(range(end, words[words.index(end) + 1])))
    piece = sentence[:end].rstrip()
    return piece if counter.inside(piece) == tokens else None
