r"""Split an assistant's turn into its parts.

target    <think>\nadd them\n</think>\n\nIt is 4.\n<tool_call>\n{"name": "f"}\n</tool_call><|im_end|>
parts     reasoning                     answer    tool_call                             end_of_turn

The words of `reasoning_content` and `tool_calls` are found by their marks (marks.py). Template text between them
and the answer belongs to them, such as a <think> or the head of a call. Reasoning and calls that a record writes into
its content are found by their TAGS, as is the empty thinking block that a template writes itself.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from verl_ext.text.chat.marks import Place, WordKind
from verl_ext.text.chat.template import ChatTemplate, Span, any_of
from verl_ext.text.chat.unprinted import labels_of_unprinted_thoughts
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.messages import Chat, Stretch, TurnMask
from verl_ext.text.records.reasoning import REASONING_TAGS

ANSWER, REASONING, TOOL_CALL, END_OF_TURN = KINDS = ("answer", "reasoning", "tool_call", "end_of_turn")
EMPTY_REASONING = "empty_reasoning"  # a block without words; a kind of reasoning
PROMPT = "prompt"  # what stands around the assistant's turns
# The tags that open and close reasoning or a call inside a text.
TAGS = {**dict.fromkeys(REASONING_TAGS, REASONING), ("<tool_call>", "</tool_call>"): TOOL_CALL}
_TAGS = tuple(tag for pair in TAGS for tag in pair)
_WORDS_OF_TAGS = ("think", "THINK", "channel", "tool_call")  # searched first, because most texts have none
assert all(any(word in tag for word in _WORDS_OF_TAGS) for tag in _TAGS)
_KIND_OF_TAG = {tag: kind for pair, kind in TAGS.items() for tag in pair}
OPENER = {closer: opener for (opener, closer), kind in TAGS.items() if kind == REASONING}  # of reasoning
_TAG = any_of(_TAGS)
_CLOSER = re.compile(rf"(?:{any_of(OPENER).pattern})\s*")
THINK_TAG = any_of([*OPENER.values(), *OPENER])
_BLOCK = re.compile("|".join(rf"{re.escape(a)}(?:.*?){re.escape(b)}\s*" for a, b in TAGS), re.DOTALL)
_EMPTY = re.compile("|".join(rf"\s*(?:{re.escape(a)})?\s*{re.escape(b)}\s*" for b, a in OPENER.items()))


class Border(NamedTuple):
    """One part of a target, by its end.

    kind: what the part is. doubts: other kinds that it could be, of which it may hold text.
    """

    stop: int
    kind: str
    doubts: tuple[str, ...] = ()


class Target(NamedTuple):
    """Characters start..stop of a rendered chat, in the assistant's turn `message`.

    closed_by: the text that ends the turn, "" if none does; None if the turn continues in another target. borders: its
    parts. stretches: the weights that the record gives to its characters.
    """

    start: int
    stop: int
    message: int
    closed_by: str | None
    borders: tuple[Border, ...] = ()
    stretches: tuple[Stretch, ...] = ()


class RenderedChat(NamedTuple):
    """A chat's text, targets in order, and kinds of unprinted words.

    appended: the end of the text that ends the last turn in place of the template.
    """

    text: str
    targets: tuple[Target, ...] = ()
    unprinted: tuple[str, ...] = ()
    appended: str = ""

    @property
    def spans(self) -> list[Span]:
        """The characters of each target."""
        return [(target.start, target.stop) for target in self.targets]


def with_parts(
    rendered: RenderedChat,
    chat: Chat,
    places: Sequence[Place],
    template: ChatTemplate,
    unfound_calls: Collection[int] = (),
) -> RenderedChat:
    """Complete a chat whose targets are known, with all that is read from its words.

    unfound_calls: the messages whose calls the template prints, but at a place that is not known.
    Raises `BadRecord` if characters with weights of their own cannot be found in the text.
    """
    # The end of the chat belongs to the last target, so it comes before the borders inside targets.
    unprinted = (*rendered.unprinted, *labels_of_unprinted_thoughts(rendered.text, chat, places))
    rendered = _ended(rendered, chat, places, template)
    text, is_tagged = rendered.text, number_of_tags(rendered.text) > 0
    targets, at = [], 0
    for target in rendered.targets:
        own = []
        while at < len(places) and places[at].first < target.stop:
            if places[at].last >= target.start and places[at].words.run == (target.message, False):
                own.append(places[at])
            at += 1
        borders = _borders(text, target, own, template.special)
        if target.message in unfound_calls:
            last = max((i for i, border in enumerate(borders) if border.kind != END_OF_TURN), default=None)
            if last is not None:
                borders[last] = borders[last]._replace(doubts=(TOOL_CALL,))
        mask, stretches = chat.masks.get(target.message), target.stretches
        if mask is not None and mask.stretches:
            stretches = tuple(_stretches(text, target, borders, own, mask))
        borders = _with_tags(text, target.start, borders) if is_tagged else borders
        targets.append(Target(target.start, target.stop, target.message, target.closed_by, tuple(borders), stretches))
    return RenderedChat(text, tuple(targets), unprinted, rendered.appended)


def _ended(rendered: RenderedChat, chat: Chat, places: Sequence[Place], template: ChatTemplate) -> RenderedChat:
    """End the chat's last turn where it is a target that the template leaves open."""
    *targets, last = rendered.targets or (Target(0, 0, -1, None),)
    is_open = last.closed_by == "" and not rendered.text[last.stop :].strip()
    if not is_open or last.message < len(chat.messages) - 1:
        return rendered
    said = [place.words for place in places if place.words.run == (last.message, False)]
    if not (end := template.end_of_chat(bool(said) and said[-1].is_call)):
        return rendered
    text = rendered.text + end
    last = last._replace(stop=len(text), closed_by=template.last_special_token(end))
    return rendered._replace(text=text, targets=(*targets, last), appended=end)


