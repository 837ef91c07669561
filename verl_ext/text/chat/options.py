"""The options that turn chat and text records into documents."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, ClassVar, TypeVar

from verl_ext.options import UsageError, must, option, spell
from verl_ext.text.read.bad_record import RecordOptions
from verl_ext.text.records.fields import RESERVED_TEMPLATE_KWARGS
from verl_ext.text.records.message_names import MessageNames
from verl_ext.text.records.records import column_problems
from verl_ext.text.tokens.tokenizer import ModelOptions, read_template

OptionsT = TypeVar("OptionsT", bound="ChatOptions")


@dataclass(frozen=True)
class ChatOptions(RecordOptions):
    """The options that turn chat and text records into documents."""

    gone: ClassVar[Mapping[str, str]] = {"last_turn_only": "turns=last does its work"}

    model: ModelOptions = option(ModelOptions, "the tokenizer")
    chat_template: str | None = option(None, "Jinja text, a file, or a name in chat_templates; null: the tokenizer's")
    chat_templates: str | None = option(None, "folder with the NAME.jinja of chat_template=NAME, or package:folder")
    apply_chat_template_kwargs: dict[str, Any] = option({}, "template arguments, e.g. {enable_thinking: false}")
    chat_date: str | None = option(
        None, "day that the template prints as today's, such as 2026-11-25; null: the day on which the command runs"
    )
    end_of_turn: str | None = option(
        None, "text that ends an assistant turn, and is a target; null: found from template and stop tokens"
    )
    end_of_chat: str = option(
        "auto",
        "token that ends chats whose last turn the template leaves open, and is a target: auto: the one with which "
        "the next turn would begin, if generation stops at it | none | a token",
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
    prompts: str = option(
        "context",
        "text around the assistant's turns, of all others and of the template: context: no target | learn: targets, as "
        "in a plain text; needs turns=all",
        choices=("context", "learn"),
    )
    weights: dict[str, Any] = option(
        {},
        "{regular expression: factor of the loss weight of what it matches in an assistant turn, before its end}; "
        "factors of several multiply, 0 makes context",
    )
    on_unprinted: str = option(
        "warn",
        "chats of which the template omits a part: warn: used as printed, and counted | drop | error: bad records",
        choices=("error", "warn", "drop"),
    )
    columns: dict[str, Any] = option(
        {}, "{known field: its name in the records}, a.b for a nested field; null: the field is not read"
    )
    message_columns: dict[str, Any] = option(
        {}, "{role or content or another known field of a message: its name in the records}; null: it is not read"
    )
    roles: dict[str, Any] = option(
        {}, "{a role's name in the records: system, developer, user, assistant, function_call or tool}"
    )
    system: Any = option(None, "system prompt of chats without one: a text, or {category: text}; null: none")
    replace: dict[str, Any] = option(
        {}, "{a text in the fields of records, such as {{NAME}}: the text that stands for it}; such records are counted"
    )
    category_field: str | None = option(
        None, "field that holds a record's category; a record without it has its source's name"
    )
    null_fields: str = option(
        "present",
        "fields that are null: present: they decide on a record's shape, and one that lacks an answer is bad | absent: "
        "as if the record had no such field, for tables of several kinds of records",
        choices=("present", "absent"),
    )
    media: str = option(
        "error",
        "images, audio, video in records: error: a bad record | drop: the text is kept, the rest is counted",
        choices=("error", "drop"),
    )
    min_tokens: int | None = option(
        None, "shorter documents are left out, counted; a preference if an answer is; null: no limit", least=1
    )
    min_score_gap: float | None = option(
        None, "preferences: least gap of the scores; smaller ones are left out, counted; null: no limit", least=0
    )

    def dated(self: OptionsT) -> OptionsT:
        """Return the options with a date, so that all workers agree."""
        return self if self.chat_date else replace(self, chat_date=date.today().isoformat())

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake visible before opening a source."""
        # A date that Python takes in other forms too, such as 20261125, must be written as templates' dates are.
        try:
            is_day = self.chat_date is None or (len(self.chat_date) == 10 and date.fromisoformat(self.chat_date))
        except ValueError:
            is_day = False
        if not is_day:
            yield must("chat_date", "be a day such as 2026-11-25, or null", self.chat_date)
        # What maps names or texts has the checks of the module that reads it.
        yield from self.model.tokenizer_problems()
        yield from column_problems(self.columns)
        yield from self.message_names.problems()
        systems = {"system": self.system}
        if isinstance(self.system, Mapping):
            systems = {f"system.{category}": text for category, text in self.system.items()}
        for key, text in systems.items() if self.system is not None else ():
            if not isinstance(text, str) or not text.strip():
                yield must(key, "be a text, or a text for each category", text)
        yield from self._text_problems()
        # Options that exclude each other, and texts for which null is the way to say nothing.
        if self.prompts == "learn" and self.turns != "all":
            yield must("turns", "be all with prompts=learn, which learns every part of a chat", self.turns)
        if self.category_field == "":
            yield must("category_field", "name a field of the records, or be null", "")
        if self.end_of_chat == "":
            yield must("end_of_chat", "be auto, none or a token", "")
        if self.end_of_turn == "":
            yield must("end_of_turn", "be a text that ends a turn, or null", "")
        # The template last, because it may have to be read from a file or a package.
        for name in RESERVED_TEMPLATE_KWARGS.intersection(self.apply_chat_template_kwargs):
            needed = f"not set {name}, which this command sets itself"
            yield must("apply_chat_template_kwargs", needed, self.apply_chat_template_kwargs[name])
        try:
            if self.given_template is None and self.chat_templates is not None:
                yield must("chat_template", f"name a template of chat_templates={self.chat_templates}", None)
        except UsageError as error:
            yield str(error)

    def _text_problems(self) -> Iterator[str]:
        """Yield a line for each unusable entry of `replace` and `weights`."""
        for text, other in self.replace.items():
            if not text or not isinstance(other, str):
                yield must("replace", "map texts to texts", f"{spell(text)}: {spell(other)}")
        for pattern, factor in self.weights.items():
            is_factor = isinstance(factor, (int, float)) and not isinstance(factor, bool) and 0 <= factor < math.inf
            try:
                re.compile(pattern)
            except re.error:
                is_factor = False
            if not is_factor:
                needed = "map regular expressions to factors of at least 0"
                yield must("weights", needed, f"{spell(pattern)}: {spell(factor)}")

    @property
    def given_template(self) -> str | None:
        """The Jinja text of `chat_template`, or None; raises `UsageError` if it cannot be read."""
        if self.chat_template is None:
            return None
        return read_template(self.chat_template, "chat_template", self.chat_templates)

    @property
    def message_names(self) -> MessageNames:
        """The names of roles and of fields in messages."""
        return MessageNames(self.roles, self.message_columns)

    def default_system(self, category: str) -> str:
        """Return the system prompt of a category's chats without one, or ""."""
        return (self.system.get(category) if isinstance(self.system, Mapping) else self.system) or ""
