"""Records of any known shape as chats or plain texts.

The shape is read off the fields. Where several fit, the first of this table wins:

| fields | becomes |
|---|---|
| `messages` | the chat as it stands |
| `conversations` | ShareGPT: `from`/`value` or `role`/`content` |
| `instruction` [+ `input`] + `output` (or `response`, `completion`) | user turn `instruction\\ninput`, assistant turn |
| `prompt` + `response` (or `completion`), strings or messages | a user turn, an assistant turn; or the chat of both |
| `question` + `answer` | one user turn, one assistant turn |
| `text` | plain text, no template |

An alpaca record that has `output` and `response` is answered by `output`. `system`, `tools` and `history` (pairs of
earlier turns) are taken along where they stand beside a shape; other fields are left alone. A `prompt` given as
messages is context: its assistant turns are no targets.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from verl_ext.tokenize.bad_record import BadRecord
from verl_ext.tokenize.chunks import TextFile

SHAPES = (
    "messages | conversations | instruction+output[+input] | prompt+response (or completion) | question+answer | text"
)
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "function_call",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
Message = dict[str, Any]


@dataclass
class Chat:
    """Messages as chat templates take them; `targets` are the indices of the assistant turns to be learnt."""

    messages: list[Message]
    targets: list[int]
    tools: list[Any] | None = None

    def keep_last_target(self) -> None:
        """Make the last assistant turn the only target (none, where that turn has weight 0)."""
        last = max((i for i, m in enumerate(self.messages) if m["role"] == "assistant"), default=-1)
        self.targets = [i for i in self.targets if i == last]


@dataclass
class PlainText:
    """Text whose every token but the first is a target."""

    text: str | TextFile


@dataclass
class Record:
    """What one record holds: its content, and the weight of its target tokens (None: not given)."""

    content: Chat | PlainText
    weight: float | None = field(default=None)


def parse_record(raw: Any) -> Record:
    """Read a record by its fields; raise `BadRecord` saying what cannot be used."""
    if isinstance(raw, BadRecord):
        raise raw
    if not isinstance(raw, dict):
        raise BadRecord("not_an_object", f"a record must be an object with fields; got {type(raw).__name__}")
    fields = {key: value for key, value in raw.items() if value is not None}
    weight = _record_weight(fields)
    content = _content(fields)
    return Record(content, weight)


def _content(fields: dict[str, Any]) -> Chat | PlainText:
    if "messages" in fields:
        return _chat(_message_list(fields, "messages"), fields)
    if "conversations" in fields:
        return _chat(_message_list(fields, "conversations"), fields)
    if (answer := _first(fields, "output", "response", "completion")) and "instruction" in fields:
        question = _string(fields, "instruction")
        if extra := _string(fields, "input") if "input" in fields else "":
            question = f"{question}\n{extra}" if question else extra
        return _single_turn(question, _string(fields, answer), fields)
    if (answer := _first(fields, "response", "completion")) and "prompt" in fields:
        return _prompt_and_answer(answer, fields)
    if "question" in fields and "answer" in fields:
        return _single_turn(_string(fields, "question"), _string(fields, "answer"), fields)
    if isinstance(fields.get("text"), TextFile):
        return PlainText(fields["text"])
    if "text" in fields:
        text = _string(fields, "text")
        if not text.strip():
            raise BadRecord("empty", "text is empty")
        return PlainText(text)
    found = ", ".join(map(str, fields)) or "none"
    raise BadRecord("unknown_fields", f"no known shape among the fields: {found}; known shapes: {SHAPES}")


def _first(fields: dict[str, Any], *names: str) -> str | None:
    return next((name for name in names if name in fields), None)


def _string(fields: dict[str, Any], name: str) -> str:
    if not isinstance(fields[name], str):
        raise BadRecord("non_string_content", f"{name} must be a string; got {type(fields[name]).__name__}")
    return fields[name]


def _message_list(fields: dict[str, Any], name: str) -> list[Any]:
    value = _from_json(fields[name], name)
    if not isinstance(value, list):
        raise BadRecord("non_string_content", f"{name} must be a list of messages; got {type(value).__name__}")
    if not value:
        raise BadRecord("empty", f"{name} is empty")
    return value


def _from_json(value: Any, name: str) -> Any:
    """`value`, decoded where a table's column holds it as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRecord("malformed_json", f"{name} is a string that is no JSON") from error


def _single_turn(question: str, answer: str, fields: dict[str, Any]) -> Chat:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _chat(_history(fields) + turns, fields)