def _kind(place: Place) -> str:
    if place.words.is_call:
        return TOOL_CALL
    return REASONING if place.words.kind is WordKind.REASONING else ANSWER


def _borders(text: str, target: Target, places: Sequence[Place], special: re.Pattern[str]) -> list[Border]:
    end = target.stop
    if target.closed_by and text.endswith(target.closed_by, target.start, target.stop):
        end -= len(target.closed_by)
    borders: list[Border] = []
    doubts: tuple[str, ...] = ()
    for place, next_place in pairwise(places):
        kind, after = _kind(place), _kind(next_place)
        if kind == after:
            continue
        last = _end(text, place)
        if kind == ANSWER:
            border: int | None = last
        elif after == ANSWER:
            border = _begin(text, next_place, last)
        else:
            border = _between(text, kind, last, next_place.first, special)
        borders.append(Border(last if border is None else border, kind, doubts))
        doubts = (kind, after) if border is None else ()
    borders += [Border(end, _kind(places[-1]) if places else ANSWER, doubts), Border(target.stop, END_OF_TURN)]
    starts = [target.start, *(border.stop for border in borders)]
    return [border for start, border in zip(starts, borders, strict=False) if start < border.stop]


def _end(text: str, place: Place) -> int:
    """Return the end of words whose last known character is at `place`."""
    return place.last + (0 if place.reaches_end else place.rest_in(text))


def _begin(text: str, place: Place, least: int) -> int | None:
    """Return the start of words; None if the template changes them."""
    if place.reaches_end and least <= place.first < place.last:
        return place.first
    core, end = place.words.text.strip(), _end(text, place)
    begin = end - len(core)
    return begin if begin >= least and text.startswith(core, begin) else None


def _between(text: str, kind: str, begin: int, end: int, special: re.Pattern[str]) -> int | None:
    """Return the border of reasoning and tool call between their words."""
    if kind == TOOL_CALL:
        opener = THINK_TAG.search(text, begin, end)
        return opener.start() if opener else None
    if closers := list(_CLOSER.finditer(text, begin, end)):
        return closers[-1].end()
    token = special.search(text, begin, end)
    return token.end() if token else None


def _stretches(
    text: str, target: Target, borders: list[Border], places: Sequence[Place], mask: TurnMask
) -> Iterator[Stretch]:
    """Yield a target's weights; template text has those of adjacent words."""
    for border in borders:
        inside = [place for place in places if place.last <= border.stop and _kind(place) == border.kind]
        places = [place for place in places if place not in inside]
        if not inside:
            continue
        place = inside[-1]
        name = place.words.field
        given = mask.stretches.get(name) if _kind(place) != TOOL_CALL else None
        if given is None:
            yield border.stop, 1.0
            continue
        # A weight ends where its words end in the text, which the template must print as they are.
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


def tagged_blocks(text: str, start: int, stop: int, is_opened: bool) -> list[Border]:
    """Find reasoning and tool calls in start..stop by their tags.

    is_opened: the text before `start` has opened reasoning. Unpaired tags are doubts of a part.
    """
    borders: list[Border] = []
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
        add(match.end(), EMPTY_REASONING)
    elif first and first[0] in OPENER and is_opened:
        closer = _CLOSER.match(text, first.start(), stop)
        assert closer is not None
        add(closer.end(), REASONING)
    for block in _BLOCK.finditer(text, at, stop):
        if text[at : block.start()].strip():
            add(block.start(), ANSWER)
        tag = _TAG.match(text, block.start())
        assert tag is not None
        add(block.end(), EMPTY_REASONING if _EMPTY.fullmatch(block[0]) else _KIND_OF_TAG[tag[0]])
    add(stop, ANSWER)
    return borders


def is_opened(before: str) -> bool:
    """Return whether the text before a turn opens reasoning."""
    return before.rstrip().endswith(tuple(OPENER.values()))


def number_of_tags(text: str) -> int:
    """Return the number of tags in a text."""
    for word in _WORDS_OF_TAGS:
        if word in text:
            return sum(map(text.count, _TAGS))
    return 0


def _with_tags(text: str, start: int, borders: list[Border]) -> list[Border]:
    """Return a target's borders with those of tags and reasoning without words."""
    tagged: list[Border] = []
    is_prompt_open = is_opened(text[max(start - 64, 0) : start])
    for number, border in enumerate(borders):
        if border.kind == ANSWER:
            for inner in tagged_blocks(text, start, border.stop, is_prompt_open and not number):
                tagged.append(inner._replace(doubts=(*inner.doubts, *border.doubts)))
        else:
            if border.kind == TOOL_CALL and not number and (block := _EMPTY.match(text, start, border.stop)):
                tagged.append(Border(block.end(), EMPTY_REASONING))
            tagged.append(border)
        start = border.stop
    return tagged
