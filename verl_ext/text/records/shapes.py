"""Find a record's shape, and read its fields as chat or text.

SHAPES lists the shapes. If several fit a record, the first one that `comes_first` wins, and then the one that has all
fields of the others. If the remaining shapes give different results, the record is bad.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.options import must
from verl_ext.text.read.bad_record import BadRecord, readable_value
from verl_ext.text.read.json_records import from_json
from verl_ext.text.records.content import Content, PlainText
from verl_ext.text.records.fields import SIDE_FIELDS, Fields, chat_of
from verl_ext.text.records.messages import Chat
from verl_ext.text.records.tool_calls import called
from verl_ext.text.records.turns import (
    SPEAKERS,
    answer_turns,
    decoded_messages,
    hh_turns,
    is_whole_chat,
    read_prompt,
    repeats,
    role_of,
)


@dataclass(frozen=True)
class Shape:
    """A shape of records: fields with their other names, and reader.

    comes_first: the shape wins over every shape after it. own: fields that make a record one of this shape or of one
    that comes before it, and keep it out of all others. accepts: a test of values of `own`, or else of the first field.
    """

    fields: tuple[tuple[str, ...], ...]
    read: Callable[..., Content]
    optional: tuple[str, ...] = ()
    comes_first: bool = False
    own: tuple[str, ...] = ()
    accepts: Callable[[Any], bool] = lambda value: True

    def found(self, fields: Fields) -> list[str] | None:
        """Return the record's names of this shape's fields, also of those that are null; None: no fit."""
        found: list[str] = []
        for names in self.fields:
            if (name := fields.first(names)) is None:
                return None
            found.append(name)
        return found if self._may_have(fields, found[0]) else None

    def own_fields(self, fields: Fields) -> list[str]:
        """Return the record's names of `own`, also of those that are null."""
        return [name for name in self.own if fields.first([name]) and self._may_have(fields, name)]

    def _may_have(self, fields: Fields, name: str) -> bool:
        """Return whether a value may be this shape's; null and an unreadable one may."""
        value = fields.values.get(name)
        return value is None or isinstance(value, BadRecord) or self.accepts(value)

    @property
    def names(self) -> set[str]:
        """The names that this shape reads, beside those of any shape."""
        return {*self.optional, *(name for names in self.fields for name in names)}

    def __str__(self) -> str:
        optional = "".join(f"[+{name}]" for name in self.optional)
        return "+".join(names[0] for names in self.fields) + optional


def read_content(fields: Fields, mapped: list[str], shapes: Sequence[Shape]) -> Content:
    """Read a record by one of the shapes, which must read all `mapped` names.

    Names alone decide on the shape. If a field of it is null, the record is bad: what else it has may be learnt only if
    the whole record says so.
    """
    mapped = [name for name in mapped if name not in SIDE_FIELDS]
    fitting: list[tuple[Shape, list[str]]] = []
    for shape in shapes:
        if mapped and not shape.names.issuperset(mapped):
            continue
        names, own = shape.found(fields), shape.own_fields(fields)
        if names is not None:
            fitting.append((shape, names))
            if shape.comes_first:
                break
        elif own:
            needed = f"a record with {' and '.join(own)} must have {'+'.join(names[0] for names in shape.fields)}"
            raise BadRecord(
                "no_pair", f"{needed}; its fields: {_named(fields)}; columns={{{own[0]}: null}} leaves it out"
            )
    if not fitting:
        known_shapes = tuple(dict.fromkeys((*SHAPES, *shapes)))
        for name in field_names(known_shapes):
            readable_value(fields.values.get(name))  # it may be what no shape was found without
        known = f"known shapes: {' | '.join(map(str, known_shapes))}; columns={{…}} renames"
        raise BadRecord("unknown_fields", f"no known shape among the fields: {_named(fields)}; {known}")
    # A shape wins if it has the fields of another shape and more.
    fitting = [(shape, own) for shape, own in fitting if not any(set(own) < set(other) for _, other in fitting)]
    for shape, names in fitting:
        if nulls := [name for name in names if name in fields.nulls]:
            needed = "have values, or null_fields=absent read the record without them"
            line = must(" and ".join(names), needed, f"null in {' and '.join(nulls)}")
            raise BadRecord("no_pair" if shape.own else "null_field", line)
    if len(fitting) > 1 and len({_result(shape, fields, names) for shape, names in fitting}) > 1:
        fits = " and ".join("+".join(names) for _, names in fitting)
        got = f"the record fits {fits}, which differ"
        raise BadRecord("ambiguous", f"{got}; columns={{…}} says which fields to use")
    shape, names = fitting[0]
    return shape.read(fields, *names)


def _named(fields: Fields) -> str:
    return ", ".join(map(str, [*fields.values, *(f"{name} (null)" for name in sorted(fields.nulls))])) or "none"


