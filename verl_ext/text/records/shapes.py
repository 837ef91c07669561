"""Find a record's shape, and read its fields as chat or text.

SHAPES lists the shapes. If several fit a record, the first one that `comes_first` wins, and then the one that has all
fields of the others. If the remaining shapes give different results, the record is bad.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.text.read.bad_record import BadRecord, readable_value, short_text
from verl_ext.text.read.json_records import from_json
from verl_ext.text.read.readers import TextFile
from verl_ext.text.records.messages import (
    MEDIA,
    TEMPLATE_FIELDS,
    TOOL_FIELDS,
    Chat,
    Message,
    MessageReader,
    PlainText,
    Turn,
    TurnMask,
    as_flag,
)
from verl_ext.text.records.preference import Content
from verl_ext.text.records.tool_calls import called, tool_list

WEIGHT_FIELDS = ("loss_weight", "weight")
SYSTEM_FIELDS = ("system", "system_prompt")
MEDIA_FIELDS = tuple(name for medium in MEDIA for name in (medium, f"{medium}s"))
TEMPLATE_ARGUMENTS = ("enable_thinking", "chat_template_kwargs")
LABEL = "kto_tag"  # of an answer that is desirable or not
SIDE_FIELDS = (
    *(*SYSTEM_FIELDS, *TOOL_FIELDS, "history", "context", LABEL),
    *(*TEMPLATE_ARGUMENTS, *WEIGHT_FIELDS, *MEDIA_FIELDS),
)
# The arguments of `apply_chat_template` that the package sets itself.
RESERVED_TEMPLATE_KWARGS = frozenset(
    (
        *("conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "messages"),
    )
)


class Fields:
    """The fields of a record, and those that were not read yet."""

    def __init__(self, values: dict[str, Any], drop_media: bool, default_system: str = "") -> None:
        self.values, self.default_system = values, default_system
        self.has_default = False  # whether a chat got the default system prompt
        self.unread = dict.fromkeys(values)
        self.reader = MessageReader(drop_media)
        self.message_fields: defaultdict[str, int] = defaultdict(int)

    def first(self, names: Iterable[str]) -> str | None:
        """Return the first of the names that the record has."""
        for name in names:
            if name in self.values:
                return name
        return None

    def take(self, name: str, default: Any = None) -> Any:
        """Read a field."""
        self.unread.pop(name, None)
        return readable_value(self.values.get(name, default))

    def string(self, name: str) -> str:
        """Read a field that must be a string."""
        value = self.take(name)
        if not isinstance(value, str):
            raise BadRecord("non_string_content", f"{name} must be a string; got {type(value).__name__}")
        return value

    def messages(self, name: str, needs: str = "a list of messages") -> list[Any]:
        """Read a list, or its JSON text; errors say what it `needs`."""
        value = from_json(self.take(name), name)
        if not isinstance(value, list):
            raise BadRecord("non_string_content", f"{name} must be {needs}; got {type(value).__name__}")
        if not value:
            raise BadRecord("empty", f"{name} is empty")
        return value


@dataclass(frozen=True)
class Shape:
    """A shape of records: fields with their other names, and reader.

    comes_first: the shape wins over every shape after it. accepts: a test of the first field's value.
    """

    fields: tuple[tuple[str, ...], ...]
    read: Callable[..., Content]
    optional: tuple[str, ...] = ()
    comes_first: bool = False
    accepts: Callable[[Any], bool] = lambda value: True

    def found(self, fields: Fields) -> list[str] | None:
        """Return the record's names of this shape's fields; None: no fit."""
        found: list[str] = []
        for names in self.fields:
            if (name := fields.first(names)) is None:
                return None
            found.append(name)
        return found if self.accepts(fields.values[found[0]]) else None

    @property
    def names(self) -> set[str]:
        """The names that this shape reads, beside those of any shape."""
        return {*self.optional, *(name for names in self.fields for name in names)}

    def __str__(self) -> str:
        optional = "".join(f"[+{name}]" for name in self.optional)
        return "+".join(names[0] for names in self.fields) + optional


def read_content(fields: Fields, mapped: list[str], shapes: Sequence[Shape]) -> Content:
    """Read a record by one of the shapes, which must read all `mapped` names."""
    mapped = [name for name in mapped if name not in SIDE_FIELDS]
    fitting: list[tuple[Shape, list[str]]] = []
    for shape in shapes:
        if (not mapped or shape.names.issuperset(mapped)) and (names := shape.found(fields)) is not None:
            fitting.append((shape, names))
            if shape.comes_first:
                break
    if not fitting:
        known_shapes = tuple(dict.fromkeys((*SHAPES, *shapes)))
        for name in field_names(known_shapes):
            readable_value(fields.values.get(name))  # it may be what no shape was found without
        found = ", ".join(map(str, fields.values)) or "none"
        known = f"known shapes: {' | '.join(map(str, known_shapes))}; columns={{…}} renames"
        raise BadRecord("unknown_fields", f"no known shape among the fields: {found}; {known}")
    if len(fitting) > 1:  # a shape wins if it has the fields of another shape and more
        fitting = [(shape, own) for shape, own in fitting if not any(set(own) < set(other) for _, other in fitting)]
        if len({_result(shape, fields, names) for shape, names in fitting}) > 1:
            fits = " and ".join("+".join(names) for _, names in fitting)
            got = f"the record fits {fits}, which differ"
            raise BadRecord("ambiguous", f"{got}; columns={{…}} says which fields are meant")
    shape, names = fitting[0]
    return shape.read(fields, *names)


def _result(shape: Shape, fields: Fields, names: list[str]) -> str:
    """Return a record's content by one shape, as text for comparison."""
    try:
        return repr(shape.read(Fields(fields.values, fields.reader.drop_media, fields.default_system), *names))
    except BadRecord as error:
        return f"{error.reason}: {error}"


