"""Records as chats or plain texts, by their fields, under other names where `columns` gives these.

SHAPES lists the fields that make a chat or a text. If several fit, the first that `comes_first` wins, then the one that
has the fields of the others; any others that give different results are a bad record. Beside a shape:

    system, system_prompt     the system message, if the chat has none
    tools, functions          the template's `tools`; also if a system message holds them
    history, context          earlier turns; the start of the user turn: of the shapes with one user turn
    loss_weight, weight       the weight of the record's target tokens
    image, audios, ...        a bad record, or left out: `media=drop`

`Record.unused` names the other fields.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_ext.text.json_records import BadRecord, read_record
from verl_ext.text.messages import (
    MEDIA,
    TEMPLATE_FIELDS,
    TOOL_FIELDS,
    Message,
    MessageReader,
    Turn,
    as_weight,
    called,
    from_json,
    shown,
    tool_list,
    without_placeholders,
)
from verl_ext.text.readers import TextFile
from verl_ext.values import choice_problem

WEIGHT_FIELDS = ("loss_weight", "weight")
SYSTEM_FIELDS = ("system", "system_prompt")
MEDIA_FIELDS = tuple(name for medium in MEDIA for name in (medium, f"{medium}s"))
LONGEST_CATEGORY = 200  # characters
SIDE_FIELDS = (*SYSTEM_FIELDS, *TOOL_FIELDS, "history", "context", *WEIGHT_FIELDS, *MEDIA_FIELDS)


@dataclass
class Chat:
    """Messages in the form of chat templates.

    targets: {index of an assistant turn that is trained on: the weight of its tokens, above 0}, in order.
    """

    messages: list[Message]
    targets: dict[int, float]
    tools: list[Any] | None = None

    def keep_last_target(self) -> None:
        """Make the last assistant turn the only target; there is none if its weight is 0."""
        last = max((i for i, m in enumerate(self.messages) if m["role"] == "assistant"), default=-1)
        self.targets = {i: weight for i, weight in self.targets.items() if i == last}


@dataclass
class PlainText:
    """A text of which every token but the first is a target."""

    text: str | TextFile


Content = Chat | PlainText


@dataclass
class Record:
    """The content of a record, and the weight of its target tokens, None if it is not given.

    unused: its fields that nothing reads. message_fields: fields of messages that only a template may know, with the
    number of messages. dropped: images, audio and video that were left out.
    """

    content: Content
    weight: float | None = None
    unused: list[str] = field(default_factory=list)
    message_fields: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


def parse_record(raw: Any, columns: Mapping[str, str | None] | None = None, drop_media: bool = False) -> Record:
    """Read a record by its fields. Raises `BadRecord` for a record that cannot be used.

    `columns` maps names of the table above to the record's own, `a.b` being field b of a; a name of None is not read.
    `drop_media`: leave out and count images, audio and video.
    """
    raw, columns = read_record(raw), columns or {}
    try:
        renamed, own_names = _renamed(raw, columns) if columns else (raw, {})
        fields = Fields({key: value for key, value in renamed.items() if value is not None}, drop_media)
        weight_name = fields.first(WEIGHT_FIELDS)
        weight = as_weight(fields.take(weight_name), weight_name) if weight_name else None
        _drop_media_fields(fields)
        content = _content(fields, [name for name, column in columns.items() if column])
    except RecursionError as error:
        raise BadRecord("malformed_json", "the record is nested too deep") from error
    if weight is not None and isinstance(content, Chat):
        for target in content.targets.values():
            as_weight(target * weight, "the weight of a turn times the record's")
    replaced = [name for name in columns if raw.get(name) is not None and name not in own_names.values()]
    unused = list(dict.fromkeys([*(own_names.get(name, name) for name in fields.unread), *replaced]))
    return Record(content, weight, unused, fields.message_fields, fields.reader.dropped)


def _renamed(raw: dict[str, Any], columns: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields under this module's names, and the record's own name of each that was renamed."""
    values, own_names = {}, {}
    for name, column in columns.items():
        if column:
            is_there, values[name] = field_of(raw, column)
            if not is_there:
                found = f"got {column}, it has {', '.join(map(str, raw)) or 'none'}"
                raise BadRecord("missing_column", f"columns.{name} must name a field of the record; {found}")
            own_names[name] = column if column in raw else column.partition(".")[0]
    taken = {*columns, *own_names.values()}
    return {**{key: value for key, value in raw.items() if key not in taken}, **values}, own_names