def _history(fields: dict[str, Any]) -> list[Message]:
    history = _from_json(fields.get("history", []), "history")
    pairs = isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    if not pairs:
        raise BadRecord("non_string_content", "history must be a list of [question, answer] pairs")
    turns: list[Message] = []
    for question, answer in history:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


def _prompt_and_answer(answer: str, fields: dict[str, Any]) -> Chat:
    if isinstance(fields["prompt"], str) and isinstance(fields[answer], str):
        return _single_turn(fields["prompt"], fields[answer], fields)
    prompt, reply = fields["prompt"], fields[answer]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _message_list(fields, "prompt")
    after = [{"role": "assistant", "content": reply}] if isinstance(reply, str) else _message_list(fields, answer)
    context = [{**m, "weight": 0} if isinstance(m, dict) else m for m in before]
    return _chat(context + after, fields)


def _chat(raw_messages: list[Any], fields: dict[str, Any]) -> Chat:
    messages, targets = [], []
    for index, raw in enumerate(raw_messages):
        message, weight = _message(raw, f"message {index + 1}")
        if message["role"] == "assistant" and weight:
            targets.append(index)
        messages.append(message)
    if "system" in fields and messages[0]["role"] != "system" and (system := _string(fields, "system")):
        messages.insert(0, {"role": "system", "content": system})
        targets = [index + 1 for index in targets]
    if not targets:
        raise BadRecord("no_target", "no assistant turn to learn from")
    if not any(_says_something(messages[i]) for i in targets):
        raise BadRecord("empty", "every assistant turn is empty")
    return Chat(messages, targets, _tools(fields))


def _says_something(message: Message) -> bool:
    spoken = any(isinstance(value, str) and value.strip() for key, value in message.items() if key != "role")
    return spoken or bool(message.get("tool_calls"))


def _message(raw: Any, where: str) -> tuple[Message, int]:
    """One message with `role` and string `content`, and whether it counts (1) or not (0)."""
    if not isinstance(raw, dict):
        raise BadRecord("non_string_content", f"{where} must be an object; got {type(raw).__name__}")
    fields = {key: value for key, value in raw.items() if value is not None}
    name = fields.pop("role", None) or fields.pop("from", None)
    if not isinstance(name, str) or name.lower() not in ROLES:
        raise BadRecord("unknown_role", f"{where} has role {name!r}; known roles: {', '.join(ROLES)}")
    role = ROLES[name.lower()]
    weight = fields.pop("weight", 1)
    if weight not in (0, 1):
        raise BadRecord("bad_weight", f"{where}: weight must be 0 or 1; got {weight!r}")
    text = fields.pop("content", None)
    text = fields.pop("value", None) if text is None else text
    if text is None and not fields.get("tool_calls"):
        raise BadRecord("non_string_content", f"{where} ({role}) has no content")
    message = {"role": role, "content": _text(text if text is not None else "", where), **fields}
    if role == "function_call":
        message = {"role": "assistant", **_call_from_text(message["content"])}
    if message.get("tool_calls"):
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
    return message, int(weight)


def _text(content: Any, where: str) -> str:
    """A message's text; a list of text parts (`{"type": "text", "text": …}`) is joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise BadRecord("non_string_content", f"{where}: content must be text; got {type(content).__name__}")


def _call_from_text(text: str) -> Message:
    """ShareGPT's `function_call` turn: JSON with a name and arguments, or else text like any other."""
    try:
        calls = json.loads(text)
    except ValueError:
        return {"content": text}
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        return {"content": text}
    return {"content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _tool_calls(raw: Any, where: str) -> list[Any]:
    """Tool calls with their arguments as objects, which is how templates print them best."""
    calls = _from_json(raw, f"{where}: tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRecord("bad_tools", f"{where}: tool_calls must be a list of objects")
    return [_with_object_arguments(call) for call in calls]


def _with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_object_arguments(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def _tools(fields: dict[str, Any]) -> list[Any] | None:
    if fields.get("tools") in (None, "", []):
        return None
    tools = _from_json(fields["tools"], "tools")
    tools = [_from_json(tool, "tools") for tool in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord("bad_tools", "tools must be a list of JSON schemas")
    return tools or None


def _record_weight(fields: dict[str, Any]) -> float | None:
    name = _first(fields, "loss_weight", "weight")
    if name is None:
        return None
    weight = fields[name]
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight) or weight < 0:
        raise BadRecord("bad_weight", f"{name} must be a number that is at least 0; got {weight!r}")
    return float(weight)
