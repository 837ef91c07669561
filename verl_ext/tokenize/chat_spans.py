"""Where the assistant's turns lie in a rendered chat.

A chat is rendered once, whole, and that text is what is tokenised. A target span runs from the end of the generation
prompt (what the model is given at inference) to the end of the end-of-turn token:

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nhello<|im_end|>\\n
                                                          ^^^^^^^^^^^^^^^

Three ways to find it, in this order:

1. templates with `{% generation %}` say so themselves;
2. the chat up to the turn, with generation prompt, is a prefix of the chat up to and with the turn, which is a prefix
   of the whole;
3. templates that rewrite earlier turns (thinking removed, other endings) have no such prefixes. There the turn's
   content is swapped for a marker, the chat rendered again, and the text that changed is the content, whatever the
   template made of it. Where the generation prompt goes on otherwise than the turn (an empty thinking block), what both
   share is no target.
"""

import re
from typing import Any

from verl_ext.commands.errors import UsageError, first_line
from verl_ext.tokenize.bad_record import BadRecord
from verl_ext.tokenize.records import Chat, Message

# Private-use characters: no template strips, splits or trims at them, and data does not have them.
MARKER = "\ue0f0\ue0f1\ue0f2"
OTHER_MARKER = "\ue0f3\ue0f4\ue0f5"
SPOKEN_FIELDS = ("content", "reasoning_content", "reasoning", "thinking")
Span = tuple[int, int]


