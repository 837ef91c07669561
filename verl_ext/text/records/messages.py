"""Read a record's messages for chat templates, with their loss weights.

A message's weight is given by `weight` (a number of at least 0) or by `loss`, `loss_mask`, `train`, `training` or
`trainable` (true or false); these fields are removed. The default is 1. Only assistant turns can be learnt: another
message may say 0 or false. It may say 1 or true only if every message of the record does, because some programs always
write the field.

Parts of a turn may have weights of their own, which multiply the message's weight; names and meanings follow axolotl:

    content [{"type": "text", "text": …, "train": false}]    a part, also of reasoning_content; 1 by default
    train_detail [{"begin_offset": 0, "end_offset": 8, "train": true}]    characters 0 to 8 of the content; 0 elsewhere

`train_on_reasoning` and `train_on_tool_calls` (true or false) override the command's options for one message.

Every other field is passed to the template. The arguments of tool calls are objects there, however they are written.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from verl_ext.options import must
from verl_ext.text.read.bad_record import BadRecord, short_text
from verl_ext.text.read.json_records import from_json, parse_json
from verl_ext.text.records.content import Content, Render
from verl_ext.text.records.reasoning import REASONING_TAGS
from verl_ext.text.records.tool_calls import called, function_of, read_calls

ROLES = {
    **{name: name for name in ("system", "developer", "user")},
    "human": "user",
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
    **dict.fromkeys(("tool", "function", "function_response", "observation", "tool_response"), "tool"),
    **dict.fromkeys(("environment", "ipython"), "tool"),
}
LEARN_FIELDS = ("weight", "loss", "loss_mask", "train", "training", "trainable")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_THOUGHT = re.compile("|".join(rf"\s*{re.escape(a)}(.*?){re.escape(b)}" for a, b in REASONING_TAGS), re.DOTALL)
_PART_FIELDS = ("train_on_reasoning", "train_on_tool_calls", "train_detail", *REASONING_FIELDS)
TEMPLATE_FIELDS = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", *REASONING_FIELDS))
TOOL_FIELDS = ("tools", "functions")
_NO_WORDS = ("name", "tool_call_id", "id", *_PART_FIELDS[:3])  # fields that say nothing for a message without content
OWN_ROLE = "role in the record"  # the field of a message in which `MessageNames` keeps the name of a renamed role
MEDIA = ("image", "audio", "video")
FLOAT32 = (1.5e-45, 3.4e38)  # the smallest and largest weights
_PLACEHOLDER = re.compile(r"\n?<(?:image|audio|video)>\Z|<(?:image|audio|video)>\n?")
Message = dict[str, Any]


Stretch = tuple[int, float]  # the end of a stretch of characters, from the end of the previous one on, and its weight


@dataclass(slots=True)
class TurnMask:
    """The weights that a record gives to parts of a turn."""

    reasoning: bool | None = None  # whether reasoning is learnt; None: as the options say
    tool_calls: bool | None = None  # likewise
    stretches: dict[str, list[Stretch]] = field(default_factory=dict)  # weights of a field's characters, by its name


class Turn(NamedTuple):
    """A message, its weight or None, and the weights of its parts."""

    message: Message
    weight: float | None = None
    mask: TurnMask | None = None
    tools: Mapping[str, Any] = MappingProxyType({})  # that a system message holds
    argument_texts: Mapping[int, str] = MappingProxyType({})  # as in `Chat`, by the call's index in the turn
    is_call: bool = False  # a message of its own for calls, which continues the assistant's turn before it
    has_thought: bool = False  # its content is a thought in tags, which a call follows
    role: str = ""  # its role's name in the record, if that is another one
    unsaid: str = ""  # its place in the record, if it has no content, and other fields may say what it does


@dataclass(frozen=True)
class Chat(Content):
    """A chat in the form that chat templates take.

    targets: {index of an assistant turn that is trained on: the weight of its tokens, above 0}, in order.
    masks: {index of a message: the weights of its parts}, for the messages whose parts have weights.
    argument_texts: {(index of a message, of its call): the JSON text}, for calls whose arguments the record has as
    text; in `messages` all arguments are objects. template_kwargs: the record's own arguments of the template.
    thoughts: the indices of messages whose content is a thought in tags, and a call follows. shared: the number of
    leading messages that are the prompt of several answers; 0 for a chat alone.
    roles: {index of a message that is not an assistant's: its role's name in the record, if that is another one}, under
    which a template that compares it gets the message. unsaid: {index of a message without content: its place}, of
    which the template must read another field. system_tools: {index of a system message: its tools}, which are also
    `tools`, and stay in the message if the template reads them there.
    """

    messages: list[Message]
    targets: dict[int, float]
    tools: list[Any] | None = None
    masks: dict[int, TurnMask] = field(default_factory=dict)
    argument_texts: dict[tuple[int, int], str] = field(default_factory=dict)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    thoughts: tuple[int, ...] = ()
    shared: int = 0
    roles: dict[int, str] = field(default_factory=dict)
    unsaid: dict[int, str] = field(default_factory=dict)
    system_tools: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def chats(self) -> Sequence["Chat"]:
        """The chat alone."""
        return (self,)

    def texts(self, render: Render) -> Sequence[Sequence[Any]]:
        """Return each of the chat's texts alone."""
        return [[text] for text in render(self)]

    def with_thoughts_in(self, name: str) -> "Chat":
        """Return the chat with its `thoughts` in a field, without their tags."""
        messages = list(self.messages)
        for index in self.thoughts:
            mask = self.masks.get(index)
            if (thought := thought_in(messages[index]["content"])) and not (mask and mask.stretches):
                messages[index] = {**messages[index], "content": "", name: thought}
        return replace(self, messages=messages, thoughts=())

    def with_last_target(self) -> "Chat":
        """Return the chat with at most its last assistant turn as target."""
        last = max((i for i, m in enumerate(self.messages) if m["role"] == "assistant"), default=-1)
        return replace(self, targets={i: weight for i, weight in self.targets.items() if i == last})

    def with_argument_texts(self) -> "Chat":
        """Return the chat with its calls' arguments as text, own or JSON."""
        return self.with_arguments(
            lambda place, given: self.argument_texts.get(place) or json.dumps(given, ensure_ascii=False)
        )

    def with_arguments(self, change: Callable[[tuple[int, int], Any], Any]) -> "Chat":
        """Return the chat with `change(place, arguments)` as the arguments of each call.

        place: as in `argument_texts`.
        """
        messages = list(self.messages)
        for index, message in enumerate(messages):
            calls = list(message.get("tool_calls") or ())
            for number, call in enumerate(calls):
                function = function_of(call)
                if "arguments" in function:
                    changed = {**function, "arguments": change((index, number), function["arguments"])}
                    calls[number] = changed if function is call else {**call, "function": changed}
            if calls:
                messages[index] = {**message, "tool_calls": calls}
        return replace(self, messages=messages)


