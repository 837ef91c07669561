"""A tokenizer's chat template: its generation prompt, and what ends its turns and chats."""

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from verl_ext.options import UsageError, must
from verl_ext.text.chat.jinja_template import JinjaTemplate, Span
from verl_ext.text.chat.stand_ins import StandIns
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.messages import REASONING_FIELDS, Chat, Message
from verl_ext.text.records.tool_calls import functions_called

# The words of the chat that probes a template.
_STAND_INS = StandIns()
_QUESTION, _ANSWER, _THOUGHT = map(_STAND_INS.of, range(3))
_in_own_case = _STAND_INS.in_own_case
_USER = {"role": "user", "content": _QUESTION}
_ASSISTANT = {"role": "assistant", "content": _ANSWER}
_CALL = {"type": "function", "id": "a1b2c3d4e", "function": {"name": "look_up", "arguments": {"word": _ANSWER}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "name": "look_up", "tool_call_id": "a1b2c3d4e", "content": _QUESTION}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "The word."}}},
    },
}


class ChatTemplate(JinjaTemplate):
    r"""A chat template with the properties found by probing it.

    Attributes:
        generation_prompt: the text before a turn at inference, empty if the template has none.
        turn_ends: the texts that end an assistant's turn, which generation has to produce to stop.
        special: a pattern of special tokens.
        stop_pattern: a pattern of the tokens that stop generation.
        end_pattern: a pattern of the end of a turn in the template's own text.

    A template that prints the generation prompt after every chat has that prompt as well, although the flag adds none.

    `turn_ends` are found by comparing two closed turns, the last one of a chat and one before a user's turn:

        last turn      hello<|im_end|>\n                     both have <|im_end|> and white space; of several special
        earlier turn   hello<|im_end|>\n<|im_start|>user\n   tokens, the end is the last one, or the first that stops
                                                            generation by the model's own settings.

    If the two have nothing in common (gpt-oss: <|return|>, <|end|>), each has its own end. If the template leaves the
    last turn open, an earlier one ends with the special token that follows it, unless that token begins a user's turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        template_kwargs: dict[str, Any],
        end_of_turn: str | None = None,
        stop_tokens: Sequence[str] = (),
        left_out: re.Pattern[str] | None = None,
        today: str | None = None,
        end_of_chat: str = "auto",
    ) -> None:
        """Probe the template. Raises `UsageError` if it renders no answered chat.

        Args:
            tokenizer: the tokenizer.
            template: a template that replaces the tokenizer's own.
            template_kwargs: the template's arguments.
            end_of_turn: the end of a turn, which replaces those that are found.
            stop_tokens: the stop tokens of the model's generation config.
            left_out: a pattern that is removed from every rendered text.
            today: the day that the template prints as today's, 2026-11-25; None: the present day.
            end_of_chat: the token that ends chats whose last turn the template leaves open; "auto": the token with
                which the next turn would begin, where generation stops at it; "none": nothing.
        """
        super().__init__(tokenizer, template, template_kwargs, left_out, today)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self.special = any_of({*tokenizer.all_special_tokens, *map(str, added)} - {""})
        control = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)} - {""}
        # An argument that is a special token and nothing else is that token; any other one is text.
        tokens = {name: value for name, value in template_kwargs.items() if isinstance(value, str) and value in control}
        self._constants |= tokens
        self.arguments = {name: value for name, value in template_kwargs.items() if name not in tokens}
        given = {end_of_chat} - {"auto", "none"}
        self._stops = {tokenizer.eos_token or "", *stop_tokens, *given} - {""}
        self.stop_pattern = any_of(self._stops)
        self._end_of_turn, self._end_of_chat = end_of_turn, end_of_chat
        if end_of_chat not in ("auto", "none") and not self.special.fullmatch(end_of_chat):
            needed = "be auto, none or an added token of the tokenizer, at which generation stops"
            raise UsageError(must("end_of_chat", needed, repr(end_of_chat)))
        self._probe()

    def probed_with(self, arguments: dict[str, Any]) -> "ChatTemplate":
        """Return the template with other arguments, which is probed again. Raises `UsageError`."""
        other = self.with_arguments(arguments)
        for name in ("thought_field", "opener", "_after_call"):
            vars(other).pop(name, None)
        other._probe()
        return other

    @cached_property
    def opener(self) -> str | None:
        """The special token that begins the assistant's turn, as it may every turn, and ends none."""
        first = self.special.match(self.header)
        return first[0] if first and not self.end_pattern.fullmatch(first[0]) else None

    def end_of_chat(self, is_call: bool) -> str:
        """Return the text that is to end a chat whose last turn the template leaves open, or "".

        is_call: the turn ends with a call of a tool.
        """
        return self._after_call if is_call else self._after_words

    @cached_property
    def thought_field(self) -> str | None:
        """The field whose words the template prints as a call's thought."""
        for name in REASONING_FIELDS:
            for arguments in ({"n": "1"}, '{"n": "1"}'):
                call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
                turn = {"role": "assistant", "content": "", name: _THOUGHT, "tool_calls": [call]}
                if _THOUGHT in (self.try_render([{"role": "user", "content": "hi"}, turn]) or ""):
                    return name
        return None

    def with_arguments_as_printed(self, chat: Chat) -> tuple[Chat, str]:
        """Return the chat and its text, arguments as the template takes them.

        That is an object, or JSON text if the template fails for any object, or prints it as Python does. The form
        follows from the template and the chat alone, so that equal chats give equal texts in any order.
        """
        objects = [call.get("arguments") for call in functions_called(chat.messages)]
        if not objects:
            return chat, self.render(chat.messages, chat.tools)
        text = self.try_render(chat.messages, chat.tools)
        # As Python prints an object, {'n': True}; some look alike in JSON.
        as_python = {repr(each) for each in objects if repr(each) != json.dumps(each, ensure_ascii=False)}
        if text is not None and not any(printed in text for printed in as_python):
            return chat, text
        with_texts = chat.with_argument_texts()
        other = self.try_render(with_texts.messages, chat.tools)
        if text is None:
            plain = chat.with_arguments(lambda place, given: {"n": "1"})
            if other is None or self.try_render(plain.messages, chat.tools) is not None:
                return chat, self.render(chat.messages, chat.tools)  # raises its error again
            return with_texts, other
        # A message may hold such a text too, which is there in both forms.
        if other is not None and any(text.count(printed) > other.count(printed) for printed in as_python):
            return with_texts, other
        return chat, text

    def text(self, chat: Chat, is_prompt: bool = False) -> str:
        """Render a chat, or a server's prompt of it. Raises `BadRecord`."""
        chat, text = self.with_arguments_as_printed(chat)
        return self.render(chat.messages, chat.tools, generation=True) if is_prompt else text

    def header_at_start_of(self, text: str) -> int:
        """Return the length of the assistant's header that begins `text`, or 0."""
        header, printed = self.header, self.header_length
        if end := self.end_pattern.search(header):  # the end of the turn before, if a template leaves the last one open
            header = header[end.end() :].lstrip()
            printed -= len(self.header) - len(header)
        length = common_prefix(header, text)
        # A generation prompt may continue with a <think> that the chat itself lacks.
        return length if length == len(header) else printed if 0 < printed <= length else 0

    def last_special_token(self, text: str) -> str:
        """Return the special token that `text` ends with, or an empty string."""
        found = [match[0] for match in self.special.finditer(text) if match.end() == len(text)]
        return found[-1] if found else ""

    def token_edge(self, text: str, at: int) -> int:
        """Return `at`, or the start of the special token that contains it."""
        for match in self.special.finditer(text, max(at - 128, 0), at + 128):
            if match.start() < at < match.end():
                return match.start()
        return at

    def common_prefix(self, a: str, b: str) -> int:
        """Return two texts' common prefix, which ends inside no special token."""
        length = common_prefix(a, b)
        return min(self.token_edge(a, length), self.token_edge(b, length))

    def _probe(self) -> None:
        """Find the generation prompt and the ends of turns. Raises `UsageError`."""
        self._content_in_parts, end_of_turn = False, self._end_of_turn
        try:
            self.turn_ends = self._probed()
        except BadRecord as error:
            raise UsageError(f"the chat template must render a user and an assistant turn; {error}") from error
        self.end_pattern = any_of({*self.turn_ends} if end_of_turn else {*self.turn_ends, *self._stops})
        self._after_words = "" if self._end_of_chat == "none" else self._appended()
        if self._is_left_open and self._end_of_chat not in ("auto", "none", *self.turn_ends):
            self.turn_ends.append(self._end_of_chat)

    def _probed(self) -> list[str]:
        """Render a plain chat, and return the template's ends of turns."""
        before, tools, last = self._usable_chat()
        self._usable = before, tools
        base, prompt = (_in_own_case(self.render(before, tools, generation)) for generation in (False, True))
        if _QUESTION not in prompt:
            raise BadRecord("template_error", "it leaves a turn's content out")
        first_header = base.split(_QUESTION)[0]
        base, prompt = base.split(_QUESTION)[-1], prompt.split(_QUESTION)[-1]
        gap = last.split(_QUESTION)[-1].split(_ANSWER)[0]
        own = self._before_header(base, prompt, first_header)
        self.generation_prompt = prompt[own:] or self._standing_prompt(base, gap, first_header)
        self.header = self.generation_prompt.lstrip()  # some templates print it without the white space before it
        self.header_length, _ = longest_prefix_in(self.header, gap)
        last_tail = last.split(_ANSWER)[-1]
        inner = _in_own_case(self.try_render([*before, _ASSISTANT, _USER], tools) or "")
        inner_tail = inner.split(_ANSWER)[-1].split(_QUESTION)[0]
        self._tails = last_tail, inner_tail
        # How the template frames a chat's turns, whatever its arguments print before the first one.
        self.framing = base, prompt, last.partition(_QUESTION)[2], inner.partition(_QUESTION)[2]
        if end_of_turn := self._end_of_turn:
            if end_of_turn not in f"{last_tail}\0{inner_tail}":
                needed = "be a text that the chat template writes after an assistant's words"
                raise UsageError(must("end_of_turn", needed, f"{end_of_turn!r}, and it writes {last_tail!r}"))
            return [end_of_turn]
        if _ANSWER not in inner or _QUESTION not in inner.split(_ANSWER)[-1]:  # the template prints one turn only
            return [end for end in [self._turn_end(last_tail)] if end]
        inner_length, _ = longest_prefix_in(self.header, inner.split(_QUESTION)[1].split(_ANSWER)[0])
        self.header_length = min(self.header_length, inner_length)
        both = inner_tail[: self.common_prefix(last_tail, inner_tail)]
        tokens = self.special.findall(both)
        if last_tail[len(both) :].strip() and len(tokens) > 1 and tokens[-1] in first_header:
            both = both[: both.rindex(tokens[-1])]  # it begins a next turn's header, which ends every chat
        if both.strip():
            return [end for end in [self._turn_end(both)] if end]
        ends = [self._inner_turn_end(inner_tail, first_header), self._turn_end(last_tail)]
        return [end for end in ends if self.special.search(end)]  # text that only ends a chat ends no turn

    def _standing_prompt(self, base: str, gap: str, first_header: str) -> str:
        """Return the generation prompt that a template prints after every chat, or "".

        base: the text after a chat's last question. gap: the text between a question and its answer. What `base` has
        beyond the question's own turn is the prompt.
        """
        before, tools = self._usable
        two = _in_own_case(self.try_render([*before, _USER], tools) or "").split(_QUESTION)
        between = two[1] if len(two) == 3 else ""
        # A template may refuse two questions in a row, or join their words.
        prompt = base[self._before_header(base, between if between.strip() else gap, first_header) :]
        return prompt if prompt.strip() else ""

    def _before_header(self, text: str, other: str, first_header: str) -> int:
        """Return where the texts after a turn's words depart, or where the header begins in which they do."""
        own = self.common_prefix(text, other)
        tokens = self.special.findall(text[:own])
        if own < len(text) and len(tokens) > 1 and tokens[-1] in first_header:
            return text.rindex(tokens[-1], 0, own)
        return own

    def _appended(self) -> str:
        """Return the text that ends a chat as the next turn's first token ends an earlier turn, or ""."""
        last_tail, inner_tail = self._tails
        is_auto = self._end_of_chat == "auto"
        end = any_of({*self.turn_ends, *self._stops} if is_auto else {self._end_of_chat}).search(inner_tail)
        # Nothing but tokens may stand before it, and none of them in the last turn.
        is_next = end and self.special.fullmatch(end[0]) and not self.special.sub("", inner_tail[: end.start()]).strip()
        if self._is_left_open and end and is_next:
            return inner_tail[: end.end()].removeprefix(last_tail)
        return "" if is_auto else self._end_of_chat

    @property
    def _is_left_open(self) -> bool:
        """Whether nothing ends a chat's last turn of words."""
        return not self._tails[0].strip()

    @cached_property
    def _after_call(self) -> str:
        """The text that ends a chat whose last turn calls a tool."""
        before, tools = self._usable
        chats = [*before, _CALLING], [*before, _CALLING, _RESULT]
        last, inner = (_in_own_case(self.try_render(chat, tools) or "") for chat in chats)
        if self._end_of_chat == "none" or _ANSWER not in last or _QUESTION not in inner.split(_ANSWER)[-1]:
            return self._after_words
        last_tail, inner_tail = last.split(_ANSWER)[-1], inner.split(_ANSWER)[-1].split(_QUESTION)[0]
        closers = self.common_prefix(last_tail, inner_tail)
        token = self.special.match(inner_tail[closers:].lstrip())
        if last_tail[closers:].strip() or token is None or token[0] not in self._stops:
            return self._after_words
        space = inner_tail[closers:]
        return space[: len(space) - len(space.lstrip())].removeprefix(last_tail[closers:]) + token[0]

    def _usable_chat(self) -> tuple[list[Message], list[Any] | None, str]:
        """Return (messages, tools, answered text) of the first chat that renders."""
        system = {"role": "system", "content": "Be kind."}
        tries: list[tuple[list[Message], list[Any] | None]] = [([_USER], None), ([system, _USER], None)]
        tries += [(messages, [_TOOL]) for messages, _ in tries]
        failed = None
        for self._content_in_parts in (False, True):
            for messages, tools in tries:
                try:
                    text = _in_own_case(self.render([*messages, _ASSISTANT], tools))
                    if _QUESTION in text and _ANSWER in text:
                        return messages, tools, text
                except BadRecord as error:
                    failed = failed or error
        raise failed or BadRecord("template_error", "it leaves a turn's content out")

    def _turn_end(self, tail: str) -> str:
        """Return a turn's end: first stop token, last special token, or text."""
        if stop := self.stop_pattern.search(tail):
            return stop[0]
        tail = tail.rstrip()
        return self.last_special_token(tail) or tail.lstrip()

    def _inner_turn_end(self, tail: str, first_header: str) -> str:
        """Return a turn's end before a user's turn; `first_header` begins chats."""
        first = self.special.match(tail.lstrip())
        headers = self.special.findall(first_header)
        if first is None or (headers[-1:] == [first[0]] and not self.stop_pattern.fullmatch(first[0])):
            return ""  # there is none, or it begins a user's turn
        stop = self.stop_pattern.search(tail)
        return stop[0] if stop else first[0]


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern of names, longest first; without names, of nothing."""
    return re.compile("|".join(map(re.escape, sorted(names, key=lambda name: (-len(name), name)))) or "(?!)")


def joined_spans(spans: Iterable[Span]) -> list[Span]:
    """Join the spans that touch; `spans` are in ascending order."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined


def common_prefix(a: str, b: str) -> int:
    """Return the common prefix's length, by a bisection that compares in C."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def longest_prefix_in(prompt: str, gap: str) -> tuple[int, int]:
    """Return length and position of `prompt`'s longest prefix in `gap`."""
    for length in range(len(prompt), 0, -1):
        if (at := gap.find(prompt[:length])) >= 0:
            return length, at
    return 0, 0
