r"""Split an assistant's turn into its parts and decide which are learnt.

target    <think>\nadd them\n</think>\n\nIt is 4.\n<tool_call>\n{"name": "f"}\n</tool_call><|im_end|>
parts     reasoning                     answer    tool_call                             end_of_turn

The words of `reasoning_content` and `tool_calls` are found by their marks (marks.py). Template text between them
and the answer belongs to them, such as a <think> or the head of a call. Reasoning and calls that a record writes into
its content are found by their TAGS, as is the empty thinking block that a template writes itself.

A part whose border cannot be found is in doubt. It is learnt if every kind that it may be is learnt; otherwise the
record is refused.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import NamedTuple

from verl_ext.endpoint.reasoning import REASONING_TAGS
from verl_ext.text.chat.marks import MarkedPlace
from verl_ext.text.chat.template import Span, any_of
from verl_ext.text.records.bad_record import BadRecord
from verl_ext.text.records.messages import REASONING_FIELDS, Chat, Stretch, TurnMask

ANSWER, REASONING, TOOL_CALL, END_OF_TURN = KINDS = ("answer", "reasoning", "tool_call", "end_of_turn")
EMPTY_REASONING = "empty_reasoning"  # a block without words; a kind of reasoning
# The tags that open and close reasoning or a call inside a text.
TAGS = {**dict.fromkeys(REASONING_TAGS, REASONING), ("<tool_call>", "</tool_call>"): TOOL_CALL}
_TAGS = tuple(tag for pair in TAGS for tag in pair)
_WORDS_OF_TAGS = ("think", "THINK", "channel", "tool_call")  # searched first, because most texts have none
assert all(any(word in tag for word in _WORDS_OF_TAGS) for tag in _TAGS)
_KIND_OF_TAG = {tag: kind for pair, kind in TAGS.items() for tag in pair}
_OPENER = {closer: opener for (opener, closer), kind in TAGS.items() if kind == REASONING}
_TAG = any_of(_TAGS)
_CLOSER = re.compile(rf"(?:{any_of(_OPENER).pattern})\s*")
_THINK_TAG = any_of([*_OPENER.values(), *_OPENER])
_BLOCK = re.compile("|".join(rf"{re.escape(a)}(?:.*?){re.escape(b)}\s*" for a, b in TAGS), re.DOTALL)
_EMPTY = re.compile("|".join(rf"\s*(?:{re.escape(a)})?\s*{re.escape(b)}\s*" for b, a in _OPENER.items()))
# A whole block without words, with the line ends that separate it from the answer.
EMPTY_BLOCK = re.compile("|".join(rf"{re.escape(a)}\s*{re.escape(b)}\n{{0,2}}" for b, a in _OPENER.items()))


class Border(NamedTuple):
    """The end and kind of a part of a target, and in `doubts` the kinds of which it may hold text."""

    stop: int
    kind: str
    doubts: tuple[str, ...] = ()


class Part(NamedTuple):
    """Characters start..stop of a rendered chat, their kind, and the weight of their tokens, 0 for context."""

    start: int
    stop: int
    kind: str
    weight: float


@dataclass
class Target:
    """Characters start..stop of a rendered chat, in the assistant's turn `message`, and the weight of their tokens.

    closed_by: the text that ends the turn, "" if none does; None if the turn continues in another target. borders: its
    parts, as far as marks show them. stretches: the weights that the record gives to its characters.
    """

    start: int
    stop: int
    message: int
    closed_by: str | None
    weight: float = 1.0
    borders: list[Border] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)


@dataclass
class RenderedChat:
    """A chat's text, its targets in order, and the kinds of words that the template leaves out."""

    text: str
    targets: list[Target]
    unprinted: list[str] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        """The characters of each target."""
        return [(target.start, target.stop) for target in self.targets]


def add_borders(rendered: RenderedChat, chat: Chat, places: Sequence[MarkedPlace], special: re.Pattern[str]) -> None:
    """Set the part borders of every target by the places of its words; `special` matches special tokens.

    Raises `BadRecord` if characters with weights of their own cannot be found in the text.
    """
    marked_calls = {place.words.message for place in places if place.words.kind == "tool_calls"}
    at = 0
    for target in rendered.targets:
        own = []
        while at < len(places) and places[at].first < target.stop:
            if places[at].last >= target.start and places[at].words.message == target.message:
                own.append(places[at])
            at += 1
        target.borders = _borders(rendered.text, target, own, special)
        if chat.messages[target.message].get("tool_calls") and target.message not in marked_calls:
            # The template prints calls of which no word could be marked.
            last = max((i for i, border in enumerate(target.borders) if border.kind != END_OF_TURN), default=None)
            if last is not None:
                target.borders[last] = target.borders[last]._replace(doubts=(TOOL_CALL,))
        mask = chat.masks.get(target.message)
        if mask is not None and mask.stretches:
            target.stretches = list(_stretches(rendered.text, target, own, mask))