class MessageReader:
    """A reader of messages, which counts what it changes.

    dropped: the images, audio and video left out. text_calls: the messages of calls (`function_call`) that are not JSON
    of a call, and are read as text.
    """

    def __init__(self, drop_media: bool = False) -> None:
        self.drop_media = drop_media
        self.dropped: defaultdict[str, int] = defaultdict(int)
        self.text_calls = 0

    def turns(self, raw_messages: list[Any]) -> list[Turn]:
        """Read all messages. Raises `BadRecord` with a message's number and the reason."""
        turns: list[Turn] = []
        for number, raw in enumerate(raw_messages, start=1):
            turn = self._turn(raw, f"message {number}")
            if turn.is_call and turns and turns[-1].message["role"] == "assistant":
                turns[-1] = _continued(turns[-1], turn, f"message {number}")
            else:
                turns.append(turn)
        others = [i for i, turn in enumerate(turns) if turn.weight and turn.message["role"] != "assistant"]
        if others and any(turn.weight != 1 for turn in turns):
            where = f"message {others[0] + 1} ({turns[others[0]].message['role']})"
            raise BadRecord("bad_weight", f"{where} is to be learnt; only assistant turns can be")
        return turns

    def _turn(self, raw: Any, where: str) -> Turn:
        if not isinstance(raw, dict):
            raise BadRecord("non_string_content", must(where, "be an object", type(raw).__name__))
        name, text = raw.get("role"), raw.get("content")
        role = ROLES.get(name, "function_call") if isinstance(name, str) else "function_call"
        if len(raw) == 2 and isinstance(text, str) and role != "function_call":  # as most messages are
            return Turn({"role": role, "content": text}, role=_own_role(str(name), role))
        fields = {key: value for key, value in raw.items() if value is not None}
        own_name = fields.pop(OWN_ROLE, None)
        name = fields.pop("role", None) or fields.pop("from", None)
        if not isinstance(name, str) or name.lower() not in ROLES:
            known = f"known roles: {', '.join(ROLES)}; roles={{NAME: tool}} reads another as one of these"
            raise BadRecord("unknown_role", f"{where} has role {short_text(name)}; {known}")
        role = ROLES[name.lower()]
        own_role = _own_role(str(own_name or name), role)
        weight = _learnt(fields, where)
        tools = {key: fields.pop(key) for key in TOOL_FIELDS if key in fields} if role == "system" else {}
        if "function_call" in fields:
            if fields.get("tool_calls"):
                raise BadRecord("bad_tools", f"{where} has function_call and tool_calls; it must have one of them")
            name = f"{where}: function_call"
            fields["tool_calls"] = called([from_json(fields.pop("function_call"), name)], name)["tool_calls"]
        text = fields.pop("content", None)
        text = fields.pop("value", None) if text is None else text
        unsaid = f"{where} ({role})" if text is None and not fields.get("tool_calls") else ""
        if unsaid and not any(value for name, value in fields.items() if name not in _NO_WORDS):
            raise BadRecord("non_string_content", f"{unsaid} has no content")
        if role == "tool" and isinstance(text, (dict, int, float)):  # of an API's log
            text = json.dumps(text, ensure_ascii=False)
        content, mask = text, None
        if not isinstance(text, str) or not fields.keys().isdisjoint(_PART_FIELDS):
            content, mask = self._parts(fields, "" if text is None else text, where)
        weighed = mask.stretches.values() if mask else ()
        if role != "assistant" and any(weight for found in weighed for _, weight in found):
            raise BadRecord("bad_weight", f"{where} ({role}) has a part to be learnt; only assistant turns can be")
        message = {"role": role, "content": content, **fields}
        texts: dict[int, str] = {}
        is_call = has_thought = False
        if role == "function_call":  # ShareGPT: a thought, if any, and JSON with a name and arguments
            message["role"] = "assistant"
            thought = _THOUGHT.match(content)
            try:
                calls = parse_json(content[thought.end() if thought else 0 :])
                message |= called(calls if isinstance(calls, list) else [calls], "function_call")
                has_thought = bool(thought_in(content))
                message["content"] = thought[0] if thought and has_thought else ""
                is_call = not has_thought and mask is None
            except BadRecord:
                self.text_calls += 1
        if message.get("tool_calls"):
            message["tool_calls"], texts = read_calls(message["tool_calls"], where)
        return Turn(message, weight, mask, tools, texts, is_call, has_thought, own_role, unsaid)

    def _parts(self, fields: dict[str, Any], text: Any, where: str) -> tuple[str, TurnMask | None]:
        """Return a message's text and its parts' weights, removed from `fields`."""
        mask = TurnMask()
        content = self._text(text, mask, "content", where)
        for name in REASONING_FIELDS:
            if name in fields:
                fields[name] = self._text(fields[name], mask, name, where)
        for name in ("reasoning", "tool_calls"):
            if (value := fields.pop(f"train_on_{name}", None)) is not None:
                setattr(mask, name, bool(as_flag(value, f"{where}: train_on_{name}")))
        if (details := fields.pop("train_detail", None)) is not None:
            if mask.stretches or self.dropped:
                needed = "must count characters of a content that is one string, from which no media is left out"
                raise BadRecord("bad_weight", f"{where}: train_detail {needed}")
            mask.stretches["content"] = _details(details, len(content), f"{where}: train_detail")
        return content, mask if mask != TurnMask() else None

    def _text(self, text: Any, mask: TurnMask, name: str, where: str) -> str:
        """Return a field's text, joined of text parts, with weights in `mask`."""
        if isinstance(text, str):
            return text
        if not isinstance(text, list):
            raise BadRecord("non_string_content", must(f"{where}: {name}", "be text", type(text).__name__))
        parts: list[dict[str, Any]] = []
        for number, part in enumerate(text, start=1):
            place = f"{where}: part {number} of {name}"
            if not isinstance(part, dict):
                raise BadRecord("non_string_content", must(place, "be an object with a text", type(part).__name__))
            if self._is_media(part, where):
                continue
            if not isinstance(part.get("text"), str):
                got = f"got {short_text(part['text'])}" if part.get("text") is not None else "it has none"
                kind = f"(type {short_text(part['type'])}) " if "type" in part else ""
                raise BadRecord("non_string_content", f"{place} {kind}must have a string in `text`; {got}")
            parts.append(part)
        weights = [_learnt(dict(part), f"{where}: a part of {name}") for part in parts]
        if any(weight is not None for weight in weights):
            ends = accumulate(len(part["text"]) for part in parts)
            weighed = (1.0 if weight is None else weight for weight in weights)
            mask.stretches[name] = list(zip(ends, weighed, strict=True))
        return "".join(part["text"] for part in parts)

    def _is_media(self, part: dict[str, Any], where: str) -> bool:
        kind = part.get("type")
        if not isinstance(kind, str):
            kind = "" if "text" in part else next((key for key in part if key.startswith(MEDIA)), "")
        medium = next((medium for medium in MEDIA if medium in kind), None)
        if medium is not None:
            self.drop(medium, f"{where} has a part of type {kind}")
        return medium is not None

    def drop(self, medium: str, found: str) -> None:
        """Count a medium that is left out. Raises `BadRecord` unless `drop_media`."""
        if not self.drop_media:
            kept = "media=drop leaves it out and keeps the text"
            raise BadRecord("vision", f"{found}, and only text is tokenized; {kept}")
        self.dropped[medium] += 1