def _result(shape: Shape, fields: Fields, names: list[str]) -> str:
    """Return a record's content by one shape, as text for comparison."""
    try:
        return repr(shape.read(fields.copy(), *names))
    except BadRecord as error:
        return f"{error.reason}: {error}"


def _as_messages(fields: Fields, name: str) -> Chat:
    return chat_of(fields.messages(name), fields)


def _pair(fields: Fields, question: str, answer: str) -> Chat:
    return _answered(fields, question, answer, fields.take(answer))


def _answered(fields: Fields, question: str, name: str, answer: Any) -> Chat:
    """Return the chat of a prompt and its answer. Turns that the prompt's own value holds are never targets."""
    prompt, answers = decoded_messages(fields, fields.values[question], {name: answer})
    turns = answer_turns(answers[name], name)
    if not any(role_of(turn) in SPEAKERS for turn in turns):
        raise BadRecord("no_target", f"{name} has no assistant turn to learn from")
    if is_whole_chat(turns) and repeats(prompt, turns, fields):  # the prompt stands in it already
        fields.take(question)
        return chat_of(turns, fields, first_target=len(prompt) if isinstance(prompt, list) else 0)
    before = read_prompt(fields, question, prompt)
    is_one_turn = isinstance(prompt, str) and not hh_turns(prompt, is_prompt=True)
    return chat_of(before + turns, fields, first_target=0 if is_one_turn else len(before))


def _squad(fields: Fields, question: str, answers: str) -> Chat:
    found = from_json(fields.take(answers), answers)
    texts = found.get("text") if isinstance(found, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadRecord("non_string_content", must(answers, 'be {"text": [strings]}', type(found).__name__))
    return _answered(fields, question, answers, texts[0] if texts else "")


def _xlam(fields: Fields, query: str, answers: str) -> Chat:
    return _answered(fields, query, answers, called(fields.take(answers), answers))


def _glaive(fields: Fields, name: str) -> Chat:
    """Read a text's turns, separated by an empty line or `<|endoftext|>`."""
    roles = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
    head = rf"({'|'.join(roles)}):"
    text = fields.string(name)
    before, *parts = re.split(rf"(?:\A|\n[ \t]*\n|<\|endoftext\|>)\s*{head}", text)
    if before.strip() or len(parts) != 2 * len(re.findall(rf"^[ \t]*{head}", text, re.MULTILINE)):
        needed = "must be turns that begin with USER:, ASSISTANT: or FUNCTION RESPONSE:, an empty line between them"
        raise BadRecord("unknown_shape", f"{name} {needed}")
    texts = [text.strip().removesuffix("<|endoftext|>").strip() for text in parts[1::2]]
    turns = [{"role": roles[head], "content": text} for head, text in zip(parts[::2], texts, strict=True)]
    return chat_of(turns, fields, system_prefix="SYSTEM:")


def _alternating(fields: Fields, name: str) -> Chat:
    texts = fields.messages(name)
    return chat_of([{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)], fields)


def _text(fields: Fields, name: str) -> PlainText:
    text = fields.string(name)
    if not text.strip():
        raise BadRecord("empty", f"{name} is empty")
    return PlainText(text)


SHAPES = (
    Shape((("messages",),), _as_messages, comes_first=True),
    Shape((("conversations",),), _as_messages, comes_first=True),  # ShareGPT: from/value or role/content
    # Alpaca: a user turn of instruction and input, and an answer
    Shape((("instruction",), ("output", "response", "completion")), _pair, optional=("input",), comes_first=True),
    Shape((("prompt",), ("response", "completion")), _pair, comes_first=True),  # strings or messages
    Shape((("question",), ("answer",)), _pair, comes_first=True),
    Shape((("text",),), _text),  # no template
    Shape(
        (("conversation",),),
        _as_messages,
        accepts=lambda value: isinstance(value, list) or str(value).lstrip().startswith("["),
    ),
    Shape((("question",), ("response",)), _pair),  # OpenOrca
    Shape((("query",), ("response",)), _pair),
    Shape((("input",), ("output",)), _pair),
    Shape((("inputs",), ("targets",)), _pair),
    Shape((("question",), ("answers",)), _squad),  # {"text": [...]}: the first of the answers
    Shape((("query",), ("answers",)), _xlam),  # a list of calls, or its JSON text
    # USER:, ASSISTANT: and FUNCTION RESPONSE:; tool calls in them stay text
    Shape((("chat",),), _glaive, accepts=lambda value: isinstance(value, str) and "ASSISTANT:" in value),
    # UltraChat: user and assistant turns alternate
    Shape(
        (("data",),),
        _alternating,
        accepts=lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    ),
)


def field_names(shapes: Iterable[Shape]) -> tuple[str, ...]:
    """Return the names that a record of these shapes may have."""
    return tuple(dict.fromkeys([*(name for shape in shapes for name in sorted(shape.names)), *SIDE_FIELDS]))
