r"""Find the targets of chats of a known shape by the frame around their words.

A chat's shape is its roles, fields, targets and the white space around its words. A chat of stand-ins for the words is
rendered and searched once for each shape (spans.py), and cut at them. The words of other chats fill the frame:

    stand-ins    <|im_start|>user\n Zq7w0x<|im_end|>\n<|im_start|>assistant\nZq7w1x<|im_end|>\n
    frame        <|im_start|>user\n ......<|im_end|>\n<|im_start|>assistant\n......<|im_end|>\n
    filled       <|im_start|>user\n hello<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>\n
    target                                                                 ^^^^^^^^^^^^^^^^^

If that is the chat's text, its targets lie where those of the frame lie, and parts.py finds their parts. Other chats
are searched, and so are those whose words the search or the template might look at. The result follows from the chat
alone, whichever chats came before it.

Arguments of the template that frame turns alike (`ChatTemplate.framing`) share their frames. The text of a chat may
then have other words of theirs in one gap before its first target, such as instructions or tools in the system's turn.
"""

import json
from bisect import bisect_right
from functools import cached_property, lru_cache
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from verl_ext.text.chat.marks import SPOKEN_FIELDS, Place, Words
from verl_ext.text.chat.parts import RenderedChat, Target, with_parts
from verl_ext.text.chat.source import TemplateSource
from verl_ext.text.chat.spans import TurnSearch, locate
from verl_ext.text.chat.stand_ins import StandIns
from verl_ext.text.chat.template import ChatTemplate, common_prefix
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.messages import Chat

ARGUMENTS = 64  # the maximum number of arguments for which frames are kept
SHAPES = 1024  # the maximum number of shapes that are kept
LONGEST = 64  # the maximum number of messages of a chat that has a shape
_STAND_INS = StandIns()
_WORDS = [_STAND_INS.of(number) for number in range(LONGEST * len(SPOKEN_FIELDS))]
_TRIAL = 'A "word" \\ of é,\n\n  - 1. and more: (x) {y} [z] ' * 200


class FrameShape(NamedTuple):
    """What chats have in common that are framed alike.

    messages: the (field, value) of each message, with stand-ins for its words. targets: the numbers of the messages
    that are targets.
    """

    messages: tuple[tuple[tuple[str, str], ...], ...]
    targets: tuple[int, ...]


class Frame(NamedTuple):
    """The text around the words of a shape, and its targets.

    gaps: [n + 1] the texts before, between and after words. places: [n] of the stand-ins, with their numbers in the
    shape. rendered: the chat of stand-ins, whose targets have no parts. continuations: (index in `places`, what is left
    of a prompt where these words begin); words that begin with it hold the end of the prompt, and are searched.
    """

    gaps: list[str]
    places: list[Place]
    rendered: RenderedChat
    continuations: list[tuple[int, str]]

    def filled(
        self, chat: Chat, words: list[str], text: str, template: ChatTemplate, has_arguments: bool
    ) -> RenderedChat | None:
        """Return the chat with these words if its text is this frame with them.

        has_arguments: a gap before the first target may be another one.
        """
        own, gaps = [words[place.number] for place in self.places], self.gaps
        filled = "".join(chain.from_iterable(zip_longest(gaps, own, fillvalue="")))
        if filled != text and not (has_arguments and (gaps := self._gaps_in(text, filled, own))):
            return None
        # The words' places, and how far they move what stands behind them, follow from their lengths.
        places, shifts, at = [], [0], 0
        for place, gap, word in zip(self.places, gaps, own, strict=False):
            begin, at = at + len(gap), at + len(gap) + len(word)
            message, kind, stand_in, role, field = place.words  # `_replace` would take three times as long
            own_words = Words(message, kind, stand_in.replace(_WORDS[place.number], word), role, field)
            places.append(Place(place.number, own_words, begin, at, reaches_end=True))
            shifts.append(at - place.last)
        if any(text.startswith(rest, places[index].first) for index, rest in self.continuations):
            return None
        targets = []
        for target in self.rendered.targets:
            start = target.start + shifts[self._words_before(target.start)]
            stop = target.stop + shifts[self._words_before(target.stop)]
            targets.append(Target(start, stop, target.message, target.closed_by))
        return with_parts(RenderedChat(text, tuple(targets), self.rendered.unprinted), chat, places, template)

    def _words_before(self, at: int) -> int:
        return bisect_right(self.places, at, key=lambda place: place.last)

    def _gaps_in(self, text: str, filled: str, own: list[str]) -> list[str]:
        """Return a text's gaps if only one before the first target differs from the frame's, else []."""
        before, after, at = common_prefix(filled, text), common_prefix(filled[::-1], text[::-1]), 0
        first = min((self._words_before(target.start) for target in self.rendered.targets), default=0)
        for number, (gap, word) in enumerate(zip(self.gaps[:first], own, strict=False)):
            rest = len(filled) - at - len(gap)
            if at <= before and rest <= after and at + rest <= len(text):
                return [*self.gaps[:number], text[at : len(text) - rest], *self.gaps[number + 1 :]]
            at += len(gap) + len(word)
        return []


