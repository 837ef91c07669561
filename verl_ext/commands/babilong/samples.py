"""One sample: a story's facts inside background of an exact number of tokens.

How exactness is reached. A text's tokens are not the sum of its parts' tokens: a tokenizer may merge across a join, add
special tokens, or treat the first word of a text differently. The parts' counts, taken inside a running text, only plan
the sample: whole background sentences, and a last one that is cut to fill what is left. Then the final text is
tokenised, and the difference to the target changes the plan, until tokenizer(input) has exactly the target's number of
tokens. Where that fails, other background is tried, and in the end the run ends with an error; no text of another
length is returned.
For tokenizers that split at spaces the first plan is right, and a sample costs one pass over its text.

Sizes as the published files are named: 0k, 1k, 32k, 1M, or a plain number of tokens.

The start of a sentence with an exact number of tokens.

Between which background sentences the facts lie.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from verl_ext.commands.babilong.background import Background, TokenCounter
from verl_ext.commands.babilong.stories import Story, questions_of, tell_story
from verl_ext.values import UsageError

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


def cut_to(sentence: str, tokens: int, counter: TokenCounter) -> str | None:
    """The start of `sentence` that has `tokens` tokens inside a running text; None where no start has.

    After a word where possible, inside one otherwise, as the benchmark cuts its last sentence.
    """
    words = sentence.split(" ")
    whole = _most(len(words), tokens, lambda number: " ".join(words[:number]), counter)
    start = " ".join(words[:whole])
    if whole and int(counter.in_context([start])[0]) == tokens:
        return start
    if whole == len(words):
        return None
    stem, word = (f"{start} " if start else ""), words[whole]
    letters = _most(len(word), tokens, lambda number: stem + word[:number], counter)
    piece = stem + word[:letters]
    return piece if letters and int(counter.in_context([piece])[0]) == tokens else None


def _most(number: int, tokens: int, start: Callable[[int], str], counter: TokenCounter) -> int:
    """The largest n ≤ number for which start(n) has at most `tokens` tokens, by bisection (more text, more tokens)."""
    low, high = 0, number
    while low < high:
        middle = (low + high + 1) // 2
        if int(counter.in_context([start(middle)])[0]) <= tokens:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class FactRange:
    """The tokens of a sample, [first, end), inside which every fact lies whole. `is_all`: anywhere."""

    first: int
    end: int
    is_all: bool = False

    @classmethod
    def of(cls, facts_within: object, target: int) -> "FactRange":
        """From `facts_within`: null, a share of the sample from its start on, or [first token, end token]."""
        if facts_within is None:
            return cls(0, target, is_all=True)
        if isinstance(facts_within, (list, tuple)):
            return cls(facts_within[0], min(facts_within[1], target))
        assert isinstance(facts_within, (int, float)), facts_within
        return cls(0, int(facts_within * target))

    def gaps(self, before: np.ndarray, fact_tokens: int) -> np.ndarray:
        """Numbers of the gaps where facts may lie. before[G]: background tokens before each gap, ascending.

        In the last gap all facts stand before the last one, in the first gap none: both must fit.
        """
        if self.is_all:
            return np.arange(len(before))
        return np.flatnonzero((before >= self.first) & (before + fact_tokens <= self.end))


def fact_gaps(draws: Sequence[float], gaps: np.ndarray) -> list[int]:
    """For every fact the number of its gap: independent draws in [0, 1), sorted, so that facts keep their order."""
    return [int(gaps[int(draw * len(gaps))]) for draw in sorted(draws)]


def interleave(facts: Sequence[str], gaps: Sequence[int], sentences: Sequence[str]) -> list[str]:
    """Facts and sentences as one list; gap g lies before sentence g, the last one after all sentences."""
    parts: list[str] = []
    done = 0
    for fact, gap in zip(facts, gaps, strict=True):
        parts += sentences[done:gap]
        parts.append(fact)
        done = gap
    return [*parts, *sentences[done:]]


STORIES_TRIED = 1000  # for one whose facts fit
WALKS_TRIED = 4  # stretches of background for one sample
PLANS_TRIED = 8  # corrections for one stretch
SPARE_SENTENCES = 20  # candidates for the sentence that is cut
TOKENS_PER_FACT = 8  # the benchmark takes no story with more than a fact (or question) for every 8 tokens


def most_facts(target: int) -> int:
    """Facts that an input of `target` tokens may have where story.max_facts is null; none below two facts' tokens."""
    return max(target // TOKENS_PER_FACT - 1, 0)


def least_size(facts: int, reserve_tokens: int) -> int:
    """The smallest size whose input may have so many facts."""
    return (facts + 1) * TOKENS_PER_FACT + reserve_tokens


@dataclass(frozen=True)
class SampleOptions:
    """What a sample depends on beside its task, size and number."""

    seed: int
    reserve_tokens: int = 300
    facts_within: Any = None
    questions: int = 5
    facts_per_question: int | None = None
    max_facts: int | None = None


class SampleMaker:
    """Samples of one task and size. Sample i is a function of the options, the task, the size and i."""

    def __init__(
        self, task: str, size: Size, options: SampleOptions, counter: TokenCounter, background: Background | None
    ) -> None:
        self.task = task
        self.size = size
        self.options = options
        self.counter = counter
        self.background = background
        self.target = size.target(options.reserve_tokens)
        self.fact_range = FactRange.of(options.facts_within, self.target)
        self.max_facts = options.max_facts
        if self.max_facts is None and self.target:
            self.max_facts = most_facts(self.target)
        self._told = lru_cache(maxsize=4)(self._tell)  # the questions of a story are neighbours

    def sample(self, number: int) -> dict[str, str]:
        """{input, question, target}: question number % questions of story number // questions, and the facts before it.

        Raises `UsageError` where no story fits or no text of exactly the size's tokens is found.
        """
        facts, question, answer = self._story(number)
        text = self._mixed(facts, number) if self.target else " ".join(facts)
        return {"input": text, "question": question, "target": answer}

    def _tell(self, story: int, attempt: int) -> Story:
        rng = self._rng("story", story, attempt)
        return tell_story(self.task, rng, self.options.questions, self.options.facts_per_question)

    def _rng(self, *key: object) -> random.Random:
        return random.Random("/".join(map(str, (self.options.seed, self.task, self.size.label, *key))))

    def _story(self, number: int) -> tuple[list[str], str, str]:
        """The facts, question and answer of a sample: of the first story told whose facts fit."""
        story_number, question_number = divmod(number, questions_of(self.task, self.options.questions))
        fewest: int | None = None
        fewest_facts: int | None = None
        for attempt in range(STORIES_TRIED):
            story = self._told(story_number, attempt)
            question = story.questions[question_number]
            facts = story.facts[: question.num_facts]
            if self.max_facts is not None and len(facts) > self.max_facts:
                fewest_facts = min(len(facts), fewest_facts or len(facts))
                continue
            if not self.target:
                return facts, question.text, question.answer
            tokens = int(self.counter.in_context(facts).sum()) + self.counter.overhead
            if tokens <= min(self.fact_range.end - self.fact_range.first, self.target):
                return facts, question.text, question.answer
            fewest = min(tokens, fewest or tokens)
        if fewest is None:
            assert fewest_facts is not None
            raise UsageError(self._no_story_is_short_enough(question_number, fewest_facts))
        raise UsageError(self._no_story_fits(question_number, fewest))

    def _no_story_is_short_enough(self, question_number: int, fewest: int) -> str:
        what = f"the facts of question {question_number + 1} of a {self.task} story"
        found = f"of which {STORIES_TRIED} stories have {fewest} or more"
        if self.options.max_facts is not None:
            return f"story.max_facts must leave room for {what}, {found}; got {self.options.max_facts}"
        reserve = self.options.reserve_tokens
        least = least_size(fewest, reserve)
        return f"sizes must leave room for {what}, {found}: {least} (reserve_tokens {reserve}); got {self.size.label}"

    def _no_story_fits(self, question_number: int, fewest: int) -> str:
        what = f"the facts of question {question_number + 1} of a {self.task} story"
        room = min(self.fact_range.end - self.fact_range.first, self.target)
        key = "sizes" if self.fact_range.is_all else "facts_within"
        return (
            f"{key} must leave room for {what}, which need {fewest} tokens or more; got {max(room, 0)} tokens"
            f" (size {self.size.label}, reserve_tokens {self.options.reserve_tokens})"
        )

    def _mixed(self, facts: list[str], number: int) -> str:
        assert self.background is not None
        rng = self._rng("background", number)
        draws = [rng.random() for _ in facts]
        has_room = False
        for _ in range(WALKS_TRIED):
            walk = self.background.walk(rng, self.target, SPARE_SENTENCES)
            for text in self._texts(walk, facts, draws):
                if text is not None:
                    return text
                has_room = True
        raise UsageError(self._no_text_found(has_room, number))

    def _texts(self, walk: np.ndarray, facts: list[str], draws: list[float]) -> Iterator[str | None]:
        """Texts from one stretch of background: None for one of another length, whose excess corrects the next.

        Yields nothing where no fact may lie.
        """
        fact_tokens = int(self.counter.in_context(facts).sum())
        opening = self.counter.overhead
        budget = self.target - opening - fact_tokens
        for _ in range(PLANS_TRIED):
            sentences, before = self._filled(walk, budget)
            gaps = self.fact_range.gaps(before + self.counter.overhead, fact_tokens)
            if not len(gaps):
                return
            parts = interleave(facts, fact_gaps(draws, gaps), sentences)
            # The first part alone tells what opening the text costs; the whole is tokenised once that is planned for.
            excess = self.counter.opening(parts[0]) - opening
            opening += excess
            if not excess:
                text = " ".join(parts)
                excess = self.counter.count(text) - self.target
                yield text if not excess else None
            budget = max(budget - excess, 0)

    def _no_text_found(self, has_room: bool, number: int) -> str:
        which = f"(task {self.task}, size {self.size.label}, sample {number})"
        if not has_room:
            within = f"[{self.fact_range.first}, {self.fact_range.end}]"
            return f"facts_within must hold the start of a background sentence; none found in tokens {within} {which}"
        return f"no text of exactly {self.target} tokens was found with this tokenizer and background {which}"

    def _filled(self, walk: np.ndarray, budget: int) -> tuple[Sequence[str], np.ndarray]:
        """Sentences of about `budget` tokens, the last one cut; before[len + 1]: tokens before each gap."""
        assert self.background is not None
        tokens = self.background.tokens[walk]
        ends = np.cumsum(tokens)
        whole = int(np.searchsorted(ends, budget, side="right"))
        sentences = [self.background.sentences[number] for number in walk[:whole]]
        before = np.concatenate([[0], ends[:whole]])
        rest = budget - int(before[-1])
        if rest and (piece := self._piece(walk[whole : whole + SPARE_SENTENCES], rest)):
            sentences.append(piece)
            before = np.append(before, budget)
        return sentences, before

    def _piece(self, candidates: np.ndarray, rest: int) -> str | None:
        """The start of the first candidate sentence that can be cut to exactly `rest` tokens."""
        assert self.background is not None
        for number in candidates:
            if self.background.tokens[number] >= rest:
                piece = cut_to(self.background.sentences[number], rest, self.counter)
                if piece is not None:
                    return piece
        return None