def _as_messages(fields: Fields, name: str) -> Chat:
    return chat_of(fields.messages(name), fields)


def _pair(fields: Fields, question: str, answer: str) -> Chat:
    """Read a user turn, never a target, and its answer."""
    if isinstance(fields.values[question], str) and isinstance(fields.values[answer], str):
        return _single_turn(fields.string(question), fields.string(answer), fields)
    before, after = (
        [{"role": role, "content": fields.take(name)}]
        if isinstance(fields.values[name], str)
        else fields.messages(name, "a string or a list of messages")
        for role, name in (("user", question), ("assistant", answer))
    )
    return chat_of(before + after, fields, first_target=len(before))


def _alpaca(fields: Fields, instruction: str, answer: str) -> Chat:
    return _single_turn(with_input(fields, instruction), fields.string(answer), fields)


def with_input(fields: Fields, instruction: str) -> str:
    """Return an instruction, and the record's `input` on a line below it."""
    question = fields.string(instruction)
    extra = fields.string("input") if "input" in fields.values else ""
    return "\n".join(filter(None, (question, extra)))


def _squad(fields: Fields, question: str, answers: str) -> Chat:
    found = from_json(fields.take(answers), answers)
    texts = found.get("text") if isinstance(found, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadRecord("non_string_content", f'{answers} must be {{"text": [strings]}}; got {type(found).__name__}')
    return _single_turn(fields.string(question), texts[0] if texts else "", fields)


def _xlam(fields: Fields, query: str, answers: str) -> Chat:
    return _single_turn(fields.string(query), called(fields.take(answers), answers), fields)


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
    if isinstance(fields.values[name], TextFile):
        return PlainText(fields.take(name))
    text = fields.string(name)
    if not text.strip():
        raise BadRecord("empty", f"{name} is empty")
    return PlainText(text)


SHAPES = (
    Shape((("messages",),), _as_messages, comes_first=True),
    Shape((("conversations",),), _as_messages, comes_first=True),  # ShareGPT: from/value or role/content
    # Alpaca: a user turn of instruction and input, and an answer
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


def _single_turn(question: str, answer: str | Message, fields: Fields) -> Chat:
    """Return the chat of `history`, `context` with the question, and the answer."""
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer}
    return chat_of([*question_turns(question, fields), answer], fields)


def question_turns(question: str, fields: Fields) -> list[Message]:
    """Return the record's `history`, and a user turn after its `context`."""
    context = fields.take("context", "")
    if not isinstance(context, str):
        got = f"got {type(context).__name__}; columns={{context: null}} leaves it out"
        raise BadRecord("non_string_content", f"context must be a string; {got}")
    if context.strip():
        question = f"{context}\n\n{question}"
    return [*_history(fields), {"role": "user", "content": question}]


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


def chat_of(raw_messages: list[Any], fields: Fields, first_target: int = 0, system_prefix: str = "") -> Chat:
    """Return the record's chat of messages, with targets from `first_target` on."""
    turns = fields.reader.turns(raw_messages)
    system = _system(fields, turns[0].message) if turns else ""
    if turns and not system and fields.default_system and turns[0].message["role"] not in ("system", "developer"):
        system, system_prefix, fields.has_default = fields.default_system, "", True
    if system:
        text = system.removeprefix(system_prefix).strip() if system_prefix else system
        turns.insert(0, Turn({"role": "system", "content": text}))
        first_target += 1
    messages = [turn.message for turn in turns]
    targets: dict[int, float] = {}
    masks: dict[int, TurnMask] = {}
    texts: dict[tuple[int, int], str] = {}
    is_empty = True
    for i, (message, weight, mask, _, texts_of_calls, *_) in enumerate(turns):
        if weight != 0 and i >= first_target and message["role"] == "assistant":
            targets[i] = 1.0 if weight is None else weight
            is_empty = is_empty and not _says_something(message)
        if mask is not None:
            masks[i] = mask
        for number, text in texts_of_calls.items():
            texts[i, number] = text
        if not TEMPLATE_FIELDS.issuperset(message):
            for key in [key for key in message if key not in TEMPLATE_FIELDS]:
                fields.message_fields[str(key)] += 1
    if not targets:
        raise BadRecord("no_target", "no assistant turn to learn from")
    if is_empty:
        raise BadRecord("empty", "every assistant turn is empty")
    thoughts = tuple([i for i, turn in enumerate(turns) if turn.has_thought])
    return Chat(messages, targets, _tools(fields, turns), masks, texts, _template_kwargs(fields), thoughts)


def _says_something(message: Message) -> bool:
    said = [key for key, value in message.items() if key != "role" and isinstance(value, str) and value.strip()]
    return bool(said or message.get("tool_calls"))


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    if fields.values.keys().isdisjoint(TEMPLATE_ARGUMENTS):
        return {}
    thinking, name = fields.take("enable_thinking"), "chat_template_kwargs"
    given = from_json(fields.take(name) or {}, name)
    if not isinstance(given, dict):
        raise BadRecord("bad_template_kwargs", f"{name} must be an object; got {short_text(given)}")
    kwargs = {key: value for key, value in given.items() if value is not None}
    if reserved := RESERVED_TEMPLATE_KWARGS.intersection(kwargs):
        raise BadRecord("bad_template_kwargs", f"{name} must not set {', '.join(sorted(reserved))}")
    if isinstance(thinking, str):  # of a CSV file
        thinking = {"true": True, "false": False, "": None}.get(thinking.lower(), thinking)
    if thinking is None:
        return kwargs
    is_thinking = bool(as_flag(thinking, "enable_thinking", "bad_template_kwargs"))
    if kwargs.setdefault("enable_thinking", is_thinking) != is_thinking:
        raise BadRecord("bad_template_kwargs", f"enable_thinking and {name} must agree; got {thinking} beside another")
    return kwargs


def _system(fields: Fields, first: Message) -> str:
    """Return the record's system message; one beside the chat's stays unread."""
    given = [name for name in SYSTEM_FIELDS if name in fields.values]
    if not given:
        return ""
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
    """Return the tools of record or system message, if equal. Raises `BadRecord`."""
    given = [tool_list(fields.take(name), name) for name in TOOL_FIELDS if name in fields.values]
    given += [tool_list(value, name) for turn in turns for name, value in turn.tools.items()]
    found = [tools for tools in given if tools]
    if not found:
        return None
    if any(tools != found[0] for tools in found):
        raise BadRecord("bad_tools", "tools are given more than once, and differ")
    return found[0]
