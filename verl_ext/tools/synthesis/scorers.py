"""Scores of answers by a reward model, a judge or a function.

question ─┐
answer   ─┴─► scorer ─► Answer, whose `parsed` is the score; another outcome leaves the answer out
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from verl_ext.cache import fingerprint
from verl_ext.custom import named_object
from verl_ext.options import DataError, Options, UsageError, first_line, must, option
from verl_ext.text.tokenizing import file_facts
from verl_ext.tools.endpoint.answer import DONE, TOO_LONG, UNPARSABLE, Answer
from verl_ext.tools.endpoint.client import EndpointOptions, SamplingOptions
from verl_ext.tools.endpoint.local_model import load_model
from verl_ext.tools.endpoint.quality import (
    DIMENSIONS,
    QUALITY_SCHEMA,
    filled_names,
    quality_prompt,
    quality_score,
    read_quality,
    read_rating,
)
from verl_ext.tools.synthesis.lengths import asked_words
from verl_ext.tools.synthesis.task import SynthesisTask
from verl_ext.tools.word_count import count_words, language_of, length_score

_SAMPLING = SamplingOptions(temperature=0.0, max_tokens=4096)  # of judges
Messages = Sequence[Mapping[str, str]]


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
    def servers(self) -> list[EndpointOptions]:
        """The server that judges, if one does."""
        return [self.endpoint] if self.kind in ("writing", "judge") else []

    def kind_problems(self) -> list[str]:
        """Return a line for each mistake in what the kind needs."""
        kind = str(self.kind)
        if self.kind is None or (kind not in KINDS and ":" not in kind):
            return [must("scorer.kind", f"be one of {', '.join(KINDS)}, or module:function", self.kind or "nothing")]
        if kind == "reward" and not self.path:
            return [must("scorer.path", "name a folder with scorer.kind=reward", "nothing")]
        if self.path and kind != "reward":
            return [f"scorer.path is an option of scorer.kind=reward; got {self.path} with {kind}"]
        return [problem for server in self.servers for problem in server.endpoint_problems()]


class Scorer:
    """A scorer of answers, which a run of a task uses.

    means: the parts of its scores by name, for the report.
    """

    def __init__(self, options: ScorerOptions, task: SynthesisTask) -> None:
        self.options, self.task = options, task
        self.means: dict[str, list[float]] = {}

    async def score(self, name: str, messages: Messages, answer: str) -> Answer:
        """Return an answer's score in `parsed`, or why there is none.

        name: of the item. messages: what the scorer sees of the prompt.
        """
        raise NotImplementedError

    async def _asked(self, name: str, content: str, parse: Any, schema: Any = None) -> Answer:
        client, message = self.task.clients[self.options.endpoint.prefix], {"role": "user", "content": content}
        tries = self.task.options.parse_tries
        return await client.ask(name, "score", [message], _SAMPLING, parse, tries, schema=schema)


class Judge(Scorer):
    """A model that rates an answer from 1 to 10."""

    async def score(self, name: str, messages: Messages, answer: str) -> Answer:
        """Return the rating, by the prompt in the question's language."""
        question = _text(messages)
        prompts = self.task.prompts[language_of(question)]
        return await self._asked(name, prompts.filled("judge", question=question, answer=answer), read_rating)


class WritingJudge(Scorer):
    """The mean of a text's quality S_q, which a model judges, and of S_l if a length is asked for."""

    async def score(self, name: str, messages: Messages, answer: str) -> Answer:
        """Return the mean of the parts."""
        question = _text(messages)
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


class OwnFunction(Scorer):
    """A function of the user's; UsageError if it does not exist."""

    def __init__(self, options: ScorerOptions, task: SynthesisTask) -> None:
        super().__init__(options, task)
        kind = str(options.kind)
        try:
            self._function = named_object("scorer.kind", kind)
        except ValueError as error:
            raise UsageError(first_line(error)) from error
        if not callable(self._function):
            raise UsageError(must("scorer.kind", "name a function", kind))

    async def score(self, name: str, messages: Messages, answer: str) -> Answer:
        """Return the function's score; raise DataError for anything but a finite number."""
        try:
            score = float(self._function([dict(message) for message in messages], answer))
        except Exception as error:  # the user's code can raise any exception
            got = f"{type(error).__name__}: {first_line(error)}"
            raise DataError(must(f"scorer.kind={self.options.kind}", "give a number", got)) from error
        if not math.isfinite(score):
            raise DataError(must(f"scorer.kind={self.options.kind}", "give a finite number", score))
        return Answer(DONE, parsed=score)


class RewardModel(Scorer):
    """A sequence classifier in a folder, with stored scores; UsageError if there is none."""

    def __init__(self, options: ScorerOptions, task: SynthesisTask) -> None:
        super().__init__(options, task)
        self._path = str(options.path)
        if not (Path(self._path) / "config.json").is_file():
            raise UsageError(must("scorer.path", "be a folder with a config.json", self._path))
        self._facts = file_facts([self._path])
        self._loaded: tuple[Any, Any] | None = None  # tokenizer and classifier

    async def score(self, name: str, messages: Messages, answer: str) -> Answer:
        """Return the classifier's stored or new output for question and answer."""
        most, store = self.options.max_tokens, self.task.store
        key = fingerprint([self._facts, most, name, [dict(each) for each in messages], answer])
        found = store.find(key)
        if found is None:
            score = self._reward(messages, answer)
            if score is None:
                return Answer(TOO_LONG, reason=f"question and answer have more than {most:,} tokens")
            found = Answer(DONE, repr(score), model=self._path)
            store.add(key, name, "score", found)
        score = float(found.raw)
        if not math.isfinite(score):
            return Answer(UNPARSABLE, reason=f"the classifier gives {score} for an answer")
        return Answer(DONE, parsed=score)

    def _reward(self, messages: Messages, answer: str) -> float | None:
        import torch

        if self._loaded is None:
            self._loaded = self._load()
        tokenizer, model = self._loaded
        chat = [*(dict(each) for each in messages), {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
        if ids["input_ids"].shape[1] > self.options.max_tokens:
            return None
        with torch.inference_mode():
            return float(model(**ids.to(model.device)).logits[0, 0])

    def _load(self) -> tuple[Any, Any]:
        """Load the classifier; raise UsageError for one that cannot score."""
        path, kind = self._path, "AutoModelForSequenceClassification"
        tokenizer, model = load_model(kind, path, "scorer.path", "a sequence classifier", path)
        if model.config.num_labels != 1:
            raise UsageError(f"scorer.path must hold a classifier of one output; {path} has {model.config.num_labels}")
        if not tokenizer.chat_template:
            raise UsageError(f"scorer.path must hold a tokenizer with a chat template; {path} has none")
        return tokenizer, model


SCORERS: dict[str, type[Scorer]] = {"reward": RewardModel, "writing": WritingJudge, "judge": Judge}
KINDS = (*SCORERS, "given")  # given: the records have scores, and nothing is asked


def scorer_of(options: ScorerOptions, task: SynthesisTask) -> Scorer:
    """Return the scorer of a kind; raise UsageError for a folder or a function that does not exist."""
    return SCORERS.get(str(options.kind), OwnFunction)(options, task)


def _text(messages: Messages) -> str:
    return messages[-1]["content"] if len(messages) == 1 else "\n\n".join(each["content"] for each in messages)
