"""The result of a task for an item: a record for `verl-ext tokenize`, or the reason why there is none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from verl_ext.endpoint.answer import DONE, Answer, Usage
from verl_ext.endpoint.client import SamplingOptions
from verl_ext.synthesis.items import Item
from verl_ext.synthesis.overlap import Passages
from verl_ext.synthesis.prompts import Prompts
from verl_ext.synthesis.token_lengths import TokenLengths


@dataclass(frozen=True)
class Making:
    """The settings that all items of a run share."""

    seed: int
    sampling: SamplingOptions
    parse_tries: int
    passages: Passages
    min_length_score: float = 80.0
    max_paragraphs: int = 50
    lengths: Sequence[int] = ()
    window: int = 0
    lengths_of: TokenLengths | None = None  # of documents


@dataclass(frozen=True)
class Made:
    """A record, or the outcome without one: that of an answer, or the name of a filter."""

    outcome: str
    record: dict[str, Any] | None = None
    reason: str = ""

    @classmethod
    def from_answer(cls, stage: str, answer: Answer) -> "Made":
        """Return a result without a record, because a question has no answer."""
        return cls(answer.outcome, reason=f"{stage}: {answer.reason}")


def question_and_answer(
    item: Item,
    category: str,
    question: str,
    answer: str,
    prompts: Prompts,
    answers: Sequence[Answer],
    facts: Mapping[str, Any],
) -> Made:
    """Return the record of a user turn and an assistant turn, with their provenance."""
    usage = reduce(add, (each.usage for each in answers), Usage())
    provenance = {
        "item": item.name,
        "source": item.source,
        **({"document_tokens": item.tokens} if item.tokens else {}),
        **facts,
        "prompts": prompts.version,
        "models": sorted({each.model for each in answers}),
        "seeds": [each.seed for each in answers],
        "usage": dict(zip(("prompt_tokens", "cached_tokens", "completion_tokens"), usage.as_tuple(), strict=True)),
    }
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Made(DONE, {"messages": messages, "category": category, "provenance": provenance})
