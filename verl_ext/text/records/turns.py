r"""Read the turns of a prompt and of its answers, for plain chats, labels and preferences alike.

q                                          the user's turn, after the record's `history` and `context`
[{"role": "user", "content": "q"}]         messages
'[{"role": "user", "content": "q"}]'       messages as JSON, in a row of a table, or if prompt and answers all are
Human: q\n\nAssistant: a\n\nHuman: r         turns of Anthropic's form: a prompt, or whole chats
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from verl_ext.options import must
from verl_ext.text.read.bad_record import BadRecord, short_text
from verl_ext.text.read.json_records import from_json, parse_json
from verl_ext.text.records.fields import Fields
from verl_ext.text.records.messages import ROLES, Message, MessageReader

CHATS = ("messages", "conversations")  # fields that hold messages, whether JSON or not
SPEAKERS = ("assistant", "function_call")  # the roles of an answer
_HH = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")  # Anthropic's texts of whole chats
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}
_AS_JSON, AS_WORDS, _AS_TURNS = "JSON of messages", "JSON of messages as words", "Human: and Assistant: as turns"


def read_prompt(fields: Fields, name: str, value: Any) -> list[Message]:
    """Return the turns of a prompt, in a field with this value (or what `decoded_messages` made of it)."""
    if isinstance(value, list) and value is not fields.values[name]:
        fields.take(name)
        return value
    if not isinstance(value, str) or name in CHATS:
        return fields.messages(name, "a text or a list of messages")
    text = fields.string(name)
    if name == "instruction" and "input" in fields.values:  # Alpaca's second part, on a line below the first
        text = "\n".join(filter(None, (text, fields.string("input"))))
    if json_turns(text):
        fields.readings.add(AS_WORDS)
    if not (turns := hh_turns(text, is_prompt=True)):
        return question_turns(text, fields, has_context=name != "context")
    if turns[-1]["role"] == "assistant":
        needed = f"{name} must end before the answers"
        raise BadRecord("ambiguous", f"{needed}; it ends with another assistant turn")
    fields.readings.add(_AS_TURNS)
    return [*question_turns(turns[0]["content"], fields, has_context=name != "context"), *turns[1:]]


def question_turns(question: str, fields: Fields, has_context: bool = True) -> list[Message]:
    """Return the record's `history`, and a user turn after its `context`."""
    if not has_context:
        return [{"role": "user", "content": question}]
    context = fields.take("context", "")
    if not isinstance(context, str):
        got = f"{type(context).__name__}; columns={{context: null}} leaves it out"
        raise BadRecord("non_string_content", must("context", "be a string", got))
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


def decoded_messages(fields: Fields, prompt: Any, answers: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a prompt and its answers, where texts that are JSON of messages became the messages.

    Words may be such JSON themselves. So answers are decoded all or none, and outside of tables only beside a prompt
    that is JSON too, or that they repeat.
    """
    asked = json_turns(prompt)
    texts = {name: json_turns(value) for name, value in answers.items() if isinstance(value, str)}
    is_json = bool(texts) and all(texts.values())
    if is_json and not (fields.is_row or prompt is None or asked):
        is_json = repeats(prompt, next(iter(texts.values())), fields)
    is_asked = bool(asked) and (fields.is_row or is_json)
    if is_json or is_asked:
        fields.readings.add(_AS_JSON)
    if any(texts.values()) and not is_json:
        fields.readings.add(AS_WORDS)
    return asked if is_asked else prompt, {**answers, **texts} if is_json else dict(answers)


def answer_turns(value: Any, name: str) -> list[Message]:
    """Return the turns of an answer: a text, a message, or a list of messages."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        line = must(name, "be a text, a message or a list of messages", short_text(value))
        raise BadRecord("non_string_content", line)
    if not turns:
        raise BadRecord("empty", f"{name} is empty")
    return turns


def is_whole_chat(turns: list[Any]) -> bool:
    """Return whether turns begin before the assistant's first one."""
    return role_of(turns[0]) in ("system", "developer", "user")


def repeats(value: Any, chat: list[Any], fields: Fields) -> bool:
    """Return whether a chat begins with turns, or a user in it says a text."""
    if isinstance(value, str) and value.strip():
        read = normal_turns(chat, fields)
        if turns := json_turns(value) or hh_turns(value, is_prompt=True):
            return read[: len(turns)] == normal_turns(turns, fields)
        return value.strip() in [message["content"].strip() for message in read if message["role"] == "user"]
    return isinstance(value, list) and chat[: len(value)] == value


def json_turns(text: Any) -> list[Message]:
    """Return the messages whose JSON a text is; [] for words."""
    if not isinstance(text, str) or not text.lstrip().startswith(("[", "{")):
        return []
    try:
        found = parse_json(text)
    except BadRecord:
        return []
    turns = found if isinstance(found, list) else [found]
    is_chat = all(role_of(turn) and not {"content", "value", "tool_calls"}.isdisjoint(turn) for turn in turns)
    return turns if is_chat else []


def hh_turns(text: Any, is_prompt: bool = False) -> list[Message]:
    """Return the turns of a text that begins with `Human:`, else [].

    is_prompt: the text must have a turn of the assistant, and its last one may be empty, where the answer is to stand.
    """
    before, *parts = _HH.split(text) if isinstance(text, str) else ("",)
    if before.strip() or parts[:1] != ["Human"] or (is_prompt and "Assistant" not in parts[::2]):
        return []
    heads = zip(parts[::2], parts[1::2], strict=True)
    turns = [{"role": _HH_ROLES[head], "content": words.strip()} for head, words in heads]
    return turns[:-1] if is_prompt and turns[-1] == {"role": "assistant", "content": ""} else turns


def normal_turns(turns: Iterable[Any], fields: Fields) -> list[Message]:
    """Return messages in the form that templates take."""
    return [turn.message for turn in MessageReader(fields.reader.drop_media).turns(list(turns))]


def role_of(message: Any) -> str | None:
    """Return a message's role under its known name; None for anything else."""
    name = (message.get("role") or message.get("from")) if isinstance(message, dict) else None
    return ROLES.get(name.lower()) if isinstance(name, str) else None
