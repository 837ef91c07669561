"""One sample: a story's facts inside background of an exact number of tokens.

How exactness is reached. A text's tokens are not the sum of its parts' tokens: a tokenizer may merge across a join, add
special tokens, or treat the first word of a text differently. The parts' counts, taken inside a running text, only plan
the sample: whole background sentences, and a last one that is cut to fill what is left. Then the final text is
tokenized, and the difference to the target changes the plan, until tokenizer(input) has exactly the target's number of
tokens. Where that fails, other background is tried, and in the end the run ends with an error; no text of another
length is returned. For tokenizers that split at spaces the first plan is right: a sample costs one pass over its text.
"""

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_ext.commands.babilong.stories import Story, StoryOptions, make_story
from verl_ext.text.special_tokens import as_plain_text
from verl_ext.values import UsageError, reason_of

UNITS = {"": 1, "k": 1000, "M": 1_000_000}
STORIES_TRIED = 1000  # for one whose facts fit
WALKS_TRIED = 4  # stretches of background for one sample
PLANS_TRIED = 8  # corrections for one stretch
SPARE_SENTENCES = 20  # candidates for the sentence that is cut
TOKENS_PER_FACT = 8  # the benchmark takes no story with more than a fact (or question) for every 8 tokens
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

    Raises UsageError where there is no such file, one is not UTF-8, or all together have less than `least_tokens`.
    """
    files = sorted(path for path in Path(folder).rglob("*.txt") if path.is_file())
    if not files:
        raise UsageError(f"background must be a folder with .txt files; {folder} has none")
    sentences = []
    for file in files:
        try:
            sentences += split_sentences(file.read_bytes().decode("utf-8-sig"))[1:-1]
        except UnicodeDecodeError as error:
            raise UsageError(f"background must be UTF-8 text; {file} is not at byte {error.start}") from error
        except OSError as error:
            raise UsageError(f"background must be readable; {file}: {reason_of(error)}") from error
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


def size_tokens(size: object) -> int | None:
    """The tokens that a size stands for, as published files are named (0k, 1k, 32k, 1M) or a number; else None."""
    match = re.fullmatch(r"(\d{1,12})([kM]?)", str(size)) if not isinstance(size, bool) else None
    return int(match[1]) * UNITS[match[2]] if match else None


def target_tokens(size: object, reserve_tokens: int) -> int:
    """Tokens of an `input` of this size, what is kept for question and prompt taken off; 0 for facts alone (0k)."""
    tokens = size_tokens(size)
    return tokens - reserve_tokens if tokens else 0


def most_facts(target: int) -> int:
    """Facts that an input of `target` tokens may have where story.max_facts is null; none below two facts' tokens."""
    return max(target // TOKENS_PER_FACT - 1, 0)


def least_size(facts: int, reserve_tokens: int) -> int:
    """The smallest size whose input may have so many facts."""
    return (facts + 1) * TOKENS_PER_FACT + reserve_tokens


@dataclass
class SampleMaker:
    """Samples of one task and size. Sample i is a function of the seed, the task, the size, the options and i."""

    task: str
    size: str
    counter: TokenCounter
    background: Background | None  # None for 0k alone
    seed: int
    reserve_tokens: int = 300
    facts_within: Any = None  # None: anywhere; a share of the sample from its start on; [first token, end token]
    story: StoryOptions = field(default_factory=StoryOptions)

    def __post_init__(self) -> None:
        self.target = target_tokens(self.size, self.reserve_tokens)
        self.max_facts = self.story.max_facts
        if self.max_facts is None and self.target:
            self.max_facts = most_facts(self.target)
        # the tokens [first, end) inside which every fact lies whole
        self.first, self.end = 0, self.target
        if isinstance(self.facts_within, (list, tuple)):
            self.first, self.end = self.facts_within[0], min(self.facts_within[1], self.target)
        elif self.facts_within is not None:
            self.end = int(self.facts_within * self.target)
        self._story = lru_cache(maxsize=4)(self._make_story)  # the questions of a story are neighbours

    def sample(self, number: int) -> dict[str, str]:
        """{input, question, target}: question number % questions of story number // questions, and the facts before it.

        Raises UsageError where no story fits or no text of exactly the size's tokens is found.
        """
        facts, question, answer = self.story_part(number)
        text = self._text(facts, number) if self.target else " ".join(facts)
        return {"input": text, "question": question, "target": answer}

    def story_part(self, number: int) -> tuple[list[str], str, str]:
        """The facts, question and answer of a sample: of the first story whose facts fit."""
        story_number, question_number = divmod(number, self.story.questions_of(self.task))
        room = min(self.end - self.first, self.target)
        too_many: list[int] = []  # facts, and tokens, of stories that do not fit
        too_long: list[int] = []
        for attempt in range(STORIES_TRIED):
            story = self._story(story_number, attempt)
            question = story.questions[question_number]
            facts = story.facts[: question.num_facts]
            if self.max_facts is not None and len(facts) > self.max_facts:
                too_many.append(len(facts))
                continue
            if self.target:
                tokens = int(self.counter.in_context(facts).sum()) + self.counter.overhead
                if tokens > room:
                    too_long.append(tokens)
                    continue
            return facts, question.text, question.answer
        what = f"must leave room for the facts of question {question_number + 1} of a {self.task} story"
        if too_long:
            key = "sizes" if self.facts_within is None else "facts_within"
            which = f"(size {self.size}, reserve_tokens {self.reserve_tokens})"
            raise UsageError(
                f"{key} {what}, which need {min(too_long)} tokens or more; got {max(room, 0)} tokens {which}"
            )
        what += f", of which {STORIES_TRIED} stories have {min(too_many)} or more"
        if self.story.max_facts is not None:
            raise UsageError(f"story.max_facts {what}; got {self.story.max_facts}")
        least = least_size(min(too_many), self.reserve_tokens)
        raise UsageError(f"sizes {what}: {least} (reserve_tokens {self.reserve_tokens}); got {self.size}")

    def _make_story(self, story: int, attempt: int) -> Story:
        return make_story(self.task, self._rng("story", story, attempt), self.story)

    def _rng(self, *key: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, self.task, self.size, *key))))

    def _text(self, facts: list[str], number: int) -> str:
        """The facts at random places of background, together exactly the target's tokens."""
        assert self.background is not None
        rng = self._rng("background", number)
        draws = sorted(rng.random() for _ in facts)  # sorted, so that facts keep their order
        has_room = False
        for _ in range(WALKS_TRIED):
            walk = self.background.walk(rng, self.target, SPARE_SENTENCES)
            for text in self._texts(walk, facts, draws):
                if text is not None:
                    return text
                has_room = True
        which = f"(task {self.task}, size {self.size}, sample {number})"
        if has_room:
            raise UsageError(
                f"no text of exactly {self.target} tokens was found with this tokenizer and background {which}"
            )
        raise UsageError(
            "facts_within must hold the start of a background sentence;"
            f" none found in tokens [{self.first}, {self.end}] {which}"
        )

    def _texts(self, walk: np.ndarray, facts: list[str], draws: list[float]) -> Iterator[str | None]:
        """Texts from one stretch of background: None for one of another length, whose excess corrects the next.

        Yields nothing where no fact may lie.
        """
        fact_tokens = int(self.counter.in_context(facts).sum())
        opening = self.counter.overhead
        budget = self.target - opening - fact_tokens
        for _ in range(PLANS_TRIED):
            sentences, before = self._sentences(walk, budget)
            before += self.counter.overhead
            gaps = np.arange(len(before))
            if self.facts_within is not None:
                # In the last gap all facts stand before the last one, in the first gap none: both must fit.
                gaps = np.flatnonzero((before >= self.first) & (before + fact_tokens <= self.end))
            if not len(gaps):
                return
            parts: list[str] = []
            done = 0
            for fact, draw in zip(facts, draws, strict=True):  # gap g lies before sentence g
                gap = int(gaps[int(draw * len(gaps))])
                parts += [*sentences[done:gap], fact]
                done = gap
            parts += sentences[done:]
            # What opening the text costs follows from its first part; the whole is tokenized once that is planned for.
            excess = self.counter.opening(parts[0]) - opening
            opening += excess
            if not excess:
                text = " ".join(parts)
                excess = self.counter.count(text) - self.target
                yield text if not excess else None
            budget = max(budget - excess, 0)

    def _sentences(self, walk: np.ndarray, budget: int) -> tuple[Sequence[str], np.ndarray]:
        """Sentences of about `budget` tokens, the last one cut; before[len + 1]: tokens before each gap."""
        assert self.background is not None
        ends = np.cumsum(self.background.tokens[walk])
        whole = int(np.searchsorted(ends, budget, side="right"))
        sentences = [self.background.sentences[number] for number in walk[:whole]]
        before = np.concatenate([[0], ends[:whole]])
        rest = budget - int(before[-1])
        for number in walk[whole : whole + SPARE_SENTENCES]:
            if 0 < rest <= self.background.tokens[number]:
                piece = cut_to(self.background.sentences[number], rest, self.counter)
                if piece is not None:
                    return [*sentences, piece], np.append(before, budget)
        return sentences, before


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
