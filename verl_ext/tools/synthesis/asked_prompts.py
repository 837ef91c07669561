"""The prompts of records, to which several answers are asked for.

{"messages": [user, assistant]}                       the prompt, and an answer that may stand as a candidate
{"prompt": "…", "answers": [{"answer", "score"}]}     the prompt, with answers that are scored already
provenance.spans of longalign and glm_long            where its document stands, so that the rest is the question
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.options import must
from verl_ext.text.read.bad_record import BadRecord, short_text
from verl_ext.text.records.messages import TOOL_FIELDS, MessageReader
from verl_ext.text.records.tool_calls import tool_list


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer to a prompt, and its score."""

    text: str
    score: float


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt, and what its record holds beside it.

    Attributes:
        messages: the turns up to the last one of a user.
        question: the last one without the document that it is about.
        given: the record's own answer, "" for none.
        scored: its answers with their scores.
        category: that of the record, "" for none.
    """

    messages: Sequence[Mapping[str, str]]
    question: str
    given: str = ""
    scored: Sequence[ScoredAnswer] = ()
    category: str = ""

    @property
    def text(self) -> str:
        """The words of the prompt."""
        return "\n\n".join(message["content"] for message in self.messages)


def asked_prompt(record: Mapping[str, Any], text_key: str, question_key: str | None) -> AskedPrompt:
    """Read the prompt in a record's `messages` or field `text_key`.

    question_key: the field with the question alone. Raises `BadRecord`.
    """
    found = record.get("messages") or record.get(text_key)
    turns = [{"role": "user", "content": found}] if isinstance(found, str) and found.strip() else found
    if not isinstance(turns, list) or not turns:
        raise BadRecord("no_prompt", must("the record", f"have messages, or a prompt in {text_key}", short_text(found)))
    read = MessageReader().turns(turns)
    of_turns = [tools for turn in read for tools in (*turn.tools.values(), turn.message.get("tool_calls"))]
    given_tools = [tool_list(record[name], name) for name in TOOL_FIELDS if record.get(name)]
    if any((*of_turns, *given_tools)) or any(turn.message["role"] == "tool" for turn in read):
        raise BadRecord("tools", "a prompt with tools or calls is not asked, because requests hold words alone")
    messages = [{key: turn.message[key] for key in ("role", "content")} for turn in read]
    last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    if last < 0:
        raise BadRecord("no_prompt", must("the prompt", "have a user's message", "none"))
    given = messages[-1]["content"] if len(messages) == last + 2 and messages[-1]["role"] == "assistant" else ""
    question = _question(record, messages[last]["content"], question_key)
    category = record.get("category")
    return AskedPrompt(
        messages[: last + 1], question, given, _scored(record), category if isinstance(category, str) else ""
    )


def _question(record: Mapping[str, Any], content: str, question_key: str | None) -> str:
    """Return a prompt's question, without the document that it is about."""
    if question_key is not None:
        question = record.get(question_key)
        if not isinstance(question, str) or not question.strip():
            got = short_text(question)
            raise BadRecord("no_question", must(f"question_key={question_key}", "name a field with a text", got))
        return question
    provenance = record.get("provenance")
    spans = provenance.get("spans") if isinstance(provenance, Mapping) else None
    kept, at = [], 0
    for span in spans or ():
        numbers = isinstance(span, list) and len(span) == 2 and all(type(place) is int for place in span)
        if not numbers or not at <= span[0] <= span[1] <= len(content):
            needed = f"be ascending places in the {len(content):,} characters of the prompt"
            raise BadRecord("bad_spans", must("provenance.spans", needed, short_text(span)))
        kept.append(content[at : span[0]])
        at = span[1]
    question = "".join([*kept, content[at:]]).strip()
    if not question:
        raise BadRecord("no_question", "nothing of the prompt is left without provenance.spans")
    return question


def _scored(record: Mapping[str, Any]) -> list[ScoredAnswer]:
    answers, scored = record.get("answers"), []
    for each in answers if isinstance(answers, list) else ():
        text, score = (each.get("answer"), each.get("score")) if isinstance(each, Mapping) else (None, None)
        is_text = isinstance(text, str) and not isinstance(score, bool)
        if not is_text or not isinstance(score, (int, float)) or not abs(score) <= sys.float_info.max:  # nor nan
            needed = "be a list of {answer: a text, score: a finite number}"
            raise BadRecord("no_score", must("answers", needed, f"{short_text(text)} with {short_text(score)}"))
        scored.append(ScoredAnswer(str(text), float(score)))
    return scored
