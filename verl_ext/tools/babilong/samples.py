"""BABILong samples: a story's facts inside exactly sized background text.

The token count of a text is not the sum of its parts' counts: a tokenizer may merge tokens across a join, add special
tokens, or treat the first word of a text differently. So the parts' counts, taken inside a running text, only plan the
sample: the order of facts and whole background sentences, and one more sentence, which is cut to fill the rest. Then
the whole text is tokenized, and the cut moves by the difference until tokenizer(input) has exactly the target count; if
no cut of this sentence fits, another sentence is cut. This finds a text for every tokenizer whose count grows by one at
some cut, whatever its merges. A tokenizer that yields only even counts, for example, ends the run with an error. For
tokenizers that split at spaces the first plan is right, and a sample costs one pass over its text.
"""

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_ext.text.special_tokens import as_plain_text
from verl_ext.tools.babilong.babi import Sample
from verl_ext.tools.babilong.stories import Story, StoryOptions, make_story
from verl_ext.values import UsageError, reason_of

UNITS = {"": 1, "k": 1000, "M": 1_000_000}
STORIES_TRIED = 1000  # to find one whose facts fit
WALKS_TRIED = 4  # stretches of background per sample
SENTENCES_TRIED = 20  # sentences of a stretch that are tried as the cut one
CUTS_TRIED = 6  # per sentence
TOKENS_PER_FACT = 8  # the benchmark uses no story with more than one fact (or question) per 8 tokens
ANCHOR = "So it was."  # precedes a text when it is counted inside a running text
BATCH = 1000  # texts that are counted at once
MIN_TOKENS = 10  # of a background sentence, as in the benchmark
# A sentence ends at its full stop with the closing marks after it, or at an empty line.
_SENTENCE_END = re.compile(r"""(?<=[.!?])["'”’)\]]*\s+|(?<=[。！？])\s*|\n\s*\n""")


