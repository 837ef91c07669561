"""Render chats as texts with learnt parts.

    chat -> hidden names (special_tokens) -> frames, or spans -> text, targets with borders (parts) -> learnt

`ChatRenderer` is the door to this folder: what it returns is complete, and nothing changes it afterwards.
"""

import re
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from verl_ext.cache import fingerprint
from verl_ext.options import UsageError, must
from verl_ext.text.chat.frames import ArgumentCaches, FrameCache
from verl_ext.text.chat.learnt import EMPTY_BLOCK, Learnt, Part, without_empty_blocks
from verl_ext.text.chat.marks import IDENTIFIERS
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.chat.parts import EMPTY_REASONING, REASONING, TOOL_CALL, RenderedChat, is_opened
from verl_ext.text.chat.special_tokens import STAND_INS, SpecialTokens
from verl_ext.text.chat.template import ChatTemplate, Span, joined_spans
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.records.messages import Chat
from verl_ext.text.tokens.tokenizer import check_template, stop_tokens


class RenderedTurns(NamedTuple):
    """A rendered chat and its parts to be learnt; prompts have none.

    Attributes:
        text: the text.
        parts: the parts of the targets in order, with their weights.
        learnt: the parts whose weight is not 0.
        turns: the messages that are targets.
        ends: the text that ends each of them, "" if none does.
        dropped_reasoning: the number of turns whose reasoning was left out.
        dropped_blocks: 1 if empty thinking blocks are left out.
        disguised: the text for `SpecialTokens.renamed_tokenizer`, if messages hold names of special tokens.
        special_tokens: the number of these names.
        unprinted: in a record's first text: the kinds of words that its texts lack.
    """

    text: str
    parts: tuple[Part, ...] = ()
    learnt: tuple[Part, ...] = ()
    turns: tuple[int, ...] = ()
    ends: tuple[str, ...] = ()
    dropped_reasoning: int = 0
    dropped_blocks: int = 0
    disguised: str | None = None
    special_tokens: int = 0
    unprinted: tuple[str, ...] = ()

    @property
    def spans(self) -> list[Span]:
        """The characters that are learnt, with touching spans joined."""
        return joined_spans((part.start, part.stop) for part in self.learnt)


class _Located(NamedTuple):
    """A chat with targets, and what `RenderedTurns` says of the special tokens that its messages name."""

    rendered: RenderedChat
    disguised: str | None = None
    special_tokens: int = 0