def _drop_media_fields(fields: "Fields") -> None:
    """Leave out the record's images, audio and video, and the `<image>` that stand for them in its texts."""
    for name in [name for name in MEDIA_FIELDS if name in fields.values]:
        value = fields.take(name)
        for item in value if isinstance(value, list) else [value]:
            if item not in (None, "", {}):
                fields.reader.drop(name.rstrip("s"), f"the record has {name}")
        del fields.values[name]
    if fields.reader.dropped:
        fields.values = without_placeholders(fields.values)


def field_of(raw: dict[str, Any], name: str) -> tuple[bool, Any]:
    """Return whether the record has a field, and its value; `a.b` is field b of a unless there is an `a.b`."""
    if name in raw:
        return True, raw[name]
    value: Any = raw
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value


def category_of(raw: Any, name: str) -> str | None:
    """Return the category that a record's field `name` gives; None if it has none or a blank one."""
    value = field_of(raw, name)[1] if isinstance(raw, dict) else None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() <= 64:
        return str(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    usable = isinstance(value, str) and len(value) <= LONGEST_CATEGORY and value.isprintable()
    if not usable:
        raise BadRecord(
            "bad_category",
            f"{name} (category_field) must be a string of one line and at most {LONGEST_CATEGORY} characters,"
            f" an integer of 64 bits or a bool; got {shown(value)}",
        )
    return str(value)


class Fields:
    """A record's fields, and those that were not read yet."""

    def __init__(self, values: dict[str, Any], drop_media: bool) -> None:
        self.values = values
        self.unread = dict.fromkeys(values)
        self.reader = MessageReader(drop_media)
        self.message_fields: Counter[str] = Counter()

    def first(self, names: Iterable[str]) -> str | None:
        """Return the first of the names that the record has."""
        return next((name for name in names if name in self.values), None)

    def take(self, name: str, default: Any = None) -> Any:
        """Read a field."""
        self.unread.pop(name, None)
        return self.values.get(name, default)

    def string(self, name: str) -> str:
        """Read a field that must be a string."""
        value = self.take(name)
        if not isinstance(value, str):
            raise BadRecord("non_string_content", f"{name} must be a string; got {type(value).__name__}")
        return value

    def messages(self, name: str, needs: str = "a list of messages") -> list[Any]:
        """Read a field that must be a list, or a list's JSON text; `needs` says it in the error."""
        value = from_json(self.take(name), name)
        if not isinstance(value, list):
            raise BadRecord("non_string_content", f"{name} must be {needs}; got {type(value).__name__}")
        if not value:
            raise BadRecord("empty", f"{name} is empty")
        return value


@dataclass(frozen=True)
class Shape:
    """The fields that make a record, each with its other names, and the function that reads those found.

    comes_first: it wins over every shape after it. accepts: asked about the first field's value.
    """

    fields: tuple[tuple[str, ...], ...]
    read: Callable[..., Content]
    optional: tuple[str, ...] = ()
    comes_first: bool = False
    accepts: Callable[[Any], bool] = lambda value: True

    def found(self, fields: Fields) -> list[str] | None:
        """Return the record's names of this shape's fields; None if one is missing."""
        found = [name for names in self.fields if (name := fields.first(names)) is not None]
        is_whole = len(found) == len(self.fields) and self.accepts(fields.values[found[0]])
        return found if is_whole else None

    @property
    def names(self) -> set[str]:
        """The names that it reads, beside those of any shape."""
        return {*self.optional, *(name for names in self.fields for name in names)}

    def __str__(self) -> str:
        optional = "".join(f"[+{name}]" for name in self.optional)
        return "+".join(names[0] for names in self.fields) + optional


def _content(fields: Fields, mapped: list[str]) -> Content:
    """Read the record by the shape that it has, one that reads all `mapped` names."""
    mapped = [name for name in mapped if name not in SIDE_FIELDS]
    fitting: list[tuple[Shape, list[str]]] = []
    for shape in SHAPES:
        if (not mapped or shape.names.issuperset(mapped)) and (names := shape.found(fields)) is not None:
            fitting.append((shape, names))
            if shape.comes_first:
                break
    if not fitting:
        found = ", ".join(map(str, fields.values)) or "none"
        known = f"known shapes: {_KNOWN_SHAPES}; columns={{…}} renames"
        raise BadRecord("unknown_fields", f"no known shape among the fields: {found}; {known}")
    # A shape that has the fields of another, and more, wins.
    rivals = [(shape, own) for shape, own in fitting if not any(set(own) < set(other) for _, other in fitting)]
    if len(fitting) > 1 and len({_result(shape, fields, names) for shape, names in rivals}) > 1:
        fits = " and ".join("+".join(names) for _, names in rivals)
        raise BadRecord("ambiguous", f"the record fits {fits}, which differ; columns={{…}} says which fields are meant")
    shape, names = rivals[0]
    return shape.read(fields, *names)


def _result(shape: Shape, fields: Fields, names: list[str]) -> str:
    """Return the result of reading the record by a shape, as text to be compared."""
    try:
        return repr(shape.read(Fields(fields.values, fields.reader.drop_media), *names))
    except BadRecord as error:
        return f"{error.reason}: {error}"


def _as_messages(fields: Fields, name: str) -> Chat:
    return _chat(fields.messages(name), fields)


def _pair(fields: Fields, question: str, answer: str) -> Chat:
    """Read a user turn and its answer, strings or messages; messages of the question are never targets."""
    if isinstance(fields.values[question], str) and isinstance(fields.values[answer], str):
        return _single_turn(fields.string(question), fields.string(answer), fields)
    before, after = (
        [{"role": role, "content": fields.take(name)}]
        if isinstance(fields.values[name], str)
        else fields.messages(name, "a string or a list of messages")
        for role, name in (("user", question), ("assistant", answer))
    )
    return _chat(before + after, fields, first_target=len(before))


def _alpaca(fields: Fields, instruction: str, answer: str) -> Chat:
    question = fields.string(instruction)
    if extra := fields.string("input") if "input" in fields.values else "":
        question = f"{question}\n{extra}" if question else extra
    return _single_turn(question, fields.string(answer), fields)


def _squad(fields: Fields, question: str, answers: str) -> Chat:
    found = from_json(fields.take(answers), answers)
    texts = found.get("text") if isinstance(found, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadRecord("non_string_content", f'{answers} must be {{"text": [strings]}}; got {type(found).__name__}')
    return _single_turn(fields.string(question), texts[0] if texts else "", fields)


def _xlam(fields: Fields, query: str, answers: str) -> Chat:
    return _single_turn(fields.string(query), called(fields.take(answers), answers), fields)


def _glaive(fields: Fields, name: str) -> Chat:
    """Read the turns of a text: each but the first has an empty line or `<|endoftext|>` before it."""
    roles = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
    head = rf"({'|'.join(roles)}):"
    text = fields.string(name)
    before, *parts = re.split(rf"(?:\A|\n[ \t]*\n|<\|endoftext\|>)\s*{head}", text)
    if before.strip() or len(parts) != 2 * len(re.findall(rf"^[ \t]*{head}", text, re.MULTILINE)):
        needed = "must be turns that begin with USER:, ASSISTANT: or FUNCTION RESPONSE:, an empty line between them"
        raise BadRecord("unknown_shape", f"{name} {needed}")
    texts = [text.strip().removesuffix("<|endoftext|>").strip() for text in parts[1::2]]
    turns = [{"role": roles[head], "content": text} for head, text in zip(parts[::2], texts, strict=True)]
    return _chat(turns, fields, system_prefix="SYSTEM:")


def _alternating(fields: Fields, name: str) -> Chat:
    texts = fields.messages(name)
    return _chat([{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)], fields)


def _text(fields: Fields, name: str) -> PlainText:
    if isinstance(fields.values[name], TextFile):
        return PlainText(fields.take(name))
    text = fields.string(name)
    if not text.strip():
        raise BadRecord("empty", f"{name} is empty")
    return PlainText(text)


SHAPES = (
    Shape((("messages",),), _as_messages, comes_first=True),
    Shape((("conversations",),), _as_messages, comes_first=True),  # ShareGPT: from/value or role/content
    # Alpaca: a user turn of both, an answer
    Shape((("instruction",), ("output", "response", "completion")), _alpaca, optional=("input",), comes_first=True),
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
    # USER:, ASSISTANT: and FUNCTION RESPONSE:, whose calls stay text
    Shape((("chat",),), _glaive, accepts=lambda value: isinstance(value, str) and "ASSISTANT:" in value),
    # UltraChat: user and assistant turns alternate
    Shape(
        (("data",),),
        _alternating,
        accepts=lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    ),
)
_KNOWN_SHAPES = " | ".join(map(str, SHAPES))
FIELDS = tuple(dict.fromkeys([*(name for shape in SHAPES for name in sorted(shape.names)), *SIDE_FIELDS]))


def _single_turn(question: str, answer: str | Message, fields: Fields) -> Chat:
    """Return a user turn and its answer, after the record's `history`; its `context` begins the user turn."""
    context = fields.take("context", "")
    if not isinstance(context, str):
        got = f"got {type(context).__name__}; columns={{context: null}} leaves it out"
        raise BadRecord("non_string_content", f"context must be a string; {got}")
    if context.strip():
        question = f"{context}\n\n{question}"
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer}
    return _chat([*_history(fields), {"role": "user", "content": question}, answer], fields)


def _history(fields: Fields) -> list[Message]:
    if not (given := fields.take("history")):
        return []
    history = from_json(given, "history")
    if isinstance(history, list) and all(isinstance(turn, dict) for turn in history):
        return history
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRecord("non_string_content", "history must be a list of [question, answer] pairs or of messages")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in history for role, text in zip(roles, pair, strict=True)]