def _kind(place: MarkedPlace) -> str:
    return {"tool_calls": TOOL_CALL, "reasoning_content": REASONING}.get(place.words.kind, ANSWER)


def _borders(text: str, target: Target, places: Sequence[MarkedPlace], special: re.Pattern[str]) -> list[Border]:
    end = target.stop
    if target.closed_by and text.endswith(target.closed_by, target.start, target.stop):
        end -= len(target.closed_by)
    runs = [(kind, list(run)) for kind, run in groupby(places, key=_kind)] or [(ANSWER, [])]
    borders: list[Border] = []
    doubts: tuple[str, ...] = ()
    for (kind, run), (after, next_run) in pairwise(runs):
        last = _end(text, run[-1])
        if kind == ANSWER:
            border: int | None = last
        elif after == ANSWER:
            border = _begin(text, next_run[0], last)
        else:
            border = _between(text, kind, last, next_run[0].first, special)
        borders.append(Border(last if border is None else border, kind, doubts))
        doubts = (kind, after) if border is None else ()
    borders += [Border(end, runs[-1][0], doubts), Border(target.stop, END_OF_TURN)]
    starts = [target.start, *(border.stop for border in borders)]
    return [border for start, border in zip(starts, borders, strict=False) if start < border.stop]


def _end(text: str, place: MarkedPlace) -> int:
    """Return the end of words whose last known character is at `place`."""
    return place.last + (0 if place.reaches_end else place.rest_in(text))


def _begin(text: str, place: MarkedPlace, least: int) -> int | None:
    """Return the start of words; None if it is unknown because the template changes them."""
    if place.reaches_end and least <= place.first < place.last:
        return place.first
    core, end = place.words.text.strip(), _end(text, place)
    begin = end - len(core)
    return begin if begin >= least and text.startswith(core, begin) else None


def _between(text: str, kind: str, begin: int, end: int, special: re.Pattern[str]) -> int | None:
    """Return the border between reasoning and a tool call, in either order, in the text between their words."""
    if kind == TOOL_CALL:
        opener = _THINK_TAG.search(text, begin, end)
        return opener.start() if opener else None
    if closers := list(_CLOSER.finditer(text, begin, end)):
        return closers[-1].end()
    token = special.search(text, begin, end)
    return token.end() if token else None


def _stretches(text: str, target: Target, places: Sequence[MarkedPlace], mask: TurnMask) -> Iterator[Stretch]:
    """Yield the weights of a target's characters; template text has the weight of the words next to it."""
    for border in target.borders:
        inside = [place for place in places if place.last <= border.stop and _kind(place) == border.kind]
        places = [place for place in places if place not in inside]
        if not inside:
            continue
        place = inside[-1]
        name = "content" if _kind(place) == ANSWER else next(filter(mask.stretches.get, REASONING_FIELDS), "")
        given = mask.stretches.get(name) if _kind(place) != TOOL_CALL else None
        if given is None:
            yield border.stop, 1.0
            continue
        words, end = place.words.text.rstrip(), _end(text, place)
        lead = len(place.words.text) - len(place.words.text.lstrip())
        kept = [(min(stop, len(words)), weight) for stop, weight in given if stop > lead]
        before, weight_before = lead, None
        for stop, weight in kept:
            if stop <= before:
                continue
            if weight_before is not None and weight != weight_before:
                at = end - len(words) + before
                if at < target.start or not text.startswith(words[before:], at):
                    raise BadRecord(
                        "template_mismatch",
                        f"message {target.message + 1}: the chat template changes {name}, of which parts have weights",
                    )
                yield at, weight_before
            before, weight_before = stop, weight
        yield border.stop, 1.0 if weight_before is None else weight_before


def tagged_blocks(text: str, start: int, stop: int, is_opened: bool) -> tuple[list[Border], list[Span]]:
    """Find reasoning and tool calls in characters start..stop of a text by their tags.

    is_opened: the text before `start` has opened reasoning.

    Returns:
        The borders of the parts in order, with doubts for unpaired tags; and the spans of reasoning without words.
    """
    borders: list[Border] = []
    empty: list[Span] = []
    at = start

    def add(end: int, kind: str) -> None:
        nonlocal at
        if end > at:
            found = {_KIND_OF_TAG[tag[0]] for tag in _TAG.finditer(text, at, end)} if kind == ANSWER else ()
            borders.append(Border(end, kind, tuple(sorted(found))))
            at = end

    # Reasoning that the prompt has opened ends at a closing tag without an opening one.
    first = _TAG.search(text, start, stop)
    if match := _EMPTY.match(text, start, stop):
        empty.append((start, match.end()))
        add(match.end(), REASONING)
    elif first and first[0] in _OPENER and is_opened:
        closer = _CLOSER.match(text, first.start(), stop)
        assert closer is not None
        add(closer.end(), REASONING)
    for block in _BLOCK.finditer(text, at, stop):
        if text[at : block.start()].strip():
            add(block.start(), ANSWER)
        tag = _TAG.match(text, block.start())
        assert tag is not None
        if _EMPTY.fullmatch(block[0]):
            empty.append((at, block.end()))
        add(block.end(), _KIND_OF_TAG[tag[0]])
    add(stop, ANSWER)
    return borders, empty