class FrameCache:
    """A chat template with the frames of the shapes that it has rendered."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._frame = lru_cache(SHAPES)(self._new_frame)

    def locate(self, chat: Chat) -> RenderedChat:
        """Render a chat and find its targets, as `spans.locate` does."""
        template = self.template.with_arguments(chat.template_kwargs or self.template.arguments)
        if (known := _shape_of(chat)) is None:
            return locate(template, chat)
        shape, words = known
        text = template.render(chat.messages)
        # Words may be compared with each other.
        if template.facts.is_blind_to(words) and len({*words}) == len(words) and self._is_usable:
            frame = self._frame(shape)
            filled = frame and frame.filled(chat, words, text, template, template is not self.template)
            if filled is not None:
                return filled
        return TurnSearch(template, chat, text).result()

    @cached_property
    def _is_usable(self) -> bool:
        """Whether the template prints long, varied words as it prints stand-ins."""
        for roles in (("user", "assistant"), ("system", "user", "assistant")):
            chat = Chat([{"role": role, "content": f"{_TRIAL}{role}."} for role in roles], {len(roles) - 1: 1.0})
            shape, words = _shape_of(chat) or (FrameShape((), ()), [])
            text, frame = self.template.try_render(chat.messages), self._frame(shape)
            if text is not None and frame is not None:
                return frame.filled(chat, words, text, self.template, has_arguments=False) is not None
        return False

    def _new_frame(self, shape: FrameShape) -> Frame | None:
        """Search a chat of stand-ins and cut its text at them; None if the shape cannot have a frame."""
        chat = Chat([*map(dict, shape.messages)], dict.fromkeys(shape.targets, 1.0))
        try:
            search = TurnSearch(self.template, chat, self.template.render(chat.messages))
            rendered = search.turns()
        except BadRecord:
            return None
        # Words of arguments, and results without words, are part of the text around.
        places = [
            place._replace(number=_WORDS.index(words))
            for place in search.places
            if place.words.message >= 0 and (words := place.words.text.strip())
        ]
        begins, ends = [place.first for place in places], [place.last for place in places]
        gaps = [search.text[end:begin] for end, begin in zip([0, *ends], [*begins, len(search.text)], strict=True)]
        borders = [at for target in rendered.targets for at in (target.start, target.stop)]
        is_cut = any(begin < at < end for at in borders for begin, end in zip(begins, ends, strict=True))
        if search.marks.way != "around" or is_cut or any(map(_STAND_INS.pattern.search, gaps)):
            return None
        continuations = [(begins.index(at), text) for at, text in search.continuations if at in begins]
        return Frame(gaps, places, rendered, continuations)


def _shape_of(chat: Chat) -> tuple[FrameShape, list[str]] | None:
    """Return a chat's shape, with stand-ins for its words, and the words; None for more than words."""
    if chat.tools or len(chat.messages) > LONGEST:
        return None
    messages: list[tuple[tuple[str, str], ...]] = []
    words: list[str] = []
    for message in chat.messages:
        fields: list[tuple[str, str]] = []
        for name, value in message.items():
            if name != "role":
                if name not in SPOKEN_FIELDS or not isinstance(value, str):
                    return None
                if core := value.strip():
                    value = value.replace(core, _WORDS[len(words)], 1)
                    words.append(core)
            fields.append((name, value))
        messages.append(tuple(fields))
    return FrameShape(tuple(messages), tuple(chat.targets)), words


class ArgumentCaches:
    """A chat template's frames, shared by all arguments that frame turns alike."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._plain = FrameCache(template)
        self._known: dict[str, FrameCache] = {}  # by arguments
        self._framed: dict[Any, FrameCache] = {}

    def of(self, arguments: dict[str, Any]) -> FrameCache:
        """Return the cache of chats with these arguments; UsageError if the template takes none."""
        if not arguments or arguments is self.template.arguments:
            return self._plain
        key = json.dumps(arguments, sort_keys=True, default=repr)
        if key not in self._known:
            template = self.template.probed_with(arguments)
            alike = template.framing, json.dumps(_settings(arguments, template.facts), sort_keys=True, default=repr)
            _keep(self._framed, alike, self._framed.get(alike) or FrameCache(template))
            _keep(self._known, key, self._framed[alike])
        return self._known[key]


def _keep(caches: dict[Any, FrameCache], key: Any, cache: FrameCache) -> None:
    """Add a cache to those that are kept, in place of the oldest."""
    caches[key] = cache
    if len(caches) > ARGUMENTS:
        del caches[next(iter(caches))]


def _settings(value: Any, facts: TemplateSource) -> Any:
    """Return what a template may look at: values that are not texts, and whether lists are empty."""
    if isinstance(value, str):
        return "text" if value.strip() and facts.is_blind_to([value]) else value
    if isinstance(value, dict):
        return {name: _settings(item, facts) for name, item in value.items()}
    return [bool(value)] if isinstance(value, list) else value