def _chat(raw_messages: list[Any], fields: Fields, first_target: int = 0, system_prefix: str = "") -> Chat:
    """Return the chat of these messages with the record's system message and tools; targets begin at `first_target`."""
    turns = fields.reader.turns(raw_messages)
    system = _system(fields, turns[0].message) if turns else ""
    if system:
        text = system.removeprefix(system_prefix).strip() if system_prefix else system
        turns.insert(0, Turn({"role": "system", "content": text}))
        first_target += 1
    messages = [turn.message for turn in turns]
    weights = {i: 1.0 if turn.weight is None else turn.weight for i, turn in enumerate(turns) if i >= first_target}
    targets = {i: weight for i, weight in weights.items() if weight and messages[i]["role"] == "assistant"}
    if not targets:
        raise BadRecord("no_target", "no assistant turn to learn from")
    learnt = [messages[i] for i in targets]
    said = (value for message in learnt for key, value in message.items() if key != "role" and isinstance(value, str))
    if not any(value.strip() for value in said) and not any(message.get("tool_calls") for message in learnt):
        raise BadRecord("empty", "every assistant turn is empty")
    for message in messages:
        if not TEMPLATE_FIELDS.issuperset(message):
            fields.message_fields.update(str(key) for key in message if key not in TEMPLATE_FIELDS)
    return Chat(messages, targets, _tools(fields, turns))