def _own_role(name: str, role: str) -> str:
    """Return a role's name in the record, if a template may know another role's message by it; else ""."""
    return name if role not in (name, "assistant", "function_call") else ""


def thought_in(content: str) -> str:
    """Return the words of the thought that begins a content, if any."""
    match = _THOUGHT.match(content)
    return next((words.strip() for words in match.groups() if words), "") if match else ""


def map_strings(value: Any, change: Callable[[str], Any]) -> Any:
    """Apply `change` to every string in a value, except dictionary keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {key: map_strings(item, change) for key, item in value.items()}
    return value


def without_placeholders(value: Any) -> Any:
    """Remove media placeholders, each with an adjacent line end, from strings."""
    return map_strings(value, lambda text: _PLACEHOLDER.sub("", text))


def _continued(before: Turn, turn: Turn, where: str) -> Turn:
    """Return the assistant's turn joined with the message of its calls."""
    if (1 if before.weight is None else before.weight) != (1 if turn.weight is None else turn.weight):
        raise BadRecord("bad_weight", f"{where} continues the assistant's turn before it, and must have its weight")
    calls = before.message.get("tool_calls") or []
    texts = {len(calls) + number: text for number, text in turn.argument_texts.items()}
    message = {**before.message, "tool_calls": [*calls, *turn.message["tool_calls"]]}
    return before._replace(message=message, argument_texts={**before.argument_texts, **texts})