class ChatTemplate:
    """A tokenizer's chat template, and what a plain chat shows of it: generation prompt and end-of-turn tokens."""

    def __init__(self, tokenizer: Any, template: str | None, template_kwargs: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.kwargs = template_kwargs
        self.has_generation = bool(re.search(r"\{%-?\s*generation\s*-?%\}", self._source()))
        added = [str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()]
        self.special_tokens = sorted({*tokenizer.all_special_tokens, *added} - {""})
        try:
            self._probe()
        except BadRecord as error:
            raise UsageError(f"the chat template must render a user and an assistant turn; {error}") from error

    def _source(self) -> str:
        source = self.template or self.tokenizer.chat_template
        return source if isinstance(source, str) else "".join(source.values())

    def _probe(self) -> None:
        user = {"role": "user", "content": OTHER_MARKER}
        assistant = {"role": "assistant", "content": MARKER}
        base, prompt = self.render([user]), self.render([user], generation=True)
        last, inner = self.render([user, assistant]), self.render([user, assistant, user])
        if MARKER not in last or MARKER not in inner or OTHER_MARKER not in prompt:
            raise BadRecord("template_error", "it leaves a turn's content out")
        self.generation_prompt = prompt[_common_prefix(base, prompt) :]
        gaps = (text.split(OTHER_MARKER)[1].split(MARKER)[0] for text in (last, inner))
        self.header_length = min(_longest_prefix_in(self.generation_prompt, gap)[0] for gap in gaps)
        self.last_tail = last.split(MARKER)[1]
        inner_tail = inner.split(MARKER)[1].split(OTHER_MARKER)[0]
        self.end_tokens = self._probed_end_tokens(inner_tail)
        _, self.last_tail_end = self._find_end(self.last_tail) or (0, 0)

    def _probed_end_tokens(self, inner_tail: str) -> list[str]:
        """The end-of-turn tokens of a last and of an earlier turn: the first special token after the content."""
        last = _earliest(self.last_tail, self.special_tokens)
        if last is None:  # a template that never closes its last turn may still close the others
            eos = self.tokenizer.eos_token
            return [eos] if eos and eos in inner_tail else []
        ends = [self.last_tail[slice(*last)]]
        if ends[0] not in inner_tail and (inner := _earliest(inner_tail, self.special_tokens)):
            ends.append(inner_tail[slice(*inner)])
        return ends

    def _find_end(self, text: str) -> Span | None:
        return _earliest(text, self.end_tokens)

    def render(self, messages: list[Message], tools: list[Any] | None = None, generation: bool = False) -> str:
        """The chat's text; `BadRecord` where the template refuses it."""
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generation,
                **self.kwargs,
            )
        except Exception as error:  # a template is a program of its own and may raise anything
            raise BadRecord("template_error", f"the chat template fails: {first_line(error)}") from error

    def text(self, chat: Chat) -> str:
        """The whole chat's text, as `spans` gives it."""
        return self._render_with_generation(chat)[0] if self.has_generation else self.render(chat.messages, chat.tools)

    def spans(self, chat: Chat) -> tuple[str, list[Span]]:
        """The chat's text and the character spans of its targets, in order.

        Raises `BadRecord` (`template_error`, `template_mismatch`) where a turn cannot be found in the text.
        """
        if self.has_generation:
            return self._generation_spans(chat)
        text = self.render(chat.messages, chat.tools)
        rewritten = _RewrittenChat(self, chat, text)
        spans: list[Span] = []
        for index in chat.targets:
            span = self._prefix_span(chat, text, index) or rewritten.span(index, spans[-1][1] if spans else 0)
            if span[0] >= span[1] or (spans and span[0] < spans[-1][1]):
                raise _mismatch(index, "is not where its content is")
            spans.append(span)
        return text, spans

    def _prefix_span(self, chat: Chat, text: str, index: int) -> Span | None:
        """The span of a turn that the template renders alike with and without what follows it."""
        if not self.generation_prompt or index == 0:
            return None
        is_last = index == len(chat.messages) - 1
        try:
            turn = text if is_last else self.render(chat.messages[: index + 1], chat.tools)
            if not text.startswith(turn) or not turn.endswith(self.last_tail):
                return None
            prompt = self.render(chat.messages[:index], chat.tools, generation=True)
        except BadRecord:  # some templates refuse a part of a chat
            return None
        if not turn.startswith(prompt) or not prompt.endswith(self.generation_prompt):
            return None
        return len(prompt), len(turn) - len(self.last_tail) + self.last_tail_end

    def _generation_spans(self, chat: Chat) -> tuple[str, list[Span]]:
        text, marked = self._render_with_generation(chat)
        spans: list[Span] = []
        for start, end in marked:
            if spans and start <= spans[-1][1]:  # blocks that touch are one turn
                start = spans.pop()[0]
            spans.append((start, end))
        spans = [self._trimmed(text, span) for span in spans]
        turns = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
        if len(spans) == len(turns):
            spans = [span for span, turn in zip(spans, turns, strict=True) if turn in chat.targets]
        elif chat.targets != turns:
            counts = f"{len(turns)} turns, {len(spans)} generation blocks"
            raise _mismatch(chat.targets[0], f"cannot be told from the others: {counts}")
        return text, [span for span in spans if span[0] < span[1]]

    def _render_with_generation(self, chat: Chat) -> tuple[str, list[Span]]:
        """The text and spans behind `apply_chat_template(return_assistant_tokens_mask=True)`, as characters."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[chat.messages],
                tools=chat.tools,
                chat_template=self.tokenizer.get_chat_template(self.template, chat.tools),
                return_assistant_tokens_mask=True,
                add_generation_prompt=False,
                **{**self.tokenizer.special_tokens_map, **self.kwargs},
            )
        except Exception as error:  # as in render()
            raise BadRecord("template_error", f"the chat template fails: {first_line(error)}") from error
        texts, spans = rendered
        return texts[0], spans[0]

    def _trimmed(self, text: str, span: Span) -> Span:
        """A generation block less the generation prompt at its start, ended by its end-of-turn token."""
        start, end = span
        prompt = self.generation_prompt
        if prompt and (at := text.find(prompt, max(start - len(prompt), 0), start + len(prompt))) >= 0:
            start = max(start, at + len(prompt)) if at <= start else start
        body = text[start:end].rstrip()
        if any(body.endswith(token) for token in self.end_tokens):
            return start, start + len(body)
        rest = text[end:]
        after = self._find_end(rest)
        return start, end + after[1] if after and not rest[: after[0]].strip() else end


class _RewrittenChat:
    """A chat whose turns are found by what changes in its text when their content does."""

    def __init__(self, template: ChatTemplate, chat: Chat, text: str) -> None:
        self.template = template
        self.chat = chat
        self.text = text
        self.found: dict[int, Span | None] = {}

    def span(self, index: int, previous_end: int) -> Span:
        """The target span of assistant turn `index`; nothing of it lies before `previous_end`."""
        content = self._content(index)
        if content is None or content[0] < previous_end:
            raise _mismatch(index, "is not rendered by the chat template")
        before = self._content(index - 1) if index else None
        floor = before[1] if before and previous_end <= before[1] <= content[0] else previous_end
        gap = self.text[floor : content[0]]
        length, at = _longest_prefix_in(self.template.generation_prompt, gap)
        has_header = 0 < self.template.header_length <= length
        start = floor + at + length if has_header else content[0]
        return start, self._end(index, content[1])

    def _end(self, index: int, content_end: int) -> int:
        after = self._content(index + 1) if index + 1 < len(self.chat.messages) else None
        tail = self.text[content_end : after[0] if after and after[0] >= content_end else None]
        end = self.template._find_end(tail)
        if end is None and self.template.end_tokens:
            end = _earliest(tail, self.template.special_tokens)
        return content_end + end[1] if end else content_end

    def _content(self, index: int) -> Span | None:
        """What of the text comes from message `index`; None where nothing does."""
        if index not in self.found:
            messages = list(self.chat.messages)
            messages[index] = _with_markers(messages[index])
            try:
                other = self.template.render(messages, self.chat.tools)
            except BadRecord:
                other = self.text
            self.found[index] = _changed(self.text, other) if other != self.text else None
        return self.found[index]


def _with_markers(message: Message) -> Message:
    """The message with other words in every field that a template prints."""
    marked = {key: MARKER if key in SPOKEN_FIELDS and isinstance(v, str) else v for key, v in message.items()}
    if message.get("tool_calls"):
        marked["tool_calls"] = [_call_with_markers(call) for call in message["tool_calls"]]
    return marked


def _call_with_markers(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call_with_markers(call["function"])}
    is_text = isinstance(call.get("arguments"), str)
    return {**call, "arguments": MARKER if is_text else {MARKER: MARKER}}


def _changed(text: str, other: str) -> Span:
    """The part of `text` that is not in `other`."""
    start = _common_prefix(text, other)
    end = _common_prefix(text[start:][::-1], other[start:][::-1])
    return start, len(text) - end


def _common_prefix(a: str, b: str) -> int:
    """Length of the common beginning, by bisection: compared in C, so that long documents cost little."""
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


def _longest_prefix_in(prompt: str, gap: str) -> tuple[int, int]:
    """Length and place of the longest beginning of `prompt` that stands in `gap`."""
    for length in range(len(prompt), 0, -1):
        if (at := gap.find(prompt[:length])) >= 0:
            return length, at
    return 0, 0


def _earliest(text: str, tokens: list[str]) -> Span | None:
    """The first place where one of `tokens` stands; the longest of those that begin there."""
    found = [(at, -len(token)) for token in tokens if (at := text.find(token)) >= 0]
    if not found:
        return None
    at, length = min(found)
    return at, at - length


def _mismatch(index: int, what: str) -> BadRecord:
    return BadRecord("template_mismatch", f"assistant turn (message {index + 1}) {what}")