class TokenCounter:
    """The token counts of `tokenizer(text)`, including the special tokens that it adds."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._anchor = self.count(ANCHOR)
        self.overhead = self.opening(ANCHOR)  # of an ordinary text

    def count(self, text: str) -> int:
        """Return len(tokenizer(text).input_ids)."""
        return len(self._encode([text])[0])

    def opening(self, text: str) -> int:
        """Return a text's extra tokens at the start of a larger text.

        These are special tokens, and the difference of a first word that is encoded in another way.
        """
        return self.count(text) - self.inside(text)

    def inside(self, *texts: str) -> int:
        """Return the tokens that all texts add to running text."""
        return int(self.in_context(texts).sum())

    def in_context(self, texts: Sequence[str]) -> np.ndarray:
        """Return int64[len(texts)], the tokens that each adds after a sentence."""
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
    """N background sentences of MIN_TOKENS tokens or more.

    tokens: int64[N], the number that each sentence adds to a text.
    is_prose: whether neighbours belong together and are used side by side; else sentences are used in any order.
    """

    sentences: list[str]
    tokens: np.ndarray
    is_prose: bool

    @classmethod
    def from_sentences(cls, sentences: list[str], counter: TokenCounter, is_prose: bool) -> "Background":
        """Return a background of the sentences that are long enough."""
        tokens = counter.in_context(sentences)
        kept = np.flatnonzero(tokens >= MIN_TOKENS)
        return cls([sentences[number] for number in kept], tokens[kept], is_prose)

    def walk(self, rng: random.Random, target: int, spare: int) -> np.ndarray:
        """Return sentence numbers from a random start.

        They hold `target` tokens or more, and `spare` more sentences follow. No sentence repeats before all have been
        used.
        """
        total = len(self.sentences)
        start = rng.randrange(total)
        stride = 1
        while not self.is_prose and (stride == 1 or math.gcd(stride, total) > 1):
            stride = rng.randrange(1, max(total, 8))
        return (start + stride * np.arange(target // MIN_TOKENS + 1 + spare, dtype=np.int64)) % total


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
    """Return the sentences of every .txt file below `folder`.

    Each file's first and last sentence is left out. Raises UsageError if a file is not UTF-8, or no sentence is long
    enough.
    """
    files = sorted(path for path in Path(folder).rglob("*.txt") if path.is_file())
    sentences = []
    for file in files:
        try:
            sentences += split_sentences(file.read_bytes().decode("utf-8-sig"))[1:-1]
        except UnicodeDecodeError as error:
            raise UsageError(f"background must be UTF-8 text; {file} is not at byte {error.start}") from error
        except OSError as error:
            raise UsageError(f"background must be readable; {file}: {reason_of(error)}") from error
    background = Background.from_sentences(sentences, counter, is_prose=True)
    if not background.sentences:
        raise UsageError(
            f"background must hold a sentence of {MIN_TOKENS} tokens or more beside the first and last of its file;"
            f" got none in {len(files):,} .txt files of {folder}"
        )
    return background


def split_sentences(text: str) -> list[str]:
    """Return a text's sentences, with white space as single spaces."""
    ends = [0, *(found.end() for found in _SENTENCE_END.finditer(text)), len(text)]
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
        self.first, self.end = 0, self.target
        if isinstance(self.facts_within, (list, tuple)):
            self.first, self.end = self.facts_within[0], min(self.facts_within[1], self.target)
        elif self.facts_within is not None:
            self.end = int(self.facts_within * self.target)
        # Without room for the start of a sentence, the count cannot be exact.
        self.room = max(min(self.end - self.first, self.target - MIN_TOKENS), 0) if self.target else math.inf
        self._story = lru_cache(maxsize=4)(self._make_story)  # the questions of a story are neighbouring samples

    def sample(self, number: int) -> dict[str, str]:
        """Return {input, question, target} of a sample.

        Raises UsageError if no story or text fits. With generated stories, it is question `number` % questions of story
        `number` // questions.
        """
        facts, question, answer = self.story_part(number)
        text = self._text(facts, number) if self.target else " ".join(facts)
        return {"input": text, "question": question, "target": answer}

    def story_part(self, number: int) -> Sample:
        """Return a sample's facts, question and answer; raise UsageError if none fits."""
        if self.questions is not None:
            if number < len(self._fitting):
                return self._fitting[number]
            raise UsageError(
                f"samples must be at most {len(self._fitting):,}, the questions of {self.task}'s file whose facts fit"
                f" into size {self.size} (of {len(self.questions):,}); got {number + 1:,} or more"
            )
        story_number, question_number = divmod(number, self.story.questions_of(self.task))
        needs: list[tuple[int, int]] = []  # (facts, tokens) of the stories that do not fit
        for attempt in range(STORIES_TRIED):
            story = self._story(story_number, attempt)
            question = story.questions[question_number]
            facts = story.facts[: question.num_facts]
            tokens = self.counter.inside(*facts) + self.counter.overhead if self.target else 0
            if len(facts) <= self.max_facts and tokens <= self.room:
                return Sample(facts, question.text, question.answer)
            needs.append((len(facts), tokens))
        fewest, least_tokens = map(min, zip(*needs, strict=True))
        key = "sizes" if self.facts_within is None else "facts_within"
        if fewest > self.max_facts and self.story.max_facts is not None:
            key = "story.max_facts"
        raise UsageError(
            f"{key} must leave room for question {question_number + 1} of a {self.task} story, which needs {fewest}"
            f" facts and {least_tokens} tokens or more; got at most {self.max_facts} facts in {self.room} tokens"
            f" (size {self.size}, reserve_tokens {self.reserve_tokens})"
        )

    @cached_property
    def _fitting(self) -> list[Sample]:
        """The questions of bAbI's file whose facts fit, in random order."""
        assert self.questions is not None
        shuffled = self.questions.copy()
        self._rng("order").shuffle(shuffled)
        distinct = sorted({fact for sample in shuffled for fact in sample.facts}) if self.target else []
        tokens = dict(zip(distinct, self.counter.in_context(distinct).tolist(), strict=True))
        room = self.room - self.counter.overhead
        return [
            sample
            for sample in shuffled
            if len(sample.facts) <= self.max_facts and sum(tokens.get(fact, 0) for fact in sample.facts) <= room
        ]

    def _make_story(self, story: int, attempt: int) -> Story:
        return make_story(self.task, self._rng("story", story, attempt), self.story)

    def _rng(self, *key: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, self.task, self.size, *key))))

    def _text(self, facts: list[str], number: int) -> str:
        """Return exactly `target` tokens of background, with facts at random places."""
        assert self.background is not None
        rng = self._rng("background", number)
        draws = sorted(rng.random() for _ in facts)  # sorted, so that facts keep their order
        plans = 0
        for _ in range(WALKS_TRIED):
            walk = self.background.walk(rng, self.target, SENTENCES_TRIED)
            for parts, cut, rest, wanted in self._plans(walk, facts, draws):
                plans += 1
                if text := self._fitted(parts, cut, rest, wanted):
                    return text
        which = f"(task {self.task}, size {self.size}, sample {number})"
        if plans:
            raise UsageError(
                f"no text of exactly {self.target} tokens was found with this tokenizer and background {which}"
            )
        raise UsageError(
            "facts_within must hold the start of a background sentence;"
            f" none found in tokens [{self.first}, {self.end}] {which}"
        )

    def _plans(
        self, walk: np.ndarray, facts: list[str], draws: list[float]
    ) -> Iterator[tuple[list[str], int, str, int]]:
        """Yield plans of texts: where the facts lie, what is cut.

        A plan is (ordered parts of a text, index of the cut part, text to cut, tokens to keep). Yields nothing if there
        is no place for the facts.
        """
        assert self.background is not None
        fact_tokens = self.counter.inside(*facts)
        room = self.target - self.counter.overhead - fact_tokens  # for background
        ends = np.cumsum(self.background.tokens[walk])
        fit = int(np.searchsorted(ends, room))  # the number of sentences that leave at least one token for the cut one
        for attempt in range(SENTENCES_TRIED):
            whole = max(fit - (attempt > 0), 0)  # one less from the second attempt on: the cut can move both ways
            tokens = np.concatenate([[0], ends[:whole]])  # before each sentence
            before = self.counter.overhead + np.append(tokens, room)
            gaps = np.arange(len(before))  # gap g lies before sentence g
            if self.facts_within is not None:
                # All facts or none may come before a fact's own tokens, so a gap must fit both cases.
                gaps = np.flatnonzero((before >= self.first) & (before + fact_tokens <= self.end))
            if not len(gaps):
                return
            rest = [self.background.sentences[number] for number in walk[fit + attempt : fit + attempt + 3]]
            sentences = [*(self.background.sentences[number] for number in walk[:whole]), ""]
            places = [int(gaps[int(draw * len(gaps))]) for draw in draws]
            parts: list[str] = []
            for fact, start, end in zip(facts, [0, *places], places, strict=False):
                parts += [*sentences[start:end], fact]
            parts += sentences[places[-1] :]
            opening = self.counter.opening(parts[0]) if parts[0] else self.counter.overhead
            wanted = self.target - opening - fact_tokens - int(tokens[-1])
            yield parts, parts.index(""), " ".join(rest), wanted

    def _fitted(self, parts: list[str], cut: int, rest: str, wanted: int) -> str | None:
        """Return `parts` with an exact cut of `rest` at `cut`, or None.

        The text has exactly the target's tokens. The cut starts at `wanted` tokens, and moves by the excess or lack of
        tokens of the whole text.
        """
        for _ in range(CUTS_TRIED):
            piece = cut_to(rest, wanted, self.counter)
            if piece is None:
                return None
            text = " ".join([*parts[:cut], *filter(None, [piece]), *parts[cut + 1 :]])
            excess = self.counter.count(text) - self.target
            if not excess:
                return text
            wanted -= excess
        return None


def cut_to(sentence: str, tokens: int, counter: TokenCounter) -> str | None:
    """Return the start of `sentence` with exactly `tokens` tokens, or None.

    It ends after a word if possible, else inside a word, as in the benchmark's last sentence.
    """
    if tokens <= 0:
        return None if tokens else ""
    words = sentence.split(" ")
    whole = _most(len(words), tokens, lambda number: " ".join(words[:number]), counter)
    start = " ".join(words[:whole])
    if whole and counter.inside(start) == tokens:
        return start
    if whole == len(words):
        return None
    stem, word = (f"{start} " if start else ""), words[whole]
    letters = _most(len(word), tokens, lambda number: stem + word[:number], counter)
    piece = stem + word[:letters]
    return piece if letters and counter.inside(piece) == tokens else None


def _most(number: int, tokens: int, start: Callable[[int], str], counter: TokenCounter) -> int:
    """Return the largest n ≤ `number` whose start(n) has ≤ `tokens` tokens."""
    low, high = 0, number
    while low < high:
        middle = (low + high + 1) // 2
        if counter.inside(start(middle)) <= tokens:
            low = middle
        else:
            high = middle - 1
    return low
