"""A task's result for an item: a record, or a reason."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

from verl_ext.options import one_line
from verl_ext.tools.endpoint.answer import DONE, REFUSED, Answer, Usage
from verl_ext.tools.endpoint.client import SamplingOptions
from verl_ext.tools.synthesis.items import SourceItem
from verl_ext.tools.synthesis.overlap import Passages
from verl_ext.tools.synthesis.prompts import PromptTexts
from verl_ext.tools.synthesis.token_lengths import TokenLengths

_LONGEST_REFUSAL = 600  # characters; a longer text is an answer, whatever it begins with
_SORRY = r"(?:i['’]m|i am) (?:so |very |really )?(?:sorry|afraid)|(?:my )?apologies|sorry|i apologi[sz]e|unfortunately"
_MODEL = r"as an ai(?: language)?(?: model| assistant)?"
_CANNOT = (
    r"i (?:\w+ly )?(?:can(?:no|['’])?t|can not|will not|won['’]t|(?:must|have to) decline to)"
    r"|i(?:['’]m| am) (?:\w+ly )?(?:unable|not able|not allowed) to"
)
_ASKED = (
    "assist|help|comply|fulfill?|provide|support|engage|continue|do (?:this|that)|write|create|generate|discuss|produce"
    "|accommodate|participate|answer (?:this|that|the) (?:request|question)"
)
_CHINESE = (
    r"(?:(?:很|非常|十分)?(?:抱歉|遗憾)|对不起|作为(?:一个|一名)?(?:AI|人工智能)[^，。,]{0,12})?[，,、。\s]*(?:但是?)?我?(?:目前)?"
    r"(?:不能|无法|不可以|没法)(?:协助|帮助|帮您|帮你|为您|为你|提供|满足|回答|处理|完成|继续|生成|撰写|写|讨论)"
)
_REFUSAL = re.compile(
    rf"^\W*(?:(?:(?:{_SORRY}|{_MODEL})\W+(?:but )?(?:that )?)*(?:{_CANNOT}) (?:\w+ly )?(?:{_ASKED})\b|{_CHINESE})",
    re.IGNORECASE,
)


def refused_in_words(answer: Answer, text: str | None = None) -> Answer:
    """Mark a finished answer as refused if its words refuse.

    text: the part of the answer that is read; None: all of it.
    """
    if not answer.is_done:
        return answer
    said = answer.text if text is None else text
    if len(said) > _LONGEST_REFUSAL or not _REFUSAL.match(said):
        return answer
    return replace(answer, outcome=REFUSED, reason=f"the answer is a refusal: {one_line(said[:80])}")


def json_in(text: str) -> Any:
    """Return the JSON of a text or code block, or None."""
    block = re.fullmatch(r"(?:.*?```(?:json)?\s*\n)?\s*([\[{].*[\]}])\s*(?:```.*)?", text.strip(), re.DOTALL)
    try:
        return json.loads(block[1], strict=False) if block else None
    except ValueError:
        return None


@dataclass(frozen=True)
class Settings:
    """The settings that all items of a run share."""

    seed: int
    sampling: SamplingOptions
    parse_tries: int
    passages: Passages
    min_length_score: float = 80.0
    max_paragraphs: int = 50
    lengths: Sequence[int] = ()
    window: int = 0
    questions: int = 1
    lengths_of: TokenLengths | None = None  # of documents
    way_weights: Mapping[str, float] = field(default_factory=dict)  # of glm_long, with their weights
    grounded: bool = False


@dataclass(frozen=True)
class Result:
    """Records, or the outcome of an answer or filter.

    lost: the outcomes of those of an item's questions that have no record.
    """

    outcome: str
    records: Sequence[dict[str, Any]] = ()
    reason: str = ""
    lost: Sequence[str] = ()

    @classmethod
    def from_answer(cls, stage: str, answer: Answer) -> "Result":
        """Return a result without a record, because a question has no answer."""
        return cls(answer.outcome, reason=f"{stage}: {answer.reason}")

    @classmethod
    def joined(cls, results: Sequence["Result"]) -> "Result":
        """Return the records of several results, or the first result if none has a record."""
        records = [record for result in results for record in result.records]
        lost = [result.outcome for result in results if not result.records]
        return cls(DONE, records, lost=lost) if records else replace(results[0], lost=lost)


def question_and_answer(
    item: SourceItem,
    category: str,
    question: str,
    answer: str,
    prompts: PromptTexts,
    answers: Sequence[Answer],
    facts: Mapping[str, Any],
) -> Result:
    """Return the record of a question and its answer, with provenance."""
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
    return Result(DONE, [{"messages": messages, "category": category, "provenance": provenance}])
