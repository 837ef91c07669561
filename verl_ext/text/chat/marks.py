r"""Mark a chat's words to find where the template prints them.

Messages, tools and template arguments of a chat are rendered a second time with marks in their strings (the "words"):

    message     {"role": "user", "content": " hi "}          the third string of the chat
    marked      {"role": "user", "content": " Zq7b2xhiZq7e2x "}
    rendered    <|im_start|>user\n Zq7b2xhiZq7e2x <|im_end|>     the words lie at "hi"

Marks are placed inside the white space around the words, because templates trim that white space. Without its marks,
the rendered text must equal the text of the chat itself; otherwise the next one of the WAYS is tried. A template may
count the letters of an id, which then gets a stand-in of its own length in place of marks.

Every string of a message is marked, whatever field it stands in, and belongs to a speaker: an assistant's fields are
its own words, but results of tools inside its message (`RESULT_FIELDS`) and the template's arguments are not.
"""

import re
from collections.abc import Collection
from enum import Enum
from typing import Any, NamedTuple

from verl_ext.text.chat.jinja_template import JinjaTemplate
from verl_ext.text.chat.stand_ins import BEGIN, END, WORD, StandIns
from verl_ext.text.chat.template import common_prefix
from verl_ext.text.records.messages import REASONING_FIELDS, TOOL_FIELDS, Chat, Message, map_strings

SPOKEN_FIELDS = ("content", *REASONING_FIELDS)
TOOLS, ARGUMENTS = -1, -2  # the message indices of tool definitions and of the template's arguments
# Fields of an assistant's message, or of its calls, in which results of tools stand, such as Gemma 4's tool_responses.
RESULT_FIELDS = re.compile(r"(?:(?:tool|function|call)_?)?(?:results?|responses?|outputs?|observations?)")
CALL_FIELDS = re.compile(r"(?:tool|function)_?calls?")
IDENTIFIERS = frozenset(("id", "tool_call_id", "call_id", "name", "type", "index"))  # of messages and of calls


class WordKind(Enum):
    """What words are; a value is the name in the report."""

    CONTENT = "content"
    REASONING = "reasoning_content"
    CALLS = "tool_calls"
    TOOLS = "tools"
    RESULTS = "results"  # of tools, in an assistant's message
    IDENTIFIER = "identifier"
    FIELD = "field"  # another field of a message
    ARGUMENT = "argument"  # of the template


# The ways to mark words, in the order in which they are tried: where marks stand, and which words get none. Some
# templates test how a message begins or ends, look up a function's name, or count the letters of an id, so that a mark
# there changes their output.
BLANK, LENGTHS = "blank results", "identifiers too short for a stand-in of their length"
NAMES = "names of calls"
WAYS: tuple[tuple[str, frozenset[Any]], ...] = (
    ("around", frozenset()),
    ("around", frozenset((BLANK,))),
    ("around", frozenset((BLANK, LENGTHS))),
    ("around", frozenset((BLANK, WordKind.IDENTIFIER))),
    ("around", frozenset((BLANK, WordKind.IDENTIFIER, WordKind.ARGUMENT, NAMES))),
    ("end", frozenset((BLANK, WordKind.IDENTIFIER, WordKind.ARGUMENT))),
    ("middle", frozenset((BLANK, WordKind.IDENTIFIER, WordKind.ARGUMENT))),
)


class Words(NamedTuple):
    """One string of a message, which a template may print; `field` is the message's field that it stands in."""

    message: int
    kind: WordKind
    text: str
    role: str = ""
    field: str = ""

    @property
    def label(self) -> str:
        """The name of words of this kind in the report."""
        if self.kind in (WordKind.CONTENT, WordKind.FIELD, WordKind.IDENTIFIER, WordKind.RESULTS):
            return f"{self.role} {self.field}"
        return self.kind.value

    def is_said(self, names: Collection[str]) -> bool:
        """Return whether the words are what a turn says, so that a turn of theirs is not an empty one.

        names: the words of the template's source, which has the fields that it reads.
        """
        always = (WordKind.CONTENT, WordKind.REASONING, WordKind.CALLS)
        return self.kind in always or (self.kind is not WordKind.IDENTIFIER and self.field in names)

    @property
    def is_call(self) -> bool:
        """Whether the words are part of a call, such as its id."""
        return self.kind is WordKind.CALLS or self.field == "tool_calls"

    @property
    def run(self) -> tuple[int, bool]:
        """The message, and whether the words in it are a tool's: equal for words of one speaker's turn."""
        return self.message, self.kind is WordKind.RESULTS

    @property
    def space_after(self) -> str:
        """The trailing white space of the words."""
        return self.text[len(self.text.rstrip()) :]