def _system(fields: Fields, first: Message) -> str:
    """Return the system message of the record's fields; if the chat has its own, another stays unread."""
    given = [name for name in SYSTEM_FIELDS if name in fields.values]
    if first["role"] == "system":
        for name in given:
            if fields.values[name] in ("", first["content"]):
                fields.take(name)
        return ""
    texts = {fields.string(name) for name in given} - {""}
    if len(texts) > 1:
        raise BadRecord("ambiguous", f"{' and '.join(given)} differ; columns={{{given[1]}: null}} leaves one out")
    return texts.pop() if texts else ""


def _tools(fields: Fields, turns: list[Turn]) -> list[Any] | None:
    """Return the record's tools, or those of its system message. Raises `BadRecord` if both are given and differ."""
    given = [tool_list(fields.take(name), name) for name in TOOL_FIELDS if name in fields.values]
    given += [tool_list(value, name) for turn in turns for name, value in turn.tools.items()]
    found = [tools for tools in given if tools]
    if any(tools != found[0] for tools in found):
        raise BadRecord("bad_tools", "tools are given more than once, and differ")
    return found[0] if found else None


def column_problems(columns: Mapping[str, Any]) -> list[str]:
    """Return one line for every mistake in `columns`."""
    problems = [
        f"columns.{name} must be a column's name, or null; got {column!r}"
        for name, column in columns.items()
        if column is not None and not (isinstance(column, str) and column)
    ]
    problems += filter(None, (choice_problem("a name in columns", name, FIELDS) for name in columns))
    named = [name for name, column in columns.items() if column and name not in SIDE_FIELDS]
    if not problems and not any(shape.names.issuperset(named) for shape in SHAPES):
        problems.append(f"columns must name fields of one shape of {_KNOWN_SHAPES}; got {', '.join(named)}")
    return problems
