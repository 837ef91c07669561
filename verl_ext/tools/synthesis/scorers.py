"""Scores of answers by a reward model, a judge or a function.

question ─┐
answer   ─┴─► scorer ─► Answer, whose `parsed` is the score; another outcome leaves the answer out
"""

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from verl_ext.cache import fingerprint
from verl_ext.custom import named_object
from verl_ext.options import DataError, Options, UsageError, first_line, must, option
from verl_ext.text.tokenizing import file_facts
from verl_ext.tools.endpoint.answer import DONE, TOO_LONG, UNPARSABLE, Answer
from verl_ext.tools.endpoint.client import Client, EndpointOptions, SamplingOptions
from verl_ext.tools.endpoint.quality import (
    DIMENSIONS,
    QUALITY_SCHEMA,
    filled_names,
    quality_prompt,
    quality_score,
    read_quality,
    read_rating,
)
from verl_ext.tools.endpoint.spending import Price, read_price
from verl_ext.tools.endpoint.store import Store
from verl_ext.tools.synthesis.lengths import asked_words
from verl_ext.tools.synthesis.prompts import PromptTexts
from verl_ext.tools.word_count import count_words, language_of, length_score

KINDS = ("reward", "writing", "judge", "given")
_SAMPLING = SamplingOptions(temperature=0.0, max_tokens=4096)  # of judges


@dataclass(frozen=True)
class ScorerEndpoint(EndpointOptions):
    """The server and the model that score."""

    prefix: ClassVar[str] = "scorer.endpoint"


@dataclass(frozen=True)
class ScorerOptions(Options):
    """How answers are scored."""

    prefix: ClassVar[str] = "scorer"

    kind: str | None = option(
        None,
        "reward: a classifier in scorer.path | writing: the mean of S_l and S_q | judge: a rating from 1 to 10 | given:"
        " the records have scored answers | module:function or FILE.py:function, (messages, answer) -> score",
    )
    path: str | None = option(None, "reward: folder of a sequence classifier with one output, for transformers")
    endpoint: ScorerEndpoint = option(ScorerEndpoint, "writing, judge: server that judges")
    context: str = option(
        "question",
        "question: the scorer sees the question without its document, as in GLM-Long | whole: the whole prompt",
        choices=("question", "whole"),
    )
    max_tokens: int = option(
        8192, "reward: tokens of question and answer; an answer beyond them is left out, never cut", least=16
    )

    @property
    def asks(self) -> bool:
        """Whether a server judges."""
        return self.kind in ("writing", "judge")

    def kind_problems(self) -> list[str]:
        """Return a line for each mistake in what the kind needs."""
        kind = str(self.kind)
        if self.kind is None or (kind not in KINDS and ":" not in kind):
            return [must("scorer.kind", f"be one of {', '.join(KINDS)}, or module:function", self.kind or "nothing")]
        if kind == "reward" and not self.path:
            return [must("scorer.path", "name a folder with scorer.kind=reward", "nothing")]
        if self.path and kind != "reward":
            return [f"scorer.path is an option of scorer.kind=reward; got {self.path} with {kind}"]
        return list(self.endpoint.endpoint_problems()) if self.asks else []


@dataclass(frozen=True)
class Pairing:
    """How many answers are asked for, how scored, and how paired."""

    answers: int
    pair: str
    min_gap: float
    min_scored: int
    keep_given: bool
    scorer: ScorerOptions


