"""Decide which parts of turns are learnt, and leave out reasoning.

A part whose border cannot be found is in doubt. It is learnt if every kind that it may be is learnt; otherwise the
record is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import NamedTuple

from verl_ext.text.chat.parts import (
    ANSWER,
    EMPTY_REASONING,
    END_OF_TURN,
    OPENER,
    PROMPT,
    REASONING,
    THINK_TAG,
    TOOL_CALL,
    RenderedChat,
    number_of_tags,
    tagged_blocks,
)
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.messages import REASONING_FIELDS, Chat, TurnMask

# A whole block without words, with the line ends that separate it from the answer.
EMPTY_BLOCK = re.compile("|".join(rf"{re.escape(a)}\s*{re.escape(b)}\n{{0,2}}" for b, a in OPENER.items()))


class Part(NamedTuple):
    """Characters of a rendered chat, their kind and weight, 0 for context."""

    start: int
    stop: int
    kind: str
    weight: float


@dataclass(frozen=True)
class Learnt:
    """Whether REASONING, TOOL_CALL and EMPTY_REASONING are learnt, unless a message says otherwise."""

    kinds: Mapping[str, bool]
    prompts: bool = False  # whether the text around turns is learnt too
    factors: Mapping[str, float] = field(default_factory=dict)  # by patterns of text in the assistant's turns

    def parts(self, rendered: RenderedChat, chat: Chat) -> list[Part]:
        """Return the parts of all targets. Raises `BadRecord` for doubtful ones."""
        parts: list[Part] = []
        for start, _, message, _, borders, stretches in rendered.targets:
            learnt = self._by_kind(chat.masks.get(message))
            for stop, kind, doubts in borders:
                if doubts and (unclear := [kind for kind in doubts if not learnt.get(kind, True)]):
                    what = f"it cannot be found where the {unclear[0].replace('_', ' ')} begins and ends"
                    raise BadRecord("template_mismatch", f"message {message + 1}: {what}")
                weight = chat.targets[message] if learnt.get(kind, True) else 0.0
                for end, of_stretch in stretches if kind != END_OF_TURN else ():
                    if start < min(end, stop):
                        parts.append(Part(start, min(end, stop), kind, weight * of_stretch))
                        start = min(end, stop)
                if start < stop:
                    parts.append(Part(start, stop, kind, weight))
                start = stop
        if self.factors:
            parts = self._with_factors(parts, rendered)
        return self._with_prompts(parts, len(rendered.text), chat) if self.prompts else parts

    def _with_factors(self, parts: list[Part], rendered: RenderedChat) -> list[Part]:
        """Multiply the weights of what patterns match in each turn before its end."""
        found = [
            (start + match.start(), start + match.end(), factor)
            for start, stop in rendered.spans
            for pattern, factor in self.factors.items()
            for match in re.finditer(pattern, rendered.text[start:stop])
        ]
        cuts = sorted({place for begin, end, _ in found for place in (begin, end)})
        cut_parts: list[Part] = []
        for part in parts:
            inner = [] if part.kind == END_OF_TURN else [place for place in cuts if part.start < place < part.stop]
            for start, stop in pairwise([part.start, *inner, part.stop]):
                of_place = [factor for begin, end, factor in found if begin <= start < end]
                factor = 1.0 if part.kind == END_OF_TURN else prod(of_place)
                cut_parts.append(part._replace(start=start, stop=stop, weight=part.weight * factor))
        return cut_parts

    def _with_prompts(self, parts: list[Part], length: int, chat: Chat) -> list[Part]:
        """Add the text around turns. Raises `BadRecord` if these are not learnt alike."""
        turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if chat.shared or chat.masks or chat.targets != dict.fromkeys(turns, 1.0):
            needed = "prompts must be context for answers to compare, and for a chat that says what of it is learnt"
            raise BadRecord("weighted_prompts", needed)
        borders = [0, *(place for part in parts for place in (part.start, part.stop)), length]
        around = [Part(start, stop, PROMPT, 1.0) for start, stop in zip(borders[::2], borders[1::2], strict=True)]
        return sorted([*parts, *(part for part in around if part.start < part.stop)])

    def _by_kind(self, mask: TurnMask | None) -> Mapping[str, bool]:
        """Return whether each kind is learnt in a turn; unlisted ones are."""
        if mask is None:
            return self.kinds
        learnt = dict(self.kinds)
        if mask.tool_calls is not None:
            learnt[TOOL_CALL] = mask.tool_calls
        if mask.reasoning is not None:
            learnt[REASONING] = mask.reasoning
            learnt[EMPTY_REASONING] &= mask.reasoning
        return learnt

    def without_reasoning(self, chat: Chat, is_prompt_open: bool) -> tuple[Chat, int]:
        """Return a chat without reasoning, and how many target turns had some.

        A turn that is to learn its reasoning keeps it. is_prompt_open: the generation prompt opens reasoning. Raises
        `BadRecord` if the end of reasoning cannot be found.
        """
        messages, dropped = list(chat.messages), 0
        for index, message in enumerate(messages):
            mask = chat.masks.get(index)
            if message["role"] != "assistant" or (mask is not None and mask.reasoning):
                continue
            kept = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
            had_words = any(str(message[name] or "").strip() for name in message.keys() - kept.keys())
            text = kept.get("content") or ""
            if THINK_TAG.search(text):
                borders = tagged_blocks(text, 0, len(text), is_prompt_open)
                if any(REASONING in border.doubts for border in borders) or (mask is not None and mask.stretches):
                    needed = "must have reasoning between tags, and no weights of characters, for reasoning=drop"
                    raise BadRecord("template_mismatch", f"message {index + 1} {needed}")
                had_words |= any(border.kind == REASONING for border in borders)
                spans = zip([0, *(border.stop for border in borders)], borders, strict=False)
                kept["content"] = "".join(
                    text[start:stop] for start, (stop, kind, _) in spans if kind not in (REASONING, EMPTY_REASONING)
                )
            messages[index] = kept
            dropped += had_words and index in chat.targets
        return replace(chat, messages=messages), dropped


def without_empty_blocks(chat: Chat) -> Chat:
    """Remove empty thinking blocks. Raises `BadRecord` if their characters have weights."""
    messages = list(chat.messages)
    for index, message in enumerate(messages):
        text = message.get("content")
        if message["role"] != "assistant" or not isinstance(text, str) or not EMPTY_BLOCK.search(text):
            continue
        if (mask := chat.masks.get(index)) is not None and mask.stretches:
            needed = "must have no weights of characters beside an empty thinking block, for drop_empty_reasoning"
            raise BadRecord("template_mismatch", f"message {index + 1} {needed}")
        messages[index] = {**message, "content": EMPTY_BLOCK.sub("", text)}
    return replace(chat, messages=messages)


def closes_again(text: str, part: Part) -> bool:
    """Tell whether a part's first tag closes reasoning that is closed already."""
    is_answer = part.kind in (ANSWER, EMPTY_REASONING) and number_of_tags(text[part.start : part.stop]) > 0
    if not is_answer or not (tag := THINK_TAG.search(text, part.start, part.stop)):
        return False
    return tag[0] in OPENER and text[max(part.start - 64, 0) : part.start].rstrip().endswith(tag[0])