class Place(NamedTuple):
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


class Rendering(NamedTuple):
    """A text that a template prints, and the places of words in it, in order.

    is_answered: whether it is the text before an answer that the chat does not have.
    """

    text: str
    places: list[Place]
    is_answered: bool


class Marks:
    """A chat's messages, tools and template arguments with marks, numbered in the chat's order.

    answer: words that the chat does not have.
    """

    def __init__(
        self, chat: Chat, way: tuple[str, frozenset[Any]], template: JinjaTemplate, stand_ins: StandIns
    ) -> None:
        """Mark the words of a chat and of the template's arguments."""
        (self.way, self.unmarked), self._stand_ins = way, stand_ins
        self.words: list[Words] = []
        self.tools = [self._tool(tool) for tool in chat.tools] if chat.tools else chat.tools
        self.messages = [self._message(index, message) for index, message in enumerate(chat.messages)]
        arguments = template.arguments
        # An argument that the template compares with something gets no marks, and nor does a list with such a text.
        for name, value in template.arguments.items():
            texts = strings_in(value)
            if texts and template.facts.is_blind_to(texts):
                marked = self._strings(value, Words(ARGUMENTS, WordKind.ARGUMENT, "", field=name))
                arguments = {**arguments, name: marked}
        self._template = template.with_arguments(arguments)
        self.answer = stand_ins.of(len(self.words))

    def _tool(self, tool: Any) -> Any:
        function = tool.get("function") if isinstance(tool.get("function"), dict) else tool
        for name in ("description", "name"):
            if isinstance(function.get(name), str) and function[name].strip():
                marked = {**function, name: self._marked(Words(TOOLS, WordKind.TOOLS, function[name]))}
                return {**tool, "function": marked} if function is not tool else marked
        return tool

    def _message(self, index: int, message: Message) -> Message:
        marked, role = dict(message), message["role"]
        for name, value in message.items():
            if name == "content" and isinstance(value, str):
                marked[name] = self._marked(Words(index, WordKind.CONTENT, value, role, name))
            elif name == "tool_calls" and value:
                marked[name] = [self._call(index, call) for call in value]
            elif name not in ("role", "type") and value:
                kind = WordKind.REASONING if name in REASONING_FIELDS else field_kind(role, name)
                marked[name] = self._strings(value, Words(index, kind, "", role, name))
        return marked

    def _call(self, index: int, call: dict[str, Any]) -> dict[str, Any]:
        marked = dict(call)
        for name, value in call.items():
            words = Words(index, field_kind("assistant", name, WordKind.CALLS), "", "assistant", "tool_calls")
            if name == "function" and isinstance(value, dict):
                marked[name] = self._call(index, value)
            elif name == "name" and isinstance(value, str):
                marked[name] = (
                    value if NAMES in self.unmarked else self._marked(words._replace(kind=WordKind.CALLS, text=value))
                )
            elif name != "type" and value:
                marked[name] = self._strings(value, words)
        return marked

    def _strings(self, value: Any, words: Words) -> Any:
        """Mark the strings in a field's value, but types of content, which templates compare."""
        if words.kind in self.unmarked:
            return value
        if isinstance(value, dict) and words.field != "tool_calls":
            return {name: item if name == "type" else self._strings(item, words) for name, item in value.items()}
        if isinstance(value, list):
            return [self._strings(item, words) for item in value]
        return map_strings(value, lambda text: self._marked(words._replace(text=text)))

    def _marked(self, words: Words) -> str:
        """Add marks inside the white space around the words.

        Blank words get no marks, except a tool's result, which a template may print in the assistant's turn.
        """
        text = words.text
        is_result = words.kind is WordKind.CONTENT and words.role not in ("system", "developer", "user", "assistant")
        if not (core := text.strip()) and (BLANK in self.unmarked or not is_result):
            return text
        at, number = len(text) - len(text.lstrip()) if core else 0, len(self.words)
        begin, end = (self._stand_ins.of(number, letter) for letter in (BEGIN, END))
        first, second = core[: len(core) // 2], core[len(core) // 2 :]
        marked = {"around": f"{begin}{core}{end}", "end": f"{core}{end}", "middle": f"{first}{begin}{second}"}[self.way]
        if words.kind is WordKind.IDENTIFIER and LENGTHS in self.unmarked:
            marked = self._stand_ins.of(number, length=len(core))
            if len(marked) > len(core):
                return text
        self.words.append(words)
        return f"{text[:at]}{marked}{text[at + len(core) :]}"

    def render(self, messages: list[Message], generation: bool = False) -> Rendering | None:
        """Render marked messages up to the `answer`, if any; return None if the template refuses them.

        Of words that the template prints twice, the first place is returned.
        """
        if (marked := self._template.try_render(messages, self.tools, generation)) is None:
            return None
        marked, *after = re.split(self.answer, marked, maxsplit=1, flags=re.IGNORECASE)
        parts: list[str] = []
        begins: dict[int, int] = {}  # by the number of the words
        ends: dict[int, int] = {}
        at = length = 0
        for match in self._stand_ins.pattern.finditer(marked):
            letter, number = match[1].lower(), int(match[2])
            parts.append(marked[at : match.start()])
            length += match.start() - at
            at = match.end()
            if letter != END:
                begins.setdefault(number, length)
            if letter == WORD:
                parts.append(self.words[number].text.strip())
                length += len(parts[-1])
            if letter != BEGIN:
                ends.setdefault(number, length)
        places = []
        for number in {**begins, **ends}:
            last = ends.get(number, begins.get(number, 0))
            places.append(Place(number, self.words[number], min(begins.get(number, last), last), last, number in ends))
        places.sort(key=lambda place: (place.first, place.last))
        return Rendering("".join([*parts, marked[at:]]), places, bool(after))

    def framing_key(self, message: Message, with_unmarked: bool = False) -> tuple[Any, ...]:
        """Return a key of messages framed, or `with_unmarked` printed, alike."""
        said = sorted(key for key, value in message.items() if (value.strip() if isinstance(value, str) else value))
        if not with_unmarked:
            return message["role"], *said
        return message["role"], *said, *self.unmarked_fields(message)

    def unmarked_fields(self, message: Message) -> list[tuple[str, str]]:
        """Return the fields of a message that carry no marks, or not on all that they hold."""
        return sorted(
            (key, str(value))
            for key, value in message.items()
            if key != "tool_calls"
            and not (key != "role" and isinstance(value, str) and value.strip() and self._marks(message["role"], key))
        )

    def _marks(self, role: str, field: str) -> bool:
        kind = field_kind(role, field)
        is_unmarked = kind in self.unmarked or (kind is WordKind.IDENTIFIER and LENGTHS in self.unmarked)
        return field in SPOKEN_FIELDS or not is_unmarked


def field_kind(role: str, name: str, other: WordKind = WordKind.FIELD) -> WordKind:
    """Return what the words in a field of a message, or of a call, are."""
    if role == "assistant" and RESULT_FIELDS.fullmatch(name):
        return WordKind.RESULTS
    if name in IDENTIFIERS:
        return WordKind.IDENTIFIER
    if role == "system" and name in TOOL_FIELDS:
        return WordKind.TOOLS
    return WordKind.CALLS if role == "assistant" and CALL_FIELDS.fullmatch(name) else other


def without_results(message: Message) -> Message:
    """Return an assistant's message without the tool results in its fields and in its calls."""

    def kept(fields: Message) -> Message:
        return {name: value for name, value in fields.items() if not RESULT_FIELDS.fullmatch(name)}

    if not message.get("tool_calls"):
        return kept(message)
    calls = [kept(call) for call in message["tool_calls"]]
    inner = [{"function": kept(call["function"])} if isinstance(call.get("function"), dict) else {} for call in calls]
    return kept(message) | {"tool_calls": [call | function for call, function in zip(calls, inner, strict=True)]}


def without_calls(message: Message) -> Message:
    """Return an assistant's message without its calls."""
    return {name: value for name, value in message.items() if not CALL_FIELDS.fullmatch(name)}


def strings_in(value: Any) -> list[str]:
    """Return every string in a value, except dictionary keys."""
    found: list[str] = []
    map_strings(value, lambda text: found.append(text) or text)  # type: ignore[func-returns-value]
    return found


def length_but_space(given: str, text: str) -> int:
    """Return how much of `text` begins as `given`, except white space."""
    core = given.rstrip()
    at = 0
    for char in "".join(core.split()):
        while at < len(text) and text[at].isspace():
            at += 1
        if not text.startswith(char, at):
            return 0
        at += 1
    return at + common_prefix(given[len(core) :], text[at:]) if at else 0
