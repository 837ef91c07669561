r"""Find the targets of chats of a known shape by the frame around their words.

A chat's shape is its roles, fields, targets and the white space around its words. A chat of stand-ins for the words is
rendered and searched once for each shape (spans.py), and cut at them. The words of other chats fill the frame:

    stand-ins    <|im_start|>user\n Zq7w0x<|im_end|>\n<|im_start|>assistant\nZq7w1x<|im_end|>\n
    frame        <|im_start|>user\n ......<|im_end|>\n<|im_start|>assistant\n......<|im_end|>\n
    filled       <|im_start|>user\n hello<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>\n
    target                                                                 ^^^^^^^^^^^^^^^^^

If that is the chat's text, its targets lie where those of the frame lie. Other chats are searched, and so are those
whose words the search or the template might look at. The result follows from the chat alone, whichever chats came
before it.

Arguments of the template that frame turns alike (`ChatTemplate.framing`) share their frames. The text of a chat may
then have other words of theirs in one gap before its first target, such as instructions or tools in the system's turn.
"""

import json
from bisect import bisect_right
from functools import cached_property, lru_cache
from itertools import accumulate, chain, zip_longest
from operator import sub
from typing import Any, NamedTuple

from verl_ext.text.chat.marks import SPOKEN_FIELDS
from verl_ext.text.chat.parts import RenderedChat, number_of_tags
from verl_ext.text.chat.source import TemplateSource
from verl_ext.text.chat.spans import TurnSearch
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
# The (field, value) of each message, and the targets.
Shape = tuple[tuple[tuple[tuple[str, str], ...], ...], tuple[int, ...]]


class Frame(NamedTuple):
    """The text around the words of a shape, and its targets among stand-ins.

    gaps: [n + 1] the texts before, between and after words. numbers: [n] of the words between them. ends: [n] of the
    stand-ins. tags: the number of tags in the gaps. continuations: as in `TurnSearch`.
    """

    gaps: list[str]
    numbers: list[int]
    ends: list[int]
    tags: int
    rendered: RenderedChat
    continuations: tuple[str, ...]

    def filled(self, words: list[str], text: str, has_arguments: bool) -> RenderedChat | None:
        """Return the chat if its text is this frame with the words, which may make no tag.

        has_arguments: a gap before the first target may be another one.
        """
        own = [words[number] for number in self.numbers]
        filled = "".join(chain.from_iterable(zip_longest(self.gaps, own, fillvalue="")))
        if filled != text and not (has_arguments and self._differs_before_targets(own, filled, text)):
            return None
        if number_of_tags(filled) != self.tags:
            return None
        ends = accumulate(len(gap) + len(word) for gap, word in zip(self.gaps, own, strict=False))
        shifts = [0, *map(sub, ends, self.ends)]  # by the number of words before a place
        more = len(text) - len(filled)
        return self.rendered.moved(text, lambda at: at + shifts[bisect_right(self.ends, at)] + more)

    def _differs_before_targets(self, own: list[str], filled: str, text: str) -> bool:
        """Return whether the filled frame is the text except for one gap before its first target."""
        before, after, at = common_prefix(filled, text), common_prefix(filled[::-1], text[::-1]), 0
        first = min((bisect_right(self.ends, target.start) for target in self.rendered.targets), default=0)
        for gap, word in zip(self.gaps[:first], own, strict=False):
            rest = len(filled) - at - len(gap)
            if at <= before and rest <= after and at + rest <= len(text):
                return True
            at += len(gap) + len(word)
        return False


class FrameCache:
    """A chat template with the frames of the shapes that it has rendered."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._frame = lru_cache(SHAPES)(self._new_frame)

    def locate(self, chat: Chat) -> RenderedChat:
        """Render a chat and find its targets, as `spans.locate` does."""
        template = self.template.with_arguments(chat.template_kwargs or self.template.arguments)
        if (known := _shape_of(chat)) is None:
            return TurnSearch(template, *template.with_arguments_as_printed(chat)).result()
        shape, words = known
        text = template.render(chat.messages)
        # Words may be compared with each other.
        if template.facts.is_blind_to(words) and len({*words}) == len(words) and self._is_usable:
            frame = self._frame(shape)
            if frame is not None and not any(word.startswith(frame.continuations) for word in words):
                filled = frame.filled(words, text, template is not self.template)
                if filled is not None:
                    return filled
        return TurnSearch(template, chat, text).result()

    @cached_property
    def _is_usable(self) -> bool:
        """Whether the template prints long, varied words as it prints stand-ins."""
        for roles in (("user", "assistant"), ("system", "user", "assistant")):
            messages = [{"role": role, "content": f"{_TRIAL}{role}."} for role in roles]
            shape, words = _shape_of(Chat(messages, {len(messages) - 1: 1.0})) or ((), [])
            text, frame = self.template.try_render(messages), self._frame(shape)
            if text is not None and frame is not None:
                return frame.filled(words, text, has_arguments=False) is not None
        return False

    def _new_frame(self, shape: Shape) -> Frame | None:
        """Render and search a shape's stand-ins; None if the template repeats or a target cuts them."""
        chat = Chat([*map(dict, shape[0])], dict.fromkeys(shape[1], 1.0))
        try:
            search = TurnSearch(self.template, chat, self.template.render(chat.messages))
            rendered = search.result()
        except BadRecord:
            return None
        gaps, _, numbers = (_STAND_INS.pattern.split(search.text)[part::3] for part in range(3))
        spans = [place.span() for place in _STAND_INS.pattern.finditer(search.text)]
        borders = [at for t in rendered.targets for at in (t.start, t.stop, *(border.stop for border in t.borders))]
        is_cut = any(begin < at < end for at in borders for begin, end in spans)
        if search.marks.way != "around" or is_cut or len({*numbers}) < len(numbers):
            return None
        tags, ends = sum(map(number_of_tags, gaps)), [end for _, end in spans]
        return Frame(gaps, [*map(int, numbers)], ends, tags, rendered, search.continuations())


def _shape_of(chat: Chat) -> tuple[Shape, list[str]] | None:
    """Return a chat's shape, with stand-ins for its words, and the words; None for more than words."""
    if chat.tools or len(chat.messages) > LONGEST or any(mask.stretches for mask in chat.masks.values()):
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
    return (tuple(messages), tuple(chat.targets)), words


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
