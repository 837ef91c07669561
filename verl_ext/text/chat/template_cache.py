r"""Find the targets of chats of a known shape by their gaps.

A chat's shape is its roles, fields, targets and the white space around its words. A chat of stand-ins for the words is
rendered and searched once for each shape (spans.py); other chats of the shape are rendered, and compared with it:

    stand-ins    <|im_start|>user\n Zq8w0x<|im_end|>\n<|im_start|>assistant\nZq8w1x<|im_end|>\n
    gaps         <|im_start|>user\n ......<|im_end|>\n<|im_start|>assistant\n......<|im_end|>\n
    chat         <|im_start|>user\n hello<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>\n
    target                                                                 ^^^^^^^^^^^^^^^^^

If a text is the gaps with the chat's words in them, its targets lie where those of the stand-ins lie. Other chats are
searched, and so are those whose words the search or the template might look at (`_are_plain`). The result follows from
the chat alone, whichever chats came before it.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import sub
from typing import Any, NamedTuple

from verl_ext.text.chat.marks import SPOKEN_FIELDS
from verl_ext.text.chat.parts import TAGS, Border, RenderedChat, Target, has_tags
from verl_ext.text.chat.spans import TurnSearch
from verl_ext.text.chat.template import ChatTemplate
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.messages import Chat

SHAPES = 1024  # the maximum number of shapes that are kept
LONGEST = 64  # the maximum number of messages of a chat that has a shape
LONGEST_SOUGHT = 64  # the maximum length of a variable's value that may be sought in words; prompts are longer
_STAND_IN = re.compile("Zq8w([0-9]+)x")
_TRIAL = 'A "word" \\ of é,\n\n  - 1. and more: (x) {y} [z] ' * 200
_TAGS = [tag for pair in TAGS for tag in pair]
_TAG_HEADS = tuple({tag[:at] for tag in _TAGS for at in range(1, len(tag))})
_TAG_TAILS = tuple({tag[at:] for tag in _TAGS for at in range(1, len(tag))})
# Methods whose constant arguments are compared with the ends of words, and methods that look at nothing in words. The
# arguments of others are sought anywhere in them.
_AT_ENDS = ("startswith", "endswith", "removeprefix", "removesuffix")
_BLIND = ("strip", "lstrip", "rstrip", "get", "join", "append")

# (field, value) of a role and of blank words; (field, (white space before, after)) of other words.
Field = tuple[str, Any]
Shape = tuple[tuple[tuple[Field, ...], ...], tuple[int, ...]]  # of each message, and the targets


class _Frame(NamedTuple):
    """The text around a shape's words, and its targets among stand-ins.

    parts: [2n + 1] the texts before, between and after words, and a place for each of the words between them. words:
    [n] their numbers. lengths: [n] of the stand-ins. before: for each target, the words before its start, its stop, and
    the stop of each of its parts. continuations: as in `TurnSearch`.
    """

    parts: list[str]
    words: list[int]
    lengths: list[int]
    rendered: RenderedChat
    before: list[tuple[int, int, list[int]]]
    continuations: tuple[str, ...]

    def filled(self, words: list[str], text: str) -> RenderedChat | None:
        """Return the chat if its text is this frame with the words."""
        parts, own = self.parts.copy(), [words[number] for number in self.words]
        parts[1::2] = own
        if "".join(parts) != text:
            return None
        # The characters that the text has more than the frame, after so many words.
        shifts = [0, *accumulate(map(sub, map(len, own), self.lengths))]
        targets = []
        for target, (first, last, inner) in zip(self.rendered.targets, self.before, strict=True):
            start, stop, message, closed_by, borders, _ = target
            moved = [Border(b[0] + shifts[n], b[1], b[2]) for b, n in zip(borders, inner, strict=True)]
            targets.append(Target(start + shifts[first], stop + shifts[last], message, closed_by, tuple(moved)))
        return RenderedChat(text, tuple(targets), self.rendered.unprinted)


class TemplateCache:
    """A chat template with the frames of shapes it has rendered."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._frame = lru_cache(SHAPES)(self._new_frame)
        self._sought, self._compared = _constants_of(template)

    def locate(self, chat: Chat) -> RenderedChat:
        """Render a chat and find its targets, as `spans.locate` does."""
        if (found := _shape_of(chat)) is None:
            return TurnSearch(self.template, *self.template.with_arguments_as_printed(chat)).result()
        shape, words = found
        text = self.template.render(chat.messages)
        return self._filled(shape, words, text) or TurnSearch(self.template, chat, text).result()

    def _filled(self, shape: Shape, words: list[str], text: str) -> RenderedChat | None:
        if not self._are_plain(words) or not self._is_usable or (frame := self._frame(shape)) is None:
            return None
        for word in words:
            if word.startswith(frame.continuations):
                return None
        return frame.filled(words, text)

    def _are_plain(self, words: list[str]) -> bool:
        """Return whether neither search nor template looks at anything in words."""
        text = "\0".join(words)
        for sought in self._sought:
            if sought in text:
                return False
        for word in words:
            if word.startswith(self._compared) or word.endswith(self._compared):
                return False
        return len({*words}) == len(words) and not has_tags(text)  # words may be compared with each other

    @cached_property
    def _is_usable(self) -> bool:
        """Whether the template prints long, varied words as it prints stand-ins."""
        words = [f"{_TRIAL}{role}." for role in ("system", "user", "assistant")]
        for chosen in (words[1:], words):
            messages = [{"role": word[len(_TRIAL) : -1], "content": word} for word in chosen]
            shape, core = _shape_of(Chat(messages, {len(messages) - 1: 1.0})) or ((), [])
            text, frame = self.template.try_render(messages), self._frame(shape)
            if text is not None and frame is not None:
                return frame.filled(core, text) is not None
        return False

    def _new_frame(self, shape: Shape) -> _Frame | None:
        """Render and search a shape's stand-ins; None if words are not found."""
        chat, count = Chat([], dict.fromkeys(shape[1], 1.0)), 0
        for fields in shape[0]:
            chat.messages.append(dict(fields))
            for name, value in fields:
                if isinstance(value, tuple):
                    chat.messages[-1][name], count = f"{value[0]}Zq8w{count}x{value[1]}", count + 1
        try:
            search = TurnSearch(self.template, chat, self.template.render(chat.messages))
            rendered = search.result()
        except BadRecord:
            return None
        places = [place.span() for place in _STAND_IN.finditer(rendered.text)]
        begins, ends = [*(begin for begin, _ in places), len(rendered.text)], [end for _, end in places]
        parts = _STAND_IN.split(rendered.text)  # the numbers of the words are between the gaps
        gaps, numbers = parts[::2], [int(number) for number in parts[1::2]]
        borders = [[t.start, t.stop, *(border.stop for border in t.borders)] for t in rendered.targets]
        before = [[bisect_right(ends, at) for at in of_target] for of_target in borders]
        if (
            search.marks.way != "around"
            or len({*numbers}) < len(numbers)
            or any(at > begins[n] for a, b in zip(borders, before, strict=True) for at, n in zip(a, b, strict=True))
            # A tag might be made of words and the text around them.
            or any(gap.endswith(_TAG_HEADS) for gap in gaps[:-1])
            or any(gap.startswith(_TAG_TAILS) for gap in gaps[1:])
            or any(gap in tag for gap in gaps[1:-1] for tag in _TAGS)
        ):
            return None
        lengths, of_targets = [end - begin for begin, end in places], [(a, b, inner) for a, b, *inner in before]
        return _Frame(parts, numbers, lengths, rendered, of_targets, tuple(search.continuations))


