"""Render chats as texts with targets, and define the options for this."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from verl_ext.files import fingerprint
from verl_ext.packing import OVER_LENGTH_POLICIES
from verl_ext.text.chat_parts import EMPTY_BLOCK, Learnt, is_opened, without_empty_blocks
from verl_ext.text.chat_proof import ProvenChats
from verl_ext.text.chat_template import ChatTemplate
from verl_ext.text.json_records import BadRecord, RecordOptions
from verl_ext.text.messages import Chat
from verl_ext.text.records import column_problems
from verl_ext.text.special_tokens import ChatText, SpecialTokens, strings_of
from verl_ext.text.tokenizer import ModelOptions, check_template, read_template
from verl_ext.values import UsageError, first_line, option

# The arguments of `apply_chat_template` that are set here.
RESERVED_TEMPLATE_KWARGS = frozenset(
    (
        *("conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "messages"),
    )
)


@dataclass(frozen=True)
class ChatOptions(RecordOptions):
    """The options that turn chat and text records into documents."""

    model: ModelOptions = option(ModelOptions, "the tokenizer")
    chat_template: str | None = option(None, "a Jinja template, or a file with one; null: the tokenizer's own")
    apply_chat_template_kwargs: dict[str, Any] = option({}, "template arguments, e.g. {enable_thinking: false}")
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
    max_tokens: int | None = option(None, "maximum number of tokens of a document; null: any length", least=2)
    over_length: str = option("error", "treatment of longer documents", choices=OVER_LENGTH_POLICIES)

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake that can be seen without opening a source."""
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
        self._special, self._options = special, options
        stops = stop_tokens(tokenizer, options.model)
        given_to_all = (tokenizer, template, options.apply_chat_template_kwargs, options.end_of_turn, stops)
        self._chats = ProvenChats(ChatTemplate(*given_to_all))
        if options.drop_empty_reasoning:
            self._without_blocks = ProvenChats(ChatTemplate(*given_to_all, left_out=EMPTY_BLOCK))
        self._learnt = Learnt(
            options.reasoning == "learn", options.tool_calls == "learn", options.empty_reasoning == "learn"
        )
        self._opens_reasoning = is_opened(self._chats.template.generation_prompt)

    @cached_property
    def template_words(self) -> set[str]:
        """The names that occur in the template."""
        return set(re.findall(r"\w+", self._chats.template.source))

    @property
    def template(self) -> str | None:
        """The Jinja source of the template; None if the tokenizer has several by name."""
        chosen = self._chats.template.template or self._chats.template.tokenizer.chat_template
        return chosen if isinstance(chosen, str) else None

    @property
    def end(self) -> str | None:
        """The text that ends a chat, after its last turn; None if the template writes none."""
        return next(reversed(self._chats.template.ends), None)

    def texts(self, chat: Chat) -> list[ChatText]:
        """Render a chat, or with `turns=each` every turn to be learnt. Raises `BadRecord`.

        Unprinted words that `on_unprinted` accepts are recorded in the first text.
        """
        on_found = self._options.special_tokens_in_text
        texts = []
        chats, is_drawn = self._chats, self._is_drawn(chat)
        if is_drawn:
            chats, chat = self._without_blocks, without_empty_blocks(chat)
        for part in self._turns(chat):
            dropped = 0
            if self._options.reasoning == "drop":
                part, dropped = self._learnt.without_reasoning(part, self._opens_reasoning)
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

    def prompt(self, chat: Chat, turn: int) -> str:
        """Return the text from which a server generates message `turn`. Raises `BadRecord`."""
        before = replace(chat, messages=chat.messages[:turn], targets={})
        as_printed, _ = self._chats.template.with_arguments_as_printed(before)
        return self._chats.template.render(as_printed.messages, chat.tools, generation=True)

    def _is_drawn(self, chat: Chat) -> bool:
        """Decide, by a chat's own text, whether its empty thinking blocks are left out.

        If text of others than the assistant has such a block, as in a question about thinking, all blocks are kept.
        """
        if not self._options.drop_empty_reasoning:
            return False
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
            chat.keep_last_target()
            if not chat.targets:
                raise BadRecord("no_target", "the last assistant turn is no target")
        return [chat]


def stop_tokens(tokenizer: Any, model: ModelOptions) -> list[str]:
    """Read the tokens that stop generation from the model's generation_config.json, if there is one."""
    from transformers.utils import cached_file  # heavy, and needed in worker processes only

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