class ChatRenderer:
    """A renderer of chats with one template and one set of options."""

    def __init__(self, tokenizer: Any, special: SpecialTokens, options: ChatOptions) -> None:
        """Read the template. Raises `UsageError` if missing or unusable."""
        if (template := options.given_template) is not None:
            given = str(options.chat_template)
            check_template(template, "one" if template == given else given, "chat_template")
        elif not tokenizer.chat_template:
            needed = f"be given for chat records: the tokenizer of {options.model.tokenizer} has none"
            raise UsageError(must("chat_template", needed, None))
        self._special, self._options, self._tokenizer, self._source = special, options, tokenizer, template
        self._stops = stop_tokens(tokenizer, options.model)
        kinds = {REASONING: options.reasoning, TOOL_CALL: options.tool_calls, EMPTY_REASONING: options.empty_reasoning}
        learnt = {kind: chosen == "learn" for kind, chosen in kinds.items()}
        self._learnt = Learnt(learnt, options.prompts == "learn", options.weights)
        self._chats = ArgumentCaches(self._new_template())
        self.template = self._chats.template

    def _new_template(self, left_out: re.Pattern[str] | None = None) -> ChatTemplate:
        options = self._options
        return ChatTemplate(
            self._tokenizer,
            self._source,
            options.apply_chat_template_kwargs,
            options.end_of_turn,
            self._stops,
            left_out,
            options.chat_date,
            options.end_of_chat,
        )

    @cached_property
    def _without_blocks(self) -> ArgumentCaches:
        """The caches of chats that lose their empty thinking blocks."""
        return ArgumentCaches(self._new_template(EMPTY_BLOCK))

    @property
    def jinja(self) -> str | None:
        """The template's Jinja source; None if there are several by name."""
        chosen = self.template.template or self.template.tokenizer.chat_template
        return chosen if isinstance(chosen, str) else None

    def render(self, chat: Chat) -> list[RenderedTurns]:
        """Render a chat, or every learnt turn with `turns=each`. Raises `BadRecord`.

        Unprinted words that `on_unprinted` accepts are recorded in the first text.
        """
        chats, chat, is_drawn = self._chosen(chat)
        texts: list[RenderedTurns] = []
        unprinted: set[str] = set()
        for part in self._turns(chat):
            part, dropped = self._without_reasoning(chats, part)
            located = self._located(chats, part, is_prompt=False)
            rendered = located.rendered
            parts = self._learnt.parts(rendered, part)
            turns = tuple(dict.fromkeys([target.message for target in rendered.targets]))
            ends = tuple([target.closed_by for target in rendered.targets if target.closed_by is not None])
            learnt = tuple([each for each in parts if each.weight])
            texts.append(
                RenderedTurns(
                    rendered.text,
                    tuple(parts),
                    learnt,
                    turns,
                    ends,
                    dropped_reasoning=dropped,
                    dropped_blocks=int(is_drawn),
                    disguised=located.disguised,
                    special_tokens=located.special_tokens,
                )
            )
            unprinted.update(rendered.unprinted)
        # Refuse a chat of which nothing is learnt, by the first cause that explains it.
        with_turns = [text for text in texts if text.turns]
        if unprinted and (self._options.on_unprinted != "warn" or not with_turns):
            message = f"the chat template leaves out: {', '.join(sorted(unprinted))}"
            if self._options.on_unprinted != "warn":
                raise BadRecord("unprinted", message)
            raise BadRecord("no_target", f"there is nothing to learn: {message}")
        if not with_turns:
            raise BadRecord("no_target", "the chat template marks no assistant turn")
        if not (with_targets := [text for text in with_turns if text.learnt]):
            raise BadRecord("no_target", "no part of an assistant turn is to be learnt")
        if unprinted:
            with_targets[0] = with_targets[0]._replace(unprinted=tuple(sorted(unprinted)))
        return with_targets

    def prompt(self, chat: Chat, turn: int) -> RenderedTurns:
        """Return the text before message `turn`, with the changes of `render`.

        Raises `BadRecord`.
        """
        chats, chat, _ = self._chosen(chat)
        chat, _ = self._without_reasoning(chats, chat)
        before = replace(chat, messages=chat.messages[:turn], targets={})
        located = self._located(chats, before, is_prompt=True)
        return RenderedTurns(located.rendered.text, disguised=located.disguised, special_tokens=located.special_tokens)

    def _chosen(self, chat: Chat) -> tuple[FrameCache, Chat, bool]:
        """Return the template, the chat for it, and whether blocks are dropped."""
        chat = self._as_template_reads(chat)
        chats = self._with_arguments(self._chats, chat)
        if chat.thoughts and (name := chats.template.thought_field):
            chat = chat.with_thoughts_in(name)
        if self._options.drop_empty_reasoning and self._is_drawn(chat):
            return self._with_arguments(self._without_blocks, chat), without_empty_blocks(chat), True
        return chats, chat, False

    def _with_arguments(self, caches: ArgumentCaches, chat: Chat) -> FrameCache:
        try:
            return caches.of(chat.template_kwargs)
        except UsageError as error:
            raise BadRecord("template_error", f"with the record's template arguments, {error}") from error

    def _as_template_reads(self, chat: Chat) -> Chat:
        """Return a chat with the arguments, roles and fields under which the template prints it as the record says.

        Raises `BadRecord` for a message without content of which the template reads no other field.
        """
        facts, arguments = self.template.facts, self.template.arguments
        if chat.template_kwargs:
            is_read = facts.names if self.template.is_jinja else chat.template_kwargs
            own = {name: value for name, value in chat.template_kwargs.items() if name in is_read}
            arguments = {**arguments, **own} if own else arguments
        if arguments or chat.template_kwargs:  # most chats have none, and need no copy
            chat = replace(chat, template_kwargs=arguments)
        for index, where in chat.unsaid.items():
            fields = chat.messages[index].keys() - {"role", "content"} - IDENTIFIERS
            if not fields & facts.names:
                raise BadRecord("non_string_content", f"{where} has no content")
        messages = list(chat.messages)
        for index, role in chat.roles.items():
            if role in facts.roles:
                messages[index] = {**messages[index], "role": role}
        tools = chat.tools
        for index, fields_of_system in chat.system_tools.items():
            if fields_of_system.keys() <= facts.message_fields:
                messages[index], tools = {**messages[index], **fields_of_system}, None
        return replace(chat, messages=messages, tools=tools) if chat.roles or chat.system_tools else chat

    def _without_reasoning(self, chats: FrameCache, chat: Chat) -> tuple[Chat, int]:
        """Return a chat as `reasoning` asks, and how many turns lost some."""
        if self._options.reasoning != "drop":
            return chat, 0
        return self._learnt.without_reasoning(chat, is_opened(chats.template.generation_prompt))

    def _is_drawn(self, chat: Chat) -> bool:
        """Decide by a chat's text whether its empty thinking blocks go.

        The answers to one prompt are drawn by that prompt, alike. If text of others than the assistant has such a
        block, as in a question about thinking, all blocks are kept.
        """
        number = int(fingerprint(repr(chat.messages[: chat.shared or None]), digits=16), 16) / 16**16
        if number >= self._options.drop_empty_reasoning:
            return False
        others = replace(chat, messages=[message for message in chat.messages if message["role"] != "assistant"])
        return not any(EMPTY_BLOCK.search(text) for text in _strings_of(others))

    def _turns(self, chat: Chat) -> list[Chat]:
        if self._options.turns == "each":
            return [
                replace(chat, messages=chat.messages[: i + 1], targets={i: weight})
                for i, weight in chat.targets.items()
            ]
        if self._options.turns == "last":
            chat = chat.with_last_target()
            if not chat.targets:
                raise BadRecord("no_target", "the last assistant turn is no target")
        return [chat]

    def _located(self, chats: FrameCache, chat: Chat, is_prompt: bool) -> _Located:
        """Render a chat as `special_tokens_in_text` asks.

        Raises `BadRecord` under `error` if a rendered message holds the name of a special token, and under `encode` if
        its place in the rendered text cannot be found or the tokenizer is not a fast one.
        """
        on_found, special = self._options.special_tokens_in_text, self._special

        def text_of(chat: Chat) -> str:
            arguments = chat.template_kwargs or chats.template.arguments
            return chats.template.with_arguments(arguments).text(chat, is_prompt)

        def render(chat: Chat) -> RenderedChat:
            return RenderedChat(text_of(chat)) if is_prompt else chats.locate(chat)

        # Almost no chat holds a name, so that this check is the only cost.
        if on_found == "keep" or not special.may_hide_in("\0".join(strings := _strings_of(chat))):
            return _Located(render(chat))
        first = next((found[0][0] for text in strings if (found := special.found(text))), None)
        if any(STAND_INS.search(text) for text in strings):
            if first is not None:
                raise special.refused(first, "beside private-use characters, which encoding it as text needs")
            return _Located(render(chat))
        fields = ("messages", "tools", "argument_texts", "template_kwargs")
        hidden = render(replace(chat, **{name: special.hide(getattr(chat, name)) for name in fields}))
        text, count = special.show(hidden.text)
        if first is not None and text != text_of(chat) + hidden.appended:
            raise special.refused(first, "and the chat template changes it, so that its place cannot be found")
        if first is not None and count and on_found == "error":
            raise special.refused(first)
        if not self._tokenizer.is_fast:
            if first is not None and count:
                raise special.refused(first, "and only a fast tokenizer can encode it as text")
            return _Located(hidden._replace(text=text))
        return _Located(hidden._replace(text=text), special.disguise(hidden.text), count)


def _strings_of(chat: Chat) -> list[str]:
    """Collect every string in a chat's messages, tools and template arguments, keys included."""
    found: list[str] = []
    rest: list[Any] = [*chat.messages, *(chat.tools or []), chat.template_kwargs]
    for value in rest:  # the loop appends to this list
        if isinstance(value, dict):
            found += map(str, value)
            for item in value.values():
                (found if isinstance(item, str) else rest).append(item)
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, str):
            found.append(value)
    return found
