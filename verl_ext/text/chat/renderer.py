"""Render chats as texts with targets, and define the options for this."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

from verl_ext.cache import fingerprint
from verl_ext.options import UsageError, first_line, option
from verl_ext.text.chat.parts import EMPTY_BLOCK, Learnt, RenderedChat, is_opened, without_empty_blocks
from verl_ext.text.chat.special_tokens import ChatText, SpecialTokens, strings_of
from verl_ext.text.chat.template import ChatTemplate
from verl_ext.text.chat.template_cache import ProvenChats
from verl_ext.text.records.bad_record import BadRecord, RecordOptions
from verl_ext.text.records.messages import Chat
from verl_ext.text.records.records import column_problems
from verl_ext.text.records.shapes import RESERVED_TEMPLATE_KWARGS
from verl_ext.text.tokens.tokenizer import ModelOptions, check_template, read_template

OptionsT = TypeVar("OptionsT", bound="ChatOptions")
VARIANTS = 64  # the number of template arguments of records for which the template is kept


@dataclass(frozen=True)
class ChatOptions(RecordOptions):
    """The options that turn chat and text records into documents."""

    model: ModelOptions = option(ModelOptions, "the tokenizer")
    chat_template: str | None = option(None, "a Jinja template, or a file with one; null: the tokenizer's own")
    apply_chat_template_kwargs: dict[str, Any] = option({}, "template arguments, e.g. {enable_thinking: false}")
    chat_date: str | None = option(
        None, "day that the template prints as today's, such as 2026-11-25; null: the day on which the command runs"
    )
    end_of_turn: str | None = option(
        None, "text that ends an assistant turn, and is a target; null: found from template and stop tokens"
    )
    turns: str = option(
        "all",
        "assistant turns that are targets: all | last | each: one document per turn, with the chat up to it",
        choices=("all", "last", "each"),
    )
    reasoning: str = option(
        "learn",
        "reasoning of assistant turns: learn: a target | context: shown to the model, no target | drop: left out",
        choices=("learn", "context", "drop"),
    )
    empty_reasoning: str = option(
        "context",
        "thinking block without words, from the template or the record: context: no target | learn: a target",
        choices=("context", "learn"),
    )
    drop_empty_reasoning: float = option(
        0.0,
        "share of chats, drawn by their text, that lose thinking blocks without words; MiniMind-3 has 0.8",
        least=0,
        most=1,
    )
    tool_calls: str = option(
        "learn",
        "tool calls of assistant turns: learn: targets | context: shown to the model, no targets",
        choices=("learn", "context"),
    )
    on_unprinted: str = option(
        "warn",
        "chats of which the template omits a part: warn: used as printed, and counted | drop | error: bad records",
        choices=("error", "warn", "drop"),
    )
    last_turn_only: bool = option(False, "true: the same as turns=last")
    columns: dict[str, Any] = option(
        {}, "{known field: its name in the records}, a.b for a nested field; null: the field is not read"
    )
    category_field: str | None = option(
        None, "field that holds a record's category; a record without it has its source's name"
    )
    media: str = option(
        "error",
        "images, audio, video in records: error: a bad record | drop: the text is kept, the rest is counted",
        choices=("error", "drop"),
    )

    def dated(self: OptionsT) -> OptionsT:
        """Return the options with today's date if they have none, so that all workers and nodes print the same."""
        return self if self.chat_date else replace(self, chat_date=date.today().isoformat())

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake that can be seen without opening a source."""
        yield date_problem("chat_date", self.chat_date)
        yield from self.model.tokenizer_problems()
        yield from column_problems(self.columns)
        if self.category_field == "":
            yield "category_field must name a field of the records, or be null; got ''"
        if self.last_turn_only and self.turns == "each":
            yield "last_turn_only must not be set beside turns; got true beside turns=each"
        if self.end_of_turn == "":
            yield "end_of_turn must be a text that ends a turn, or null; got ''"
        for name in RESERVED_TEMPLATE_KWARGS.intersection(self.apply_chat_template_kwargs):
            yield f"apply_chat_template_kwargs must not set {name}, which this command sets itself"
        if self.chat_template is not None:
            try:
                read_template(self.chat_template, "chat_template")
            except UsageError as error:
                yield str(error)


def date_problem(key: str, given: str | None) -> str | None:
    """Return a line if a date is given that is no day of the calendar."""
    try:
        if given is None or (len(given) == 10 and date.fromisoformat(given)):
            return None
    except ValueError:
        pass
    return f"{key} must be a day such as 2026-11-25, or null; got {given}"


class _Prompts:
    """A renderer of the messages before an answer as the prompt that a server gives the model."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    def located(self, chat: Chat) -> RenderedChat:
        """Render the messages; a prompt has no targets."""
        return RenderedChat(self.text(chat), [])

    def text(self, chat: Chat) -> str:
        """Render the messages with the generation prompt."""
        asked, _ = self.template.with_arguments_as_printed(chat)
        return self.template.render(asked.messages, asked.tools, generation=True)


