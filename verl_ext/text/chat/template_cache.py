"""Render chats of a known shape from pieces, without running the template.

A chat's shape is its roles and the fields that hold text ("words"). The second chat of a shape is rendered with
stand-ins for its words. These are strings that record the questions that the template asks about the words:

    template     {{ '<think>' if '</think>' in m.content }}{{ m.content.strip() }}
    recorded     "</think>" is not in the words; the words are printed without white space around them

A later chat of the shape whose words give the same answers takes the same path through the template. Its text and
targets are therefore put together from the pieces. If a template asks a question that cannot be recorded (the length of
words, one of their letters), or changes words by operations that a stand-in does not see, it is run for every chat.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from verl_ext.text.chat.marks import SPOKEN_FIELDS
from verl_ext.text.chat.parts import ANSWER, REASONING, Border, RenderedChat, Target
from verl_ext.text.chat.spans import locate
from verl_ext.text.chat.template import ChatTemplate
from verl_ext.text.records.bad_record import BadRecord
from verl_ext.text.records.messages import Chat, Message

CHECKED = 256  # one in so many chats is also rendered, as a check
SHAPES = 1024  # the maximum number of shapes that are kept
LONGEST = 64  # the maximum number of messages of a chat that has a shape
# Stand-ins have characters that JSON and Python escape, so that an escaped stand-in is not found in the text.
_STAND_IN = re.compile(r'Zq8w([0-9]+)"\\\\é\n"Zq8')
_NEW = 'Zq8w0"\\\\é\n"Zq8'
_FILTERS = {"trim", "length", "count", "tojson", "default", "d", "list", "first", "last", "selectattr", "rejectattr"}
_FILTERS |= {"items", "dictsort", "upper", "lower", "string"}

Leaf = tuple[int, str]  # message and field
Change = tuple[str, tuple[Any, ...]]  # a method of words, such as strip, and its arguments


@dataclass
class _Notes:
    """The questions that a template asks, and the words that it may print."""

    # The field, the changes made to its words before the question, the method, its arguments and its answer.
    questions: set[tuple[Leaf, tuple[Change, ...], str, tuple[Any, ...], Any]] = field(default_factory=set)
    printed: list[tuple[Leaf, tuple[Change, ...]]] = field(default_factory=list)  # by the number of their stand-in
    is_proof: bool = True  # False after a question that cannot be recorded

    def words(self, text: str, leaf: Leaf, changes: tuple[Change, ...] = ()) -> "_Words":
        """Replace every stand-in in a text by the one for a field's words after these changes."""
        if (leaf, changes) not in self.printed:
            self.printed.append((leaf, changes))
        stand_in = _NEW.replace("w0", f"w{self.printed.index((leaf, changes))}")
        words = _Words(_STAND_IN.sub(lambda _: stand_in, text), self)
        words.leaf, words.changes = leaf, changes
        return words


class _Opaque(str):
    """A text made of words, which a template may print and join, but not ask about."""

    notes: _Notes

    def __new__(cls, text: str, notes: _Notes) -> "_Opaque":
        words = super().__new__(cls, text)
        words.notes = notes
        return words

    def __add__(self, other: str) -> "_Opaque":
        return _Opaque(str.__add__(str(self), str(other)), self.notes)

    def __radd__(self, other: str) -> "_Opaque":
        return _Opaque(str.__add__(str(other), str(self)), self.notes)

    def __str__(self) -> str:
        return str.__str__(self)

    def __bool__(self) -> bool:
        return True


