"""The outcome of a question: an answer, or why there is none.

An error never becomes text. Only a finished answer has `Answer.text`; `Answer.raw` holds the model's output with any
outcome.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl_ext.text.records.reasoning import split_reasoning

# The outcomes of a question. The store keeps answers with the outcomes in KEPT, because the server may charge for them.
DONE, REFUSED, CUT, UNPARSABLE, TOO_LONG, FAILED = OUTCOMES = (
    "done",
    "refused",  # by the model or by moderation
    "cut",  # finish_reason=length
    "unparsable",  # empty, or not in the form that was asked for
    "too_long",  # for the context of the model
    "failed",  # no usable reply after all retries
)
KEPT = (DONE, REFUSED, CUT, UNPARSABLE)
# The finish reasons of a finished answer: from OpenAI and vLLM, from TGI, and from servers in front of Anthropic's API.
_FINISHED = ("stop", "eos_token", "end_turn", "stop_sequence")


class Unparsable(ValueError):
    """The reason why an answer does not have the requested form."""


@dataclass(frozen=True)
class Usage:
    """The tokens that a server counts; cached ones are prompt tokens too."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(a + b for a, b in zip(self.as_tuple(), other.as_tuple(), strict=True)))

    def as_tuple(self) -> tuple[int, int, int]:
        """Return the counts in the order of the fields."""
        return self.prompt_tokens, self.cached_tokens, self.completion_tokens


@dataclass(frozen=True)
class Answer:
    """The outcome of a question, and the model's output.

    raw: the answer without the model's reasoning. reason: why the outcome is not `done`. model, fingerprint: as the
    server reports them. parsed: the result of the `parse` of :meth:`Client.ask`.
    """

    outcome: str
    raw: str = ""
    reasoning: str = ""
    reason: str = ""
    usage: Usage = field(default_factory=Usage)
    model: str = ""
    fingerprint: str = ""
    seed: int | None = None
    parsed: Any = None

    @property
    def is_done(self) -> bool:
        """Tell whether the answer is finished, so that it has a text."""
        return self.outcome == DONE

    @property
    def is_reply(self) -> bool:
        """Tell whether the model answered, even with nothing or a refusal."""
        return self.outcome in KEPT

    @property
    def reply_text(self) -> str:
        """The text that counts: what was cut as it is, no refusal."""
        return self.raw if self.outcome in (DONE, CUT) else ""

    @property
    def text(self) -> str:
        """The text of a finished answer; answers with other outcomes have none."""
        assert self.is_done, f"only a finished answer has a text; this one is {self.outcome}"
        return self.raw


def answer_from_text(text: str, **facts: Any) -> Answer:
    """Return the answer in a model's whole text, reasoning included.

    facts: other fields of the answer; by default the outcome follows from the text.
    """
    reasoning, raw = split_reasoning(text)
    raw = raw.strip()
    outcome, reason = DONE, ""
    if not raw:
        outcome, reason = UNPARSABLE, "the answer is empty"
    elif any("\ud800" <= character <= "\udfff" for character in raw):
        outcome, reason = UNPARSABLE, "the answer has half a surrogate pair, which is not a character"
    return Answer(**{"outcome": outcome, "reason": reason, "raw": raw, "reasoning": reasoning, **facts})


def answer_from_completion(body: Any) -> Answer:
    """Return the answer in a chat completion; raise ValueError for others.

    The reasoning comes from `reasoning_content` (DeepSeek, vLLM, SGLang) or `reasoning` (OpenRouter, vLLM from 0.12),
    or from the content (:func:`split_reasoning`).
    """
    try:
        choice = body["choices"][0]
        message = choice["message"] if "message" in choice else {"content": choice["text"]}  # from /completions
        finish = choice.get("finish_reason")
        content = message.get("content") or ""
        refusal = message.get("refusal")
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        usage = _usage(body.get("usage") or {})
    except (LookupError, TypeError, AttributeError) as error:
        problem = body.get("error") if isinstance(body, Mapping) else None
        what = f", but an error: {problem}" if problem else ""
        raise ValueError(f"the reply is not a chat completion{what}") from error
    if not isinstance(content, str) or not isinstance(reasoning, str):
        raise ValueError("the reply is not a chat completion: its content must be text")
    model, fingerprint = (str(body.get(name) or "") for name in ("model", "system_fingerprint"))
    answer = answer_from_text(content, usage=usage, model=model, fingerprint=fingerprint)
    answer = replace(answer, reasoning=reasoning + answer.reasoning)
    if refusal or finish == "content_filter":
        return replace(answer, outcome=REFUSED, reason=str(refusal or "finish_reason=content_filter"))
    if finish == "length":
        why = "finish_reason=length: max_tokens or the model's context ended the answer"
        return replace(answer, outcome=CUT, reason=why)
    return answer if finish in _FINISHED else replace(answer, outcome=FAILED, reason=f"finish_reason={finish}")


def answer_from_embedding(body: Any) -> Answer:
    """Return the answer in an embedding's reply; raise ValueError for others.

    Its text is base64 of little-endian float32.
    """
    try:
        vector = np.asarray(body["data"][0]["embedding"], "<f4")
        usage = _usage(body.get("usage") or {})
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError("the reply has no embedding") from error
    if vector.ndim != 1 or not vector.size or not np.isfinite(vector).all():
        raise ValueError(f"the reply's embedding must be a list of finite numbers; its shape is {vector.shape}")
    model = str(body.get("model") or "")
    return Answer(DONE, base64.b64encode(vector.tobytes()).decode(), usage=usage, model=model)


def with_embedding(answer: Answer) -> Answer:
    """Return an answer with its embedding in `parsed`, float32[dimensions]."""
    return replace(answer, parsed=np.frombuffer(base64.b64decode(answer.text), "<f4")) if answer.is_done else answer


def _usage(body: Mapping[str, Any]) -> Usage:
    details = body.get("prompt_tokens_details") or {}
    counts = (body.get("prompt_tokens"), details.get("cached_tokens"), body.get("completion_tokens"))
    return Usage(*(count if isinstance(count, int) else 0 for count in counts))