class _Variant(NamedTuple):
    """The template with the arguments of some records; the second renderer leaves out empty thinking blocks."""

    chats: ProvenChats
    without_blocks: ProvenChats | None
    opens_reasoning: bool  # the generation prompt does


class ChatRenderer:
    """A renderer of chats as texts with targets, with one template and one set of options."""

    def __init__(self, tokenizer: Any, special: SpecialTokens, options: ChatOptions) -> None:
        """Read the template. Raises `UsageError` if it is missing or cannot be used."""
        template = given = options.chat_template
        if given is not None:
            template = read_template(given, "chat_template")
            check_template(template, "one" if template == given else given, "chat_template")
        elif not tokenizer.chat_template:
            raise UsageError(
                f"chat_template must be given for chat records: the tokenizer of {options.model.tokenizer} has none"
            )
        self._special, self._options, self._tokenizer, self._source = special, options, tokenizer, template
        self._stops = stop_tokens(tokenizer, options.model)
        self._learnt = Learnt(
            options.reasoning == "learn", options.tool_calls == "learn", options.empty_reasoning == "learn"
        )
        self._cached_variant = lru_cache(VARIANTS)(self._new_variant)
        self.template = self._cached_variant("{}").chats.template  # for records without arguments of their own

    def _new_variant(self, arguments: str) -> _Variant:
        """Probe the template with a record's arguments in JSON. Raises `UsageError` as `ChatTemplate` does."""
        given, options = {**self._options.apply_chat_template_kwargs, **json.loads(arguments)}, self._options
        given_to_all = (self._tokenizer, self._source, given, options.end_of_turn, self._stops)
        chats = ProvenChats(ChatTemplate(*given_to_all, today=options.chat_date))
        without_blocks = None
        if options.drop_empty_reasoning:
            without_blocks = ProvenChats(ChatTemplate(*given_to_all, left_out=EMPTY_BLOCK, today=options.chat_date))
        return _Variant(chats, without_blocks, is_opened(chats.template.generation_prompt))

    def _variant(self, chat: Chat) -> _Variant:
        try:
            return self._cached_variant(json.dumps(chat.template_kwargs, sort_keys=True))
        except UsageError as error:
            raise BadRecord("template_error", f"with the record's template arguments, {error}") from error

    @cached_property
    def template_words(self) -> set[str]:
        """The names that occur in the template."""
        return set(re.findall(r"\w+", self.template.source))

    @property
    def jinja(self) -> str | None:
        """The Jinja source of the template; None if the tokenizer has several by name."""
        chosen = self.template.template or self.template.tokenizer.chat_template
        return chosen if isinstance(chosen, str) else None

    @property
    def end(self) -> str | None:
        """The text that ends a chat, after its last turn; None if the template writes none."""
        return next(reversed(self.template.ends), None)

    def texts(self, chat: Chat) -> list[ChatText]:
        """Render a chat, or with `turns=each` every turn to be learnt. Raises `BadRecord`.

        Unprinted words that `on_unprinted` accepts are recorded in the first text.
        """
        on_found = self._options.special_tokens_in_text
        texts = []
        chats, chat, is_drawn = self._chosen(chat)
        for part in self._turns(chat):
            part, dropped = self._without_reasoning(part)
            text = self._special.chat_text(chats, part, on_found)
            text.parts, text.dropped_reasoning = self._learnt.parts(text.rendered, part), dropped
            text.learnt = [part for part in text.parts if part.weight]
            text.dropped_blocks = int(is_drawn)
            texts.append(text)
        unprinted = sorted({kind for text in texts for kind in text.rendered.unprinted})
        learnt = [text for text in texts if text.rendered.targets]
        if unprinted and (self._options.on_unprinted != "warn" or not learnt):
            message = f"the chat template leaves out: {', '.join(unprinted)}"
            if self._options.on_unprinted != "warn":
                raise BadRecord("unprinted", message)
            raise BadRecord("no_target", f"there is nothing to learn: {message}")
        if not learnt:
            raise BadRecord("no_target", "the chat template marks no assistant turn")
        if not (learnt := [text for text in learnt if text.learnt]):
            raise BadRecord("no_target", "no part of an assistant turn is to be learnt")
        learnt[0].unprinted = unprinted
        return learnt

    def prompt(self, chat: Chat, turn: int) -> ChatText:
        """Return the text from which message `turn` is generated, with the changes that `texts` makes of the chat.

        Raises `BadRecord`.
        """
        chats, chat, _ = self._chosen(chat)
        chat, _ = self._without_reasoning(chat)
        before = replace(chat, messages=chat.messages[:turn], targets={})
        return self._special.chat_text(_Prompts(chats.template), before, self._options.special_tokens_in_text)

    def _chosen(self, chat: Chat) -> tuple[ProvenChats, Chat, bool]:
        """Return the renderer for a chat, the chat that it gets, and whether empty thinking blocks are left out."""
        variant = self._variant(chat)
        if chat.thoughts and (name := variant.chats.template.thought_field):
            chat = chat.with_thoughts_in(name)
        if variant.without_blocks is not None and self._is_drawn(chat):
            return variant.without_blocks, without_empty_blocks(chat), True
        return variant.chats, chat, False

    def _without_reasoning(self, chat: Chat) -> tuple[Chat, int]:
        """Return a chat as the option `reasoning` asks, and the number of target turns that lost some."""
        if self._options.reasoning != "drop":
            return chat, 0
        return self._learnt.without_reasoning(chat, self._variant(chat).opens_reasoning)

    def _is_drawn(self, chat: Chat) -> bool:
        """Decide, by a chat's own text, whether its empty thinking blocks are left out.

        If text of others than the assistant has such a block, as in a question about thinking, all blocks are kept.
        """
        number = int(fingerprint(repr(chat.messages), digits=16), 16) / 16**16
        if number >= self._options.drop_empty_reasoning:
            return False
        others = replace(chat, messages=[message for message in chat.messages if message["role"] != "assistant"])
        return not any(EMPTY_BLOCK.search(text) for text in strings_of(others))

    def _turns(self, chat: Chat) -> list[Chat]:
        if self._options.turns == "each":
            return [
                replace(chat, messages=chat.messages[: i + 1], targets={i: weight})
                for i, weight in chat.targets.items()
            ]
        if self._options.turns == "last" or self._options.last_turn_only:
            chat = chat.with_last_target()
            if not chat.targets:
                raise BadRecord("no_target", "the last assistant turn is no target")
        return [chat]


def stop_tokens(tokenizer: Any, model: ModelOptions) -> list[str]:
    """Read the tokens that stop generation from the model's generation_config.json, if there is one."""
    from transformers.utils import cached_file  # heavy, and needed in worker processes only

    if not model.tokenizer:
        return []
    path = cached_file(
        model.path or model.tokenizer,
        "generation_config.json",
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            ids = json.load(file).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} must be a generation config in JSON: {first_line(error)}") from error
    ids = ids if isinstance(ids, list) else [ids]
    return [token for token in tokenizer.convert_ids_to_tokens([i for i in ids if isinstance(i, int)]) if token]