class _Words(_Opaque):
    """The words of one field, which record the questions about them."""

    leaf: Leaf
    changes: tuple[Change, ...]

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return the method's answer, and record the question."""
        plain = tuple(str(a) if isinstance(a, str) else a for a in arguments)
        if any(isinstance(argument, _Opaque) for argument in arguments):
            self.notes.is_proof = False
        answer = getattr(str, method)(str(self), *plain)
        self.notes.questions.add((self.leaf, self.changes, method, plain, answer))
        return answer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.ask("__eq__", other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def split(self, separator: Any = None, *arguments: Any) -> list[Any]:  # type: ignore[override]
        if separator is None or separator in self:
            self.notes.is_proof = False
        return [self]

    def replace(self, old: Any, new: Any, *arguments: Any) -> "_Words":  # type: ignore[override]
        if old in self:
            self.notes.is_proof = False
        return self


def _asking(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self.ask(name, *arguments)


def _changing(name: str) -> Callable[..., Any]:
    """Make a method that records a change of the words and leaves their stand-ins unchanged."""
    return lambda self, *arguments: self.notes.words(str(self), self.leaf, (*self.changes, (name, arguments)))


def _no_proof(name: str) -> Callable[..., Any]:
    def method(self: _Opaque, *arguments: Any, **named: Any) -> Any:
        self.notes.is_proof = False
        return getattr(str, name)(str(self), *arguments, **named)

    return method


for _name in ("__contains__", "startswith", "endswith"):
    setattr(_Words, _name, _asking(_name))
for _name in ("strip", "lstrip", "rstrip"):
    setattr(_Words, _name, _changing(_name))
_HARMLESS = {"__new__", "__init__", "__class__", "__getattribute__", "__doc__", "__init_subclass__", "__subclasshook__"}
_HARMLESS |= {"__dir__", "__setattr__", "__delattr__", "__reduce__", "__reduce_ex__", "__repr__", "__sizeof__"}
for _kind in (_Opaque, _Words):
    for _name in set(dir(str)) - _HARMLESS:
        if all(_name not in vars(parent) for parent in (_kind, *_kind.__mro__[1:-2])):
            setattr(_kind, _name, _no_proof(_name))


@dataclass
class _Shape:
    """The texts around the words of a chat, and its targets."""

    around: list[str]  # before, between and after words
    between: list[int]  # the numbers of the stand-ins between these texts
    # Each target's start and the ends of its parts, as (characters of `around`, words before), and the target.
    targets: list[tuple[tuple[int, int], list[tuple[int, int]], Target]]
    unprinted: list[str]  # the kinds of words that the template leaves out
    notes: _Notes  # the questions that a chat of this shape must answer alike

    def located(self, chat: Chat) -> RenderedChat | None:
        """Render a chat of this shape; return None if its words answer a question of the template differently."""
        for (index, name), changes, method, arguments, answer in self.notes.questions:
            words = _changed(chat.messages[index][name], changes)
            if getattr(words, method)(*arguments) != answer:
                return None
        said = []
        for (index, name), changes in self.notes.printed:
            said.append(_changed(chat.messages[index][name], changes))
            if not said[-1]:
                return None
        parts, ends = [self.around[0]], [0]
        for number, text in zip(self.between, self.around[1:], strict=True):
            parts += [said[number], text]
            ends.append(ends[-1] + len(said[number]))
        text = "".join(parts)
        targets = []
        for (start, n), stops, target in self.targets:
            borders = [
                Border(stop + ends[n], *border[1:]) for (stop, n), border in zip(stops, target.borders, strict=True)
            ]
            for number, border in enumerate(borders[:-1]):
                if border.kind == REASONING and borders[number + 1].kind == ANSWER:
                    # An answer's leading white space belongs to the part before it, as in `locate`.
                    answer = text[border.stop : borders[number + 1].stop]
                    borders[number] = border._replace(stop=border.stop + len(answer) - len(answer.lstrip()))
            stop = borders[-1].stop
            targets.append(Target(start + ends[n], stop, target.message, target.closed_by, target.weight, borders))
        return RenderedChat(text, targets, list(self.unprinted))


def _changed(words: str, changes: Sequence[Change]) -> str:
    for method, arguments in changes:
        words = getattr(words, method)(*arguments)
    return words


class ProvenChats:
    """A renderer of chats with one template, which uses proven shapes if possible."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._is_usable = _can_be_proven(template.source)
        self._shapes: dict[tuple[Any, ...], _Shape | None] = {}
        self._seen_once: set[tuple[Any, ...]] = set()
        prompt = template.generation_prompt
        self._prompt_ends = tuple(prompt[at:] for at in range(len(prompt)))
        self._count = 0

    def text(self, chat: Chat) -> str:
        """Render a chat without looking for its targets."""
        return self.template.with_arguments_as_printed(chat)[1]

    def located(self, chat: Chat) -> RenderedChat:
        """Render a chat like `locate`, which is called if the chat has no proven shape."""
        key = _shape_key(chat) if self._is_usable else None
        if key is None:
            return locate(self.template, chat)
        if key not in self._shapes:
            # Most shapes of long chats occur once, so a shape is proven when it occurs again.
            if key not in self._seen_once:
                if len(self._seen_once) < SHAPES:
                    self._seen_once.add(key)
                return locate(self.template, chat)
            self._shapes[key] = self._prove(chat)
        shape = self._shapes[key]
        # A turn whose words begin like the end of the generation prompt, with a <think>, must be rendered itself.
        begins = (chat.messages[index].get("content", "").startswith(self._prompt_ends) for index in chat.targets)
        found = shape.located(chat) if shape is not None and not any(begins) else None
        if found is None:
            return locate(self.template, chat)
        self._count += 1
        if self._count % CHECKED == 1:
            rendered = locate(self.template, chat)
            if rendered != found:  # the template asked in a way that stand-ins do not see
                self._is_usable = False
                return rendered
        return found

    def _prove(self, chat: Chat) -> _Shape | None:
        """Return the shape of a chat; None if the shape does not determine its text."""
        notes = _Notes()
        messages: list[Message] = []
        for index, message in enumerate(chat.messages):
            said = [name for name in SPOKEN_FIELDS if (message.get(name) or "").strip()]  # blank words are in the key
            stand_ins = {name: str(notes.words(_NEW, (index, name))) for name in said}
            messages.append({**message, **stand_ins})

        def watched(message: Message) -> Message:
            """Return the message with its stand-ins as strings that record questions."""
            return {
                name: notes.words(value, *notes.printed[int(found[1])])
                if isinstance(value, str) and (found := _STAND_IN.search(value))
                else value
                for name, value in message.items()
            }

        try:
            with self.template.watching(watched):
                rendered = locate(self.template, replace(chat, messages=messages))
        except BadRecord:
            return None
        found = list(_STAND_IN.finditer(rendered.text))
        is_whole = "Zq8" not in _STAND_IN.sub("", rendered.text)
        if not notes.is_proof or not is_whole:
            return None
        borders = [0, *(border for match in found for border in match.span()), len(rendered.text)]
        around = [rendered.text[a:b] for a, b in zip(borders[::2], borders[1::2], strict=True)]

        def place(at: int) -> tuple[int, int]:
            before = [match for match in found if match.end() <= at]
            return at - sum(len(match[0]) for match in before), len(before)

        targets = []
        for target in rendered.targets:
            stops = [border.stop for border in target.borders]
            kinds = [border.kind for border in target.borders]
            if any(match.start() < at < match.end() for match in found for at in (target.start, *stops)):
                return None
            if (ANSWER, REASONING) in pairwise(
                kinds
            ):  # the border lies inside the white space after the answer's words
                return None
            targets.append((place(target.start), [place(stop) for stop in stops], target))
        return _Shape(around, [int(match[1]) for match in found], targets, rendered.unprinted, notes)


def _shape_key(chat: Chat) -> tuple[Any, ...] | None:
    """Return everything besides words on which a template may depend; None if a chat has more than words."""
    if chat.tools or len(chat.messages) > LONGEST or any(mask.stretches for mask in chat.masks.values()):
        return None
    shape: list[Any] = []
    for message in chat.messages:
        said = []
        for name, value in message.items():
            if name != "role" and (name not in SPOKEN_FIELDS or not isinstance(value, str)):
                return None
            # Blank words are part of the shape.
            said.append((name, value if name == "role" or not value.strip() else None))
        shape.append(tuple(said))
    return tuple(shape), tuple(chat.targets.items())


def _can_be_proven(source: str) -> bool:
    """Tell whether a template uses words only in ways that stand-ins see.

    Macros, blocks and `~` make new strings from words. The only filters allowed are those that ask the stand-in itself.
    """
    from jinja2 import TemplateSyntaxError, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        tree = _compile_jinja_template(source).environment.parse(source)
    except TemplateSyntaxError:
        return False
    printed = {id(node) for output in tree.find_all(nodes.Output) for node in output.nodes}
    for node in tree.find_all(nodes.Node):
        if isinstance(node, (nodes.Macro, nodes.AssignBlock, nodes.FilterBlock)):
            return False
        if isinstance(node, nodes.CallBlock) and not isinstance(node.call.node, nodes.ExtensionAttribute):
            return False  # the extension's own call is {% generation %}
        if isinstance(node, nodes.Concat) and id(node) not in printed:
            return False
        if isinstance(node, nodes.Filter) and node.name not in _FILTERS:
            return False
        if isinstance(node, nodes.Mod) and not isinstance(node.right, nodes.Const):
            return False
        if isinstance(node, nodes.Test) and node.name == "in":
            return False
        is_method = isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr)
        if is_method and hasattr(str, node.node.attr) and not all(isinstance(a, nodes.Const) for a in node.args):
            return False  # a method may join, format or search words
        if isinstance(node, nodes.Compare) and not isinstance(node.expr, nodes.Const):
            sought_in = [operand.expr for operand in node.ops if operand.op in ("in", "notin")]
            if not all(isinstance(where, (nodes.List, nodes.Tuple)) for where in sought_in):
                return False  # words are searched for in other words
    return True
