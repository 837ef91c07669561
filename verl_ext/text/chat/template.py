"""A tokenizer's chat template: rendering, generation prompt, ends of turns."""

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from verl_ext.options import UsageError, first_line
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.messages import REASONING_FIELDS, Chat, Message
from verl_ext.text.records.tool_calls import functions_called

Span = tuple[int, int]
# The words of the chat that probes a template: private-use characters, which occur nowhere else.
_QUESTION, _ANSWER = "\ue0f3\ue0f4\ue0f5", "\ue0f0\ue0f1\ue0f2"
_USER = {"role": "user", "content": _QUESTION}
_ASSISTANT = {"role": "assistant", "content": _ANSWER}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "The word."}}},
    },
}


class ChatTemplate:
    r"""A chat template with the properties found by probing it.

    Attributes:
        generation_prompt: the text before a turn at inference, empty if the template has none.
        turn_ends: the texts that end an assistant's turn, which generation has to produce to stop.
        special: a pattern of special tokens.
        stop_pattern: a pattern of the tokens that stop generation.
        end_pattern: a pattern of the end of a turn in the template's own text.

    A template that cannot print content as a string is given lists of parts, `[{"type": "text", "text": …}]`.

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
        """
        self.tokenizer, self.template, self._left_out = tokenizer, template, left_out
        self.kwargs = template_kwargs
        if prints_date(self.source):
            # All renderings get the same time, because they must give the same text.
            now = datetime.fromisoformat(today) if today else datetime.now()
            self.kwargs = {"strftime_now": now.strftime, **template_kwargs}
        added = [str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()]
        self.special = any_of({*tokenizer.all_special_tokens, *added} - {""})
        stops = {tokenizer.eos_token or "", *stop_tokens} - {""}
        self.stop_pattern = any_of(stops)
        self._content_in_parts = False
        try:
            self.turn_ends = self._probe(end_of_turn)
        except BadRecord as error:
            raise UsageError(f"the chat template must render a user and an assistant turn; {error}") from error
        self.end_pattern = any_of({*self.turn_ends} if end_of_turn else {*self.turn_ends, *stops})

    @property
    def sources(self) -> list[str]:
        """The template's Jinja sources; several if the tokenizer names templates."""
        source = self.template or self.tokenizer.chat_template
        return [source] if isinstance(source, str) else list(source.values())

    @cached_property
    def source(self) -> str:
        """All sources in one text."""
        return "\n".join(self.sources)

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template itself marks the generated text, with `{% generation %}`."""
        return bool(re.search(r"\{%-?\s*generation\s*-?%\}", self.source))

    @cached_property
    def thought_field(self) -> str | None:
        """The field whose words the template prints as a call's thought."""
        for name in REASONING_FIELDS:
            for arguments in ({"n": "1"}, '{"n": "1"}'):
                call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
                turn = {"role": "assistant", "content": "", name: "Zq7thought", "tool_calls": [call]}
                if "Zq7thought" in (self.try_render([{"role": "user", "content": "hi"}, turn]) or ""):
                    return name
        return None

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, generation: bool = False) -> str:
        """Render a chat, with the generation prompt if asked. Raises `BadRecord`."""
        try:
            text = self._print(self._as_given(messages), tools, generation)
        except Exception as error:  # a template's code may raise anything
            raise _template_error(error) from error
        return text if self._left_out is None else self._left_out.sub("", text)

    def _print(self, messages: Sequence[Message], tools: list[Any] | None, generation: bool) -> str:
        if self._jinja is None:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generation,
                **self.kwargs,
            )
            return text
        sandbox, variables = self._jinja
        messages[0]  # IndexError, as in transformers
        source = self.tokenizer.get_chat_template(self.template, tools)
        given = {"messages": sandbox.with_reasoning(messages), "tools": tools, "add_generation_prompt": generation}
        return sandbox.compiled(source)({**variables, **given})

    @cached_property
    def _jinja(self) -> tuple[Any, dict[str, Any]] | None:
        """The renderer and variables; None for tokenizers with their own."""
        from transformers import PreTrainedTokenizerBase  # here: the writing process does not need it

        from verl_ext.text.chat import sandbox

        own = getattr(self.tokenizer.apply_chat_template, "__func__", None)
        if own is not PreTrainedTokenizerBase.apply_chat_template:  # such as mistral-common's
            return None
        return sandbox, {"documents": None, **self.tokenizer.special_tokens_map, **self.kwargs}

    def try_render(
        self, messages: Sequence[Message], tools: list[Any] | None = None, generation: bool = False
    ) -> str | None:
        """Render a chat; return None if the template refuses it."""
        try:
            return self.render(messages, tools, generation)
        except BadRecord:
            return None

    def _as_given(self, messages: Sequence[Message]) -> Sequence[Message]:
        return [_in_parts(message) for message in messages] if self._content_in_parts else messages

    def generation_blocks(self, chat: Chat) -> list[Span]:
        """Return the spans that `apply_chat_template(return_assistant_tokens_mask=True)` marks."""
        from verl_ext.text.chat import sandbox  # here: the writing process does not need transformers

        try:
            source = self.tokenizer.get_chat_template(self.template, chat.tools)
            given = {"messages": sandbox.with_reasoning(self._as_given(chat.messages)), "tools": chat.tools}
            variables = {**self.tokenizer.special_tokens_map, **self.kwargs}
            text, spans = sandbox.render_with_blocks(source, {**variables, **given})
        except Exception as error:
            raise _template_error(error) from error
        gaps = [gap.span() for gap in self._left_out.finditer(text)] if self._left_out else []

        def moved(at: int) -> int:
            return at - sum(min(stop, at) - start for start, stop in gaps if start < at)

        return [(moved(start), moved(stop)) for start, stop in spans]

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

    def _probe(self, end_of_turn: str | None) -> list[str]:
        """Render a plain chat, and return the template's ends of turns."""
        before, tools, last = self._usable_chat()
        base, prompt = self.render(before, tools), self.render(before, tools, generation=True)
        if _QUESTION not in prompt:
            raise BadRecord("template_error", "it leaves a turn's content out")
        base, prompt = base.split(_QUESTION)[-1], prompt.split(_QUESTION)[-1]
        self.generation_prompt = prompt[common_prefix(base, prompt) :]
        gap = last.split(_QUESTION)[-1].split(_ANSWER)[0]
        self.header = self.generation_prompt.lstrip()  # some templates print it without the white space before it
        self.header_length = longest_prefix_in(self.header, gap)[0]
        last_tail = last.split(_ANSWER)[-1]
        inner = self.try_render([*before, _ASSISTANT, _USER], tools) or ""
        inner_tail = inner.split(_ANSWER)[-1].split(_QUESTION)[0]
        if end_of_turn:
            if end_of_turn not in f"{last_tail}\0{inner_tail}":
                raise UsageError(
                    "end_of_turn must be a text that the chat template writes after an assistant's words; got"
                    f" {end_of_turn!r}, and it writes {last_tail!r}"
                )
            return [end_of_turn]
        if _ANSWER not in inner or _QUESTION not in inner.split(_ANSWER)[-1]:  # the template prints one turn only
            return [end for end in [self._turn_end(last_tail)] if end]
        self.header_length = min(
            self.header_length, longest_prefix_in(self.header, inner.split(_QUESTION)[1].split(_ANSWER)[0])[0]
        )
        both = inner_tail[: self.common_prefix(last_tail, inner_tail)]
        first_header = inner.split(_QUESTION)[0]
        tokens = self.special.findall(both)
        if last_tail[len(both) :].strip() and len(tokens) > 1 and tokens[-1] in first_header:
            both = both[: both.rindex(tokens[-1])]  # it begins a next turn's header, which ends every chat
        if both.strip():
            return [end for end in [self._turn_end(both)] if end]
        ends = [self._inner_turn_end(inner_tail, first_header), self._turn_end(last_tail)]
        return [end for end in ends if self.special.search(end)]  # text that only ends a chat ends no turn

    def _usable_chat(self) -> tuple[list[Message], list[Any] | None, str]:
        """Return (messages, tools, answered text) of the first chat that renders."""
        system = {"role": "system", "content": "Be kind."}
        tries: list[tuple[list[Message], list[Any] | None]] = [([_USER], None), ([system, _USER], None)]
        tries += [(messages, [_TOOL]) for messages, _ in tries]
        failed = None
        for self._content_in_parts in (False, True):
            for messages, tools in tries:
                try:
                    text = self.render([*messages, _ASSISTANT], tools)
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


def _template_error(error: Exception) -> BadRecord:
    return BadRecord("template_error", f"the chat template fails: {first_line(error)}")


def _in_parts(message: Message) -> Message:
    """Return the message with content in parts, as vision models' templates expect."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def prints_date(source: Any) -> bool:
    """Tell whether a template, or one of several, may print today's date."""
    return "strftime_now" in str(source)


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