def is_opened(before: str) -> bool:
    """Return whether the text before a turn ends with a tag that opens reasoning."""
    return before.rstrip().endswith(tuple(_OPENER.values()))


def closes_again(text: str, part: Part) -> bool:
    """Tell whether a part's first tag closes reasoning that the text before it has closed."""
    if part.kind not in (ANSWER, EMPTY_REASONING) or not (tag := _THINK_TAG.search(text, part.start, part.stop)):
        return False
    return tag[0] in _OPENER and text[max(part.start - 64, 0) : part.start].rstrip().endswith(tag[0])


@dataclass(frozen=True)
class Learnt:
    """The kinds of parts that are learnt, unless a message says otherwise."""

    reasoning: bool = True
    tool_calls: bool = True
    empty_reasoning: bool = False

    def parts(self, rendered: RenderedChat, chat: Chat) -> list[Part]:
        """Return the parts of all targets, in order. Raises `BadRecord` if one may be of a kind that is not learnt."""
        text = rendered.text
        has_tags = any(word in text for word in _WORDS_OF_TAGS) and any(tag in text for tag in _TAGS)
        parts: list[Part] = []
        for target in rendered.targets:
            mask = chat.masks.get(target.message)
            learnt = self._by_kind(mask)
            borders, empty = _with_tags(rendered.text, target) if has_tags else (target.borders, [])
            start = target.start
            for stop, kind, doubts in borders:
                if doubts and (unclear := [kind for kind in doubts if not learnt.get(kind, True)]):
                    what = unclear[0].replace("_", " ")
                    raise BadRecord(
                        "template_mismatch",
                        f"message {target.message + 1}: it cannot be found where the {what} begins and ends",
                    )
                kind = EMPTY_REASONING if empty and (start, stop) in empty else kind
                weight = target.weight if learnt.get(kind, True) else 0.0
                for end, of_stretch in target.stretches if kind != END_OF_TURN else ():
                    if start < min(end, stop):
                        parts.append(Part(start, min(end, stop), kind, weight * of_stretch))
                        start = min(end, stop)
                if start < stop:
                    parts.append(Part(start, stop, kind, weight))
                start = stop
        return parts

    def _by_kind(self, mask: TurnMask | None) -> dict[str, bool]:
        """Return whether each kind of part is learnt in a turn; kinds that are not listed always are."""
        learnt = {REASONING: self.reasoning, TOOL_CALL: self.tool_calls, EMPTY_REASONING: self.empty_reasoning}
        if mask is not None and mask.tool_calls is not None:
            learnt[TOOL_CALL] = mask.tool_calls
        if mask is not None and mask.reasoning is not None:
            learnt[REASONING] = mask.reasoning
            learnt[EMPTY_REASONING] &= mask.reasoning
        return learnt

    def without_reasoning(self, chat: Chat, is_prompt_open: bool) -> tuple[Chat, int]:
        """Return a chat without reasoning, and the number of target turns that had some.

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
            if _THINK_TAG.search(text):
                borders, empty = tagged_blocks(text, 0, len(text), is_prompt_open)
                if any(REASONING in border.doubts for border in borders) or (mask is not None and mask.stretches):
                    needed = "must have reasoning between tags, and no weights of characters, for reasoning=drop"
                    raise BadRecord("template_mismatch", f"message {index + 1} {needed}")
                spans = list(zip([0, *(border.stop for border in borders)], borders, strict=False))
                had_words |= any(
                    border.kind == REASONING and (start, border.stop) not in empty for start, border in spans
                )
                kept["content"] = "".join(
                    text[start : border.stop] for start, border in spans if border.kind != REASONING
                )
            messages[index] = kept
            dropped += had_words and index in chat.targets
        return replace(chat, messages=messages), dropped


def without_empty_blocks(chat: Chat) -> Chat:
    """Remove empty thinking blocks from assistant messages. Raises `BadRecord` if their characters have weights."""
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


def _with_tags(text: str, target: Target) -> tuple[list[Border], list[Span]]:
    """Return a target's borders, with those of the tags in its answer, and the spans of reasoning without words."""
    borders: list[Border] = []
    empty: list[Span] = []
    start = target.start
    opened = is_opened(text[max(start - 64, 0) : start])
    for border in target.borders:
        if border.kind == ANSWER:
            found, blank = tagged_blocks(text, start, border.stop, opened and start == target.start)
            borders += [inner._replace(doubts=(*inner.doubts, *border.doubts)) for inner in found]
            empty += blank
        else:
            if border.kind == TOOL_CALL and start == target.start and (block := _EMPTY.match(text, start, border.stop)):
                empty.append((start, block.end()))
                borders.append(Border(block.end(), REASONING))
            borders.append(border)
        start = border.stop
    return borders, empty