@dataclass
class Scorer:
    """A scorer of answers, inside `opened`.

    means: the sums of the parts of its scores, and their number, for the report.
    """

    options: ScorerOptions
    tries: int = 1
    means: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise UsageError for a folder or function that does not exist."""
        self._client: Client | None = None
        self._store: Store | None = None
        self._model: Any = None
        self._function: Any = None
        kind, path = str(self.options.kind), self.options.path
        if path is not None and not (Path(path) / "config.json").is_file():
            raise UsageError(must("scorer.path", "be a folder with a config.json", path))
        self._facts = file_facts([path]) if path else []
        if ":" in kind:
            try:
                self._function = named_object("scorer.kind", kind)
            except ValueError as error:
                raise UsageError(first_line(error)) from error
            if not callable(self._function):
                raise UsageError(must("scorer.kind", "name a function", kind))

    @asynccontextmanager
    async def opened(self, store: Store) -> AsyncIterator[list[tuple[Client, Price | None]]]:
        """Open the connection to the judge; give the clients whose requests count."""
        self._store = store
        if not self.options.asks:
            yield []
            return
        async with Client(self.options.endpoint, store) as self._client:
            yield [(self._client, read_price(self.options.endpoint))]

    async def score(
        self, name: str, messages: Sequence[Mapping[str, str]], answer: str, prompts: Mapping[str, PromptTexts]
    ) -> Answer:
        """Return an answer's score in `parsed`, or why there is none.

        name: of the item. messages: what the scorer sees of the prompt.
        """
        question = messages[-1]["content"] if len(messages) == 1 else "\n\n".join(each["content"] for each in messages)
        if self.options.kind == "reward":
            return self._rewarded(name, messages, answer)
        if self._function is not None:
            return Answer(DONE, parsed=self._by_function(messages, answer))
        assert self._client is not None, "it is open"
        if self.options.kind == "judge":
            content = prompts[language_of(question)].filled("judge", question=question, answer=answer)
            return await self._asked(name, content, read_rating, None)
        content = filled_names(quality_prompt(), {"$INST$": question, "$RESPONSE$": answer})
        found = await self._asked(name, content, read_quality, QUALITY_SCHEMA)
        if not found.is_done:
            return found
        parts = {"S_q": sum(quality_score(found.parsed[each]) for each in DIMENSIONS) / len(DIMENSIONS)}
        if (words := asked_words(question)) is not None:
            parts["S_l"] = length_score(words, count_words(answer))
        for part, value in parts.items():
            self.means.setdefault(part, []).append(value)
        return Answer(DONE, parsed=sum(parts.values()) / len(parts))

    async def _asked(self, name: str, content: str, parse: Any, schema: Any) -> Answer:
        assert self._client is not None, "it is open"
        message = {"role": "user", "content": content}
        return await self._client.ask(name, "score", [message], _SAMPLING, parse, self.tries, schema=schema)

    def _by_function(self, messages: Sequence[Mapping[str, str]], answer: str) -> float:
        """Return the user's score; raise DataError for anything but a finite number."""
        try:
            score = float(self._function([dict(message) for message in messages], answer))
        except Exception as error:  # the user's code can raise any exception
            got = f"{type(error).__name__}: {first_line(error)}"
            raise DataError(must(f"scorer.kind={self.options.kind}", "give a number", got)) from error
        if not math.isfinite(score):
            raise DataError(must(f"scorer.kind={self.options.kind}", "give a finite number", score))
        return score

    def _rewarded(self, name: str, messages: Sequence[Mapping[str, str]], answer: str) -> Answer:
        """Return the classifier's stored or new output for question and answer."""
        assert self._store is not None, "it is open"
        key = fingerprint([self._facts, self.options.max_tokens, name, [dict(each) for each in messages], answer])
        found = self._store.find(key)
        if found is None:
            if self._model is None:
                self._load()
            score = self._reward(messages, answer)
            if score is None:
                return Answer(TOO_LONG, reason=f"question and answer have more than {self.options.max_tokens:,} tokens")
            found = Answer(DONE, repr(score), model=str(self.options.path))
            self._store.add(key, name, "score", found)
        score = float(found.raw)
        if not math.isfinite(score):
            return Answer(UNPARSABLE, reason=f"the classifier gives {score} for an answer")
        return Answer(DONE, parsed=score)

    def _reward(self, messages: Sequence[Mapping[str, str]], answer: str) -> float | None:
        import torch

        chat = [*(dict(each) for each in messages), {"role": "assistant", "content": answer}]
        ids = self._tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
        if ids["input_ids"].shape[1] > self.options.max_tokens:
            return None
        with torch.inference_mode():
            return float(self._model(**ids.to(self._model.device)).logits[0, 0])

    def _load(self) -> None:
        """Load the classifier; raise UsageError for one that cannot score."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        path = str(self.options.path)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
            model = AutoModelForSequenceClassification.from_pretrained(path, dtype="auto")
        except (OSError, ValueError) as error:
            needed = "hold a sequence classifier that transformers loads"
            raise UsageError(must("scorer.path", needed, f"{path}: {first_line(error)}")) from error
        if model.config.num_labels != 1:
            raise UsageError(f"scorer.path must hold a classifier of one output; {path} has {model.config.num_labels}")
        if not self._tokenizer.chat_template:
            raise UsageError(f"scorer.path must hold a tokenizer with a chat template; {path} has none")
        self._model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
