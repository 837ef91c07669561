"""The fields of a record, and the chat that its messages make together with them."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from verl_ext.options import must
from verl_ext.text.read.bad_record import BadRecord, readable_value, short_text
from verl_ext.text.read.json_records import from_json
from verl_ext.text.records.messages import (
    MEDIA,
    TEMPLATE_FIELDS,
    TOOL_FIELDS,
    Chat,
    Message,
    MessageReader,
    Turn,
    TurnMask,
    as_flag,
)
from verl_ext.text.records.tool_calls import tool_list

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
    """The fields of a record, and those that were not read yet.

    values: the fields that have a value. nulls: the names of the others, which decide on the shape all the same.
    is_row: the record is a row of a table, whose cells may hold JSON. readings: how unusual texts were read.
    """

    def __init__(self, given: dict[str, Any], drop_media: bool, default_system: str = "", is_row: bool = False) -> None:
        self.values = {name: value for name, value in given.items() if value is not None}
        self.nulls = given.keys() - self.values.keys()
        self.default_system, self.is_row = default_system, is_row
        self.has_default = False  # whether a chat got the default system prompt
        self.unread = {name: None for name in given if name in self.values or name not in SIDE_FIELDS}
        self.reader = MessageReader(drop_media)
        self.message_fields: defaultdict[str, int] = defaultdict(int)
        self.readings: set[str] = set()

    def copy(self) -> "Fields":
        """Return the fields as if none had been read."""
        given = {**self.values, **dict.fromkeys(self.nulls)}
        return Fields(given, self.reader.drop_media, self.default_system, self.is_row)

    def first(self, names: Iterable[str]) -> str | None:
        """Return the first of the names that the record has, with a value or null."""
        return next((name for name in names if name in self.values or name in self.nulls), None)

    def take(self, name: str, default: Any = None) -> Any:
        """Read a field."""
        self.unread.pop(name, None)
        return readable_value(self.values.get(name, default))

    def string(self, name: str) -> str:
        """Read a field that must be a string."""
        value = self.take(name)
        if not isinstance(value, str):
            raise BadRecord("non_string_content", must(name, "be a string", type(value).__name__))
        return value

    def messages(self, name: str, needs: str = "a list of messages") -> list[Any]:
        """Read a list, or its JSON text; errors say what it `needs`."""
        value = from_json(self.take(name), name)
        if not isinstance(value, list):
            raise BadRecord("non_string_content", must(name, f"be {needs}", type(value).__name__))
        if not value:
            raise BadRecord("empty", f"{name} is empty")
        return value


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
    roles: dict[int, str] = {}
    unsaid: dict[int, str] = {}
    is_empty = True
    for i, (message, weight, mask, _, texts_of_calls, _, _, own_role, place) in enumerate(turns):
        if weight != 0 and i >= first_target and message["role"] == "assistant":
            targets[i] = 1.0 if weight is None else weight
            is_empty = is_empty and not _says_something(message)
        if mask is not None:
            masks[i] = mask
        for number, text in texts_of_calls.items():
            texts[i, number] = text
        if own_role:
            roles[i] = own_role
        if place:
            unsaid[i] = place
        if not TEMPLATE_FIELDS.issuperset(message):
            for key in [key for key in message if key not in TEMPLATE_FIELDS]:
                fields.message_fields[str(key)] += 1
    if not targets:
        raise BadRecord("no_target", "no assistant turn to learn from")
    if is_empty:
        raise BadRecord("empty", "every assistant turn is empty")
    thoughts = tuple([i for i, turn in enumerate(turns) if turn.has_thought])
    tools, kwargs = _tools(fields, turns), _template_kwargs(fields)
    # Text of JSON is what a table makes of tools; `functions` are such a text in themselves.
    of_system = {
        i: turn.tools
        for i, turn in enumerate(turns)
        if turn.tools and all(name == "functions" or not isinstance(value, str) for name, value in turn.tools.items())
    }
    own = {} if any(fields.values.get(name) for name in TOOL_FIELDS) else of_system  # the record's are the template's
    return Chat(messages, targets, tools, masks, texts, kwargs, thoughts, 0, roles, unsaid, own)


def _says_something(message: Message) -> bool:
    said = [key for key, value in message.items() if key != "role" and isinstance(value, str) and value.strip()]
    return bool(said or message.get("tool_calls"))


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    if fields.values.keys().isdisjoint(TEMPLATE_ARGUMENTS):
        return {}
    thinking, name = fields.take("enable_thinking"), "chat_template_kwargs"
    given = from_json(fields.take(name) or {}, name)
    if not isinstance(given, dict):
        raise BadRecord("bad_template_kwargs", must(name, "be an object", short_text(given)))
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