def _learnt(fields: dict[str, Any], where: str) -> float | None:
    """Remove the weight fields of a message or part; return their weight."""
    if fields.keys().isdisjoint(LEARN_FIELDS):
        return None
    found: dict[str, float] = {}
    for name in [name for name in LEARN_FIELDS if name in fields]:
        value = fields.pop(name)
        if name == "weight":
            found[name] = as_weight(value, f"{where}: weight")
        else:
            found[name] = as_flag(value, f"{where}: {name}")
    if len({weight > 0 for weight in found.values()}) > 1:
        raise BadRecord("bad_weight", f"{where}: {' and '.join(found)} must agree on whether it is to be learnt")
    return next(iter(found.values()), None)


def as_flag(value: Any, where: str, reason: str = "bad_weight") -> float:
    """Return 1 for true, 0 for false. Raises `BadRecord` for others."""
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return float(value)
    raise BadRecord(reason, must(where, "be true or false", short_text(value)))


def _details(details: Any, length: int, where: str) -> list[Stretch]:
    """Read axolotl's `train_detail` for `length` characters; `end_offset` is inclusive."""
    details = from_json(details, where)
    if not isinstance(details, list) or not all(isinstance(detail, dict) for detail in details):
        raise BadRecord("bad_weight", must(where, "be a list of objects", short_text(details)))
    stretches: list[Stretch] = []
    at = 0
    for detail in sorted(details, key=lambda detail: str(detail.get("begin_offset")).zfill(20)):
        begin, end = detail.get("begin_offset"), detail.get("end_offset")
        if type(begin) is not int or type(end) is not int or not at <= begin <= end or begin >= length:
            needed = f"have begin_offset <= end_offset in a text of {length} characters, and not overlap"
            raise BadRecord("bad_weight", must(where, needed, f"{short_text(begin)} and {short_text(end)}"))
        weight = _learnt(dict(detail), where)
        if weight is None:
            raise BadRecord("bad_weight", f"{where} must say for each range whether it is learnt, by train or weight")
        stretches += [(begin, 0.0), (min(end + 1, length), weight)]
        at = min(end + 1, length)
    return [*stretches, (length, 0.0)]


def as_weight(value: Any, where: str) -> float:
    """Return a weight, a number from 0 that float32 holds. Raises `BadRecord`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and (value == 0 or FLOAT32[0] <= value <= FLOAT32[1]):
        return float(value)
    raise BadRecord("bad_weight", must(where, "be a number that is at least 0 and fits in float32", short_text(value)))