def _shape_of(chat: Chat) -> tuple[Shape, list[str]] | None:
    """Return a chat's shape and stripped words; None for more than words."""
    if chat.tools or len(chat.messages) > LONGEST or any(mask.stretches for mask in chat.masks.values()):
        return None
    messages: list[tuple[Field, ...]] = []
    words: list[str] = []
    for message in chat.messages:
        fields: list[Field] = []
        for name, value in message.items():
            if name == "role":
                fields.append((name, value))
            elif name not in SPOKEN_FIELDS or not isinstance(value, str):
                return None
            elif core := value.strip():
                at = value.index(core) if len(core) < len(value) else 0
                fields.append((name, (value[:at], value[at + len(core) :])))
                words.append(core)
            else:
                fields.append((name, value))
        messages.append(tuple(fields))
    return (tuple(messages), tuple(chat.targets)), words


def _constants_of(template: ChatTemplate) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts that a template may seek in words, or compare.

    Words without them take the same way through the template as stand-ins. The parts of marks are among the former.
    """
    from jinja2 import TemplateSyntaxError, nodes

    from verl_ext.text.chat.sandbox import parsed

    compared: set[str] = set()
    sought = {"q7", "Q7"}

    def strings(node: nodes.Node) -> Iterator[str]:
        if isinstance(node, nodes.Const) and isinstance(node.value, str) and node.value:
            yield node.value
        for child in node.iter_child_nodes(["arg"] if isinstance(node, nodes.Getitem) else None):
            yield from strings(child)

    for source in template.sources:
        try:
            tree = parsed(source)
        except TemplateSyntaxError:
            return ("",), ()
        # What stands beside `in` or is a method's argument may be sought anywhere in words; what is compared, at ends.
        for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.List, nodes.Tuple, nodes.Assign)):
            if isinstance(node, nodes.Compare):
                for operand in node.ops:
                    is_search = operand.op in ("in", "notin")
                    (sought if is_search else compared).update(strings(node.expr))
                    compared.update(strings(operand.expr))
                    if is_search and isinstance(operand.expr, nodes.Const):
                        sought.add("")  # words are sought in a text, so that none are plain
            elif isinstance(node, nodes.Filter):
                sought.update(text for given in node.args if node.name == "replace" for text in strings(given))
            elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
                if (method := node.node.attr) not in _BLIND:
                    to = compared if method in _AT_ENDS else sought
                    to.update(text for given in node.args for text in strings(given))
            elif not isinstance(node, nodes.Call):  # a list or a variable, which may be used in any way
                for text in strings(node):
                    if len(text) <= LONGEST_SOUGHT:
                        (compared if text.isalnum() or not re.search(r"\w", text) else sought).add(text)
    return tuple(sought), tuple(compared)
