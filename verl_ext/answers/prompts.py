"""Prompts and the answers that are expected, from records or from tokenized documents.

record       user, assistant, user, assistant    the chat up to its last assistant turn, rendered with the
             ------- prompt -----  -expected-    template's generation prompt, as a server renders it
document     c c c t t c c c t t                 the tokens before the last run of targets
             ----prompt----- ---
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.answers.generation import end_tokens
from verl_ext.answers.options import AnswerOptions
from verl_ext.answers.scores import BUILT_IN
from verl_ext.data.arrow import TokenizedData
from verl_ext.data.categories import CategoryTable
from verl_ext.text.chat_template import ChatTemplate
from verl_ext.text.json_records import BadRecord, read_record
from verl_ext.text.messages import Message
from verl_ext.text.readers import read_chunks
from verl_ext.text.records import Chat, category_of, parse_record
from verl_ext.text.sources import file_name, find_source_files, without_compression
from verl_ext.text.tokenizer import check_template, read_template
from verl_ext.values import DataError, UsageError

_KEY = "eval.prompts"
_PROMPT_TOKENS = 400  # tokens of a prompt's end that are shown


@dataclass(frozen=True)
class Prompt:
    """The tokens before an answer, and the answer that is expected.

    Attributes:
        ids: the tokens of the prompt, with the template's generation prompt.
        expected: the text of the answer in the data.
        category: the category whose metric includes the score.
        record: the input of a user's own scorer: the record of the file, or the texts of a tokenized document.
        place: the place in the data, for messages.
        messages, tools: the request to a server; None for a tokenized document, whose tokens the server gets.
    """

    ids: Sequence[int]
    expected: str
    category: str
    record: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""
    messages: list[Message] | None = None
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Prompts:
    """All prompts of a run, in the order of the data, and the tokens that end an answer."""

    items: list[Prompt]
    stops: tuple[int, ...]

    @classmethod
    def read(cls, options: AnswerOptions, tokenizer: Any) -> "Prompts":
        """Read the prompts that the options name. Raises ValueError, in one line, for data that cannot be used."""
        named = options.prompts
        paths = [named] if isinstance(named, str) else named
        if isinstance(paths, list) and any(_is_tokenized(path) for path in paths):
            found: Iterator[tuple[Prompt, int | None]] = _documents(
                [os.path.expanduser(path) for path in paths], tokenizer
            )
            ends: list[str] = []
        else:
            template = _template(options, tokenizer)
            found = _records(paths, options, tokenizer, template)
            ends = template.ends
        items, stops = [], set()
        for prompt, end in found:
            items.append(prompt)
            stops.add(end)
            if len(items) == options.max_samples:
                break
        if not items:
            raise DataError(f"{_KEY} must hold a prompt with an answer; {named} has none")
        return cls(items, end_tokens(tokenizer, ends, *stops))

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(len(prompt.ids) for prompt in self.items)


def prompt_text(prompt: Prompt, tokenizer: Any) -> str:
    """Return the end of a prompt as text, special tokens included."""
    text = tokenizer.decode(list(prompt.ids[-_PROMPT_TOKENS:]), clean_up_tokenization_spaces=False)
    return text if len(prompt.ids) <= _PROMPT_TOKENS else f"… {text}"


def _is_tokenized(path: str) -> bool:
    try:
        info = json.loads(Path(path).expanduser().joinpath("dataset_info.json").read_text(encoding="utf-8"))
        return "input_ids" in info["features"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _template(options: AnswerOptions, tokenizer: Any) -> ChatTemplate:
    given = options.chat_template
    template = None if given is None else read_template(given, "eval.chat_template")
    if template is not None:
        check_template(template, "one" if template == given else str(given), "eval.chat_template")
    elif not tokenizer.chat_template:
        raise UsageError("eval.chat_template must be given: the model's tokenizer has none; got null")
    return ChatTemplate(tokenizer, template, dict(options.apply_chat_template_kwargs))


def _records(
    named: Any, options: AnswerOptions, tokenizer: Any, template: ChatTemplate
) -> Iterator[tuple[Prompt, int | None]]:
    if isinstance(named, Mapping):
        patterns = {str(name): [paths] if isinstance(paths, str) else list(paths) for name, paths in named.items()}
    else:
        patterns = {}
        for path in named:
            patterns.setdefault(Path(without_compression(file_name(path))).stem, []).append(path)
    names = list(patterns)
    for file in find_source_files(patterns, _KEY):
        for chunk in read_chunks(file):
            for number, raw in chunk.records:
                place = chunk.place(number)
                try:
                    record = read_record(raw)
                    own = category_of(record, options.category_field) if options.category_field else None
                    category = names[file.category_id - 1] if own is None else own
                    yield _of_record(record, category, place, options, tokenizer, template), None
                except BadRecord as error:
                    raise DataError(f"{_KEY} must hold chats with an answer; {place}: {error}") from error


def _of_record(
    record: dict[str, Any], category: str, place: str, options: AnswerOptions, tokenizer: Any, template: ChatTemplate
) -> Prompt:
    chat = parse_record(record).content
    if not isinstance(chat, Chat):
        raise BadRecord("no_target", "the record is a text, and no chat")
    last = max(number for number, message in enumerate(chat.messages) if message["role"] == "assistant")
    before, expected = chat.messages[:last], chat.messages[last]["content"]
    if not before:
        raise BadRecord("no_prompt", "nothing stands before the answer")
    if options.score in BUILT_IN and not expected.strip():
        raise BadRecord("empty", f"the last assistant turn has no words that eval.score={options.score} compares")
    asked, _ = template.with_arguments_as_printed(Chat(before, {}, chat.tools))
    text = template.render(asked.messages, asked.tools, generation=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Prompt(ids, expected, category, record, place, before, chat.tools)


def _documents(folders: list[str], tokenizer: Any) -> Iterator[tuple[Prompt, int | None]]:
    """Yield the prompt of each tokenized document, and the special token that ends its answer or None."""
    data = TokenizedData(folders, _KEY)
    table = CategoryTable.read(folders)
    names = dict(zip(table.ids, table.names, strict=True))
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    for row in range(len(data)):
        columns = data.block(row, row + 1)
        ids, targets = columns["input_ids"].astype(np.int64), np.flatnonzero(columns["loss_mask"])
        breaks = np.flatnonzero(np.diff(targets) > 1)
        if not len(targets) or (first := int(targets[breaks[-1] + 1 if len(breaks) else 0])) < 2:
            raise DataError(
                f"{_KEY} must hold documents with a prompt and an answer; row {row} of {folders[0]} has not"
            )
        number = int(columns["category_ids"][targets[-1]])
        category = names.get(number, str(number) if number else "")
        answer = ids[first : targets[-1] + 1].tolist()
        prompt, expected = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:first], answer))
        record = {"prompt": prompt, "answer": expected, "category": category}
        yield (
            Prompt(ids[:first].tolist(), expected, category, record, f"row {row}"),
            (answer[-1] if answer[-1] in special else None),
        )
