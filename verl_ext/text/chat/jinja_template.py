"""A chat template's Jinja source with its arguments, and the texts that it renders."""

import copy
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar

from verl_ext.options import first_line
from verl_ext.text.chat.source import TemplateSource, read_source
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.messages import Chat, Message

Span = tuple[int, int]
TemplateT = TypeVar("TemplateT", bound="JinjaTemplate")


class JinjaTemplate:
    """A tokenizer's chat template, or one that replaces it, with arguments.

    A template that cannot print content as a string is given lists of parts, `[{"type": "text", "text": …}]`.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        arguments: dict[str, Any],
        left_out: re.Pattern[str] | None = None,
        today: str | None = None,
    ) -> None:
        """Prepare to render.

        Args:
            tokenizer: the tokenizer.
            template: a template that replaces the tokenizer's own.
            arguments: the template's arguments.
            left_out: a pattern that is removed from every rendered text.
            today: the day that the template prints as today's, 2026-11-25; None: the present day.
        """
        self.tokenizer, self.template, self._left_out = tokenizer, template, left_out
        self.arguments = dict(arguments)
        self._content_in_parts = False
        self._constants: dict[str, Any] = {}  # variables beside the arguments
        if prints_date(self.source):
            # All renderings get the same time, because they must give the same text.
            now = datetime.fromisoformat(today) if today else datetime.now()
            self._constants = {"strftime_now": now.strftime}

    def with_arguments(self: TemplateT, arguments: dict[str, Any]) -> TemplateT:
        """Return the template with other arguments, under which its turns are framed alike."""
        if arguments is self.arguments:  # True is equal to 1, and printed otherwise
            return self
        other = copy.copy(self)
        other.arguments = arguments
        vars(other).pop("_jinja", None)
        return other

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
    def facts(self) -> TemplateSource:
        """What the source names, compares and seeks."""
        return read_source(tuple(self.sources))

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
                **self._constants,
                **self.arguments,
            )
            return text
        sandbox, variables = self._jinja
        messages[0]  # IndexError, as in transformers
        source = self.tokenizer.get_chat_template(self.template, tools)
        given = {"messages": sandbox.with_reasoning(messages), "tools": tools, "add_generation_prompt": generation}
        return sandbox.compiled(source)({**variables, **given})

    @property
    def is_jinja(self) -> bool:
        """Whether the template is rendered from its source; False for tokenizers with a function of their own."""
        return self._jinja is not None

    @cached_property
    def _jinja(self) -> tuple[Any, dict[str, Any]] | None:
        """The renderer and variables; None for tokenizers with their own."""
        from transformers import PreTrainedTokenizerBase  # here: the writing process does not need it

        from verl_ext.text.chat import sandbox

        own = getattr(self.tokenizer.apply_chat_template, "__func__", None)
        if own is not PreTrainedTokenizerBase.apply_chat_template:  # such as mistral-common's
            return None
        return sandbox, {"documents": None, **self.tokenizer.special_tokens_map, **self._constants, **self.arguments}

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
            variables = {**self.tokenizer.special_tokens_map, **self._constants, **self.arguments}
            text, spans = sandbox.render_with_blocks(source, {**variables, **given})
        except Exception as error:
            raise _template_error(error) from error
        gaps = [gap.span() for gap in self._left_out.finditer(text)] if self._left_out else []

        def moved(at: int) -> int:
            return at - sum(min(stop, at) - start for start, stop in gaps if start < at)

        return [(moved(start), moved(stop)) for start, stop in spans]


def _template_error(error: Exception) -> BadRecord:
    return BadRecord("template_error", f"the chat template fails: {first_line(error)}")


def _in_parts(message: Message) -> Message:
    """Return the message with content in parts, as vision models' templates expect."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def prints_date(source: Any) -> bool:
    """Tell whether a template, or one of several, may print today's date."""
    return "strftime_now" in str(source)
