r"""Mark a chat's words to find where the template prints them.

The messages and tools of a chat are rendered a second time with marks in their strings (the "words"):

    message     {"role": "user", "content": " hi "}          the third string of the chat
    marked      {"role": "user", "content": " Zq7b2xhiZq7e2x "}
    rendered    <|im_start|>user\n Zq7b2xhiZq7e2x <|im_end|>     the words lie at "hi"

Marks are placed inside the white space around the words, because templates trim that white space. Without its marks,
the rendered text must equal the text of the chat itself; otherwise the next one of the WAYS is tried.
"""

import re
from enum import Enum
from typing import Any, NamedTuple

from verl_ext.text.chat.template import common_prefix
from verl_ext.text.records.messages import REASONING_FIELDS, Chat, Message, map_strings

SPOKEN_FIELDS = ("content", *REASONING_FIELDS)
TOOLS = -1  # the message index of tool definitions
# The ways to mark words, in the order in which they are tried. Some templates test how a message begins or ends, or
# look up a function's name, so that a mark there changes their output.
WAYS = ("around", "around_but_blank", "around_but_names", "end", "middle")
# Marks consist of ASCII letters and digits, which no template trims, splits or escapes.
_MARK = re.compile("Zq7([be])([0-9]+)x", re.IGNORECASE)


class WordKind(Enum):
    """The field that words stand in, by its name in the report."""

    CONTENT = "content"
    REASONING = "reasoning_content"
    CALLS = "tool_calls"
    TOOLS = "tools"


class Words(NamedTuple):
    """One string of a message, which a template may print."""

    message: int
    kind: WordKind
    text: str
    role: str = ""  # of a content

    @property
    def label(self) -> str:
        """The name of words of this kind in the report."""
        return f"{self.role} content" if self.kind is WordKind.CONTENT else self.kind.value

    @property
    def space_after(self) -> str:
        """The trailing white space of the words."""
        return self.text[len(self.text.rstrip()) :]


class MarkedPlace(NamedTuple):
    """The place of marked words, from mark `first` to `last`, maybe one."""

    number: int
    words: Words
    first: int
    last: int
    reaches_end: bool  # True if the words end at `last`

    def rest_in(self, text: str) -> int:
        """Return the length of words behind their middle mark, or 0.

        A template may change white space in them, as Qwen's do around the thought of a content.
        """
        core = self.words.text.strip()
        return length_but_space(core[len(core) // 2 :], text[self.last : self.last + 2 * len(self.words.text) + 64])


class Marks:
    """A chat's messages and tools with marks, numbered in the chat's order."""

    def __init__(self, chat: Chat, way: str) -> None:
        self.way = way
        self.words: list[Words] = []
        self.tools = [self._tool(tool) for tool in chat.tools] if chat.tools else chat.tools
        self.messages = [self._message(index, message) for index, message in enumerate(chat.messages)]

    def _tool(self, tool: Any) -> Any:
        function = tool.get("function") if isinstance(tool.get("function"), dict) else tool
        for name in ("description", "name"):
            if isinstance(function.get(name), str) and function[name].strip():
                marked = {**function, name: self._marked(Words(TOOLS, WordKind.TOOLS, function[name]))}
                return {**tool, "function": marked} if function is not tool else marked
        return tool

    def _message(self, index: int, message: Message) -> Message:
        marked = dict(message)
        for name in SPOKEN_FIELDS:
            if isinstance(message.get(name), str):
                kind = WordKind.CONTENT if name == "content" else WordKind.REASONING
                marked[name] = self._marked(Words(index, kind, message[name], message["role"]))
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(index, call) for call in message["tool_calls"]]
        return marked

    def _call(self, index: int, call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._call(index, call["function"])}
        marked = dict(call)
        if isinstance(call.get("name"), str) and self.way != "around_but_names":
            marked["name"] = self._marked(Words(index, WordKind.CALLS, call["name"]))
        if "arguments" in call:
            marked["arguments"] = map_strings(
                call["arguments"], lambda text: self._marked(Words(index, WordKind.CALLS, text))
            )
        return marked

    def _marked(self, words: Words) -> str:
        """Add marks inside the white space around the words.

        Blank words get no marks, except a tool's result (`around`), which a template may print in the assistant's turn.
        """
        text = words.text
        if not (core := text.strip()) and (self.way != "around" or words.label != "tool content"):
            return text
        at = len(text) - len(text.lstrip()) if core else 0
        begin, end = f"Zq7b{len(self.words)}x", f"Zq7e{len(self.words)}x"
        self.words.append(words)
        if self.way == "end":
            return f"{text[: at + len(core)]}{end}{text[at + len(core) :]}"
        if self.way == "middle":
            middle = at + len(core) // 2
            return f"{text[:middle]}{begin}{text[middle:]}"
        return f"{text[:at]}{begin}{core}{end}{text[at + len(core) :]}"

    def places(self, marked: str) -> tuple[str, list[MarkedPlace]]:
        """Remove a text's marks; return it with the words' places in order.

        If the template prints words twice, their first place is returned.
        """
        parts: list[str] = []
        borders: tuple[dict[int, int], dict[int, int]] = ({}, {})  # begins and ends of words, by number
        at = length = 0
        for match in _MARK.finditer(marked):
            parts.append(marked[at : match.start()])
            length += match.start() - at
            at = match.end()
            borders[match[1] in "eE"].setdefault(int(match[2]), length)
        begins, ends = borders
        places = []
        for number in {**begins, **ends}:
            if number < len(self.words):
                last = ends.get(number, begins.get(number, 0))
                first = min(begins.get(number, last), last)
                places.append(MarkedPlace(number, self.words[number], first, last, number in ends))
        places.sort(key=lambda place: (place.first, place.last))
        return "".join([*parts, marked[at:]]), places


def length_but_space(given: str, text: str) -> int:
    """Return how much of `text` begins as `given` but for white space."""
    core = given.rstrip()
    at = 0
    for char in "".join(core.split()):
        while at < len(text) and text[at].isspace():
            at += 1
        if not text.startswith(char, at):
            return 0
        at += 1
    return at + common_prefix(given[len(core) :], text[at:]) if at else 0


def framing_key(message: Message, with_unmarked: bool = False) -> tuple[Any, ...]:
    """Return a key of messages framed, or `with_unmarked` printed, alike."""
    said = sorted(key for key, value in message.items() if (value.strip() if isinstance(value, str) else value))
    if not with_unmarked:
        return message["role"], *said
    return message["role"], *said, *unmarked_fields(message)


def unmarked_fields(message: Message) -> list[tuple[str, str]]:
    """Return the fields of a message that carry no marks."""
    return sorted(
        (key, str(value))
        for key, value in message.items()
        if key != "tool_calls" and not (key in SPOKEN_FIELDS and isinstance(value, str) and value.strip())
    )
