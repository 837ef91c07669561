"""Prompts with their expected answers, from records or tokenized documents.

record       user, assistant, user, assistant    the chat up to its last assistant turn, rendered with the
             ------- prompt -----  -expected-    template's generation prompt, and tokenized as for training
document     c c c t t c c c t t                 the tokens before the last run of targets
             ----prompt----- ---
text         Once upon a time                    the text, with which a base model goes on: no answer is expected
             -----prompt-----
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.answers.generation import end_tokens
from verl_ext.answers.options import AnswerOptions
from verl_ext.answers.scores import expected_problem
from verl_ext.data.tokenized.arrow import TokenizedData
from verl_ext.data.tokenized.reports import read_report
from verl_ext.options import DataError, UsageError, options_of
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.readers import read_chunks, read_record
from verl_ext.text.read.sources import file_name, find_source_files, without_compression
from verl_ext.text.records.records import category_of

_KEY = "eval.prompts"
_SHARED = ("columns", "chat_template", "apply_chat_template_kwargs", "chat_date")  # options of `eval` and of chats
_OF_EVAL = re.compile(rf"(?<![\w.])(?:{'|'.join(_SHARED)})\b")
_PROMPT_TOKENS = 400  # tokens of a prompt's end that are shown


@dataclass(frozen=True)
class Prompt:
    """The tokens before an answer, and the answer that is expected.

    Attributes:
        ids: the tokens of the prompt, with the template's generation prompt.
        expected: the text of the answer in the data; None for a text that is continued, which has no score.
        category: the category whose metric includes the score.
        record: the input of a user's own scorer: the record of the file, or the texts of a tokenized document.
        place: the place in the data, for messages.
        question: the last user message; None for a tokenized document or a text.
    """

    ids: Sequence[int]
    expected: str | None
    category: str
    record: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""
    question: str | None = None


@dataclass(frozen=True)
class Prompts:
    """All prompts in the data's order, and the tokens that end answers."""

    items: list[Prompt]
    stops: tuple[int, ...]

    @classmethod
    def read(cls, options: AnswerOptions, tokenizer: Any, folders: Sequence[str] = ()) -> "Prompts":
        """Read the prompts of the options; raise ValueError for unusable data.

        folders: those of the training data. Records are rendered and tokenized by the options of the first one that
        `verl-ext tokenize` made of chats.
        """
        paths, encoder = options.prompts, None
        paths = [paths] if isinstance(paths, str) else paths
        if isinstance(paths, list) and any(_is_tokenized(path) for path in paths):
            prompts = _documents([os.path.expanduser(path) for path in paths], options, tokenizer)
        else:
            encoder = _encoder(options, tokenizer, folders)
            prompts = _records(paths, options, encoder)
        pairs = list(islice(prompts, options.max_samples))
        if not pairs:
            raise DataError(f"{_KEY} must hold a prompt with an answer; {options.prompts} has none")
        ends = encoder.ends if encoder else []  # known once a chat was rendered
        return cls([prompt for prompt, _ in pairs], end_tokens(tokenizer, ends, *{stop for _, stop in pairs}))

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(len(prompt.ids) for prompt in self.items)


def prompt_end(prompt: Prompt, tokenizer: Any) -> str:
    """Return the end of a prompt as text, special tokens included."""
    text = tokenizer.decode(list(prompt.ids[-_PROMPT_TOKENS:]), clean_up_tokenization_spaces=False)
    return text if len(prompt.ids) <= _PROMPT_TOKENS else f"… {text}"


def _is_tokenized(path: str) -> bool:
    try:
        info = json.loads(Path(path).expanduser().joinpath("dataset_info.json").read_text(encoding="utf-8"))
        return "input_ids" in info["features"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _encoder(options: AnswerOptions, tokenizer: Any, folders: Sequence[str]) -> ChatEncoder:
    """Return the encoder of the training data, changed by the options."""
    training: dict[str, Any] = {}
    for report in map(read_report, folders):
        values = {name: value for name, value in report["options"].items() if name in options_of(ChatOptions)}
        if "turns" in values:  # not a folder of texts
            training = values
            break
    shared = {name: getattr(options, name) for name in _SHARED if getattr(options, name) is not None}
    values = {**training, **shared, "model": {"path": tokenizer.name_or_path}, "turns": "last"}
    with _keys_of_eval():
        return ChatEncoder(ChatOptions.read(values), tokenizer=tokenizer)


@contextmanager
def _keys_of_eval() -> Iterator[None]:
    """Name the options of chats in errors by their keys below `eval`."""
    try:
        yield
    except (BadRecord, DataError):
        raise
    except ValueError as error:
        lines = (_OF_EVAL.sub(r"eval.\g<0>", line, count=1) for line in str(error).splitlines())
        raise UsageError("\n".join(lines)) from error


def _records(paths: Any, options: AnswerOptions, encoder: ChatEncoder) -> Iterator[tuple[Prompt, int | None]]:
    patterns: dict[str, list[str]] = {}
    if isinstance(paths, Mapping):
        patterns = {str(name): [those] if isinstance(those, str) else list(those) for name, those in paths.items()}
    else:
        for path in paths:
            patterns.setdefault(Path(without_compression(file_name(path))).stem, []).append(path)
    names = list(patterns)
    for file in find_source_files(patterns, _KEY):
        for chunk in read_chunks(file):
            for place, raw in chunk.records:
                try:
                    record = read_record(raw)
                    category = category_of(record, options.category_field) if options.category_field else None
                    category = names[file.category_id - 1] if category is None else category
                    with _keys_of_eval():
                        prompt = _of_record(record, category, place, options, encoder)
                    yield prompt, None
                except BadRecord as error:
                    is_of_data = error.reason == "missing_column" and options.columns is None
                    hint = "; eval.columns={} reads none of the training data's columns" if is_of_data else ""
                    needed = f"{_KEY} must hold chats with an answer, or texts"
                    raise DataError(f"{needed}; {place}: {error}{hint}") from error


def _of_record(
    record: dict[str, Any], category: str, place: str, options: AnswerOptions, encoder: ChatEncoder
) -> Prompt:
    chat, last, ids = encoder.prompt(record, category)
    if chat is None:
        return Prompt(ids, None, category, record, place)
    expected = chat.messages[last]["content"]
    if problem := expected_problem(options.score, expected):
        raise BadRecord("empty", problem)
    asked = (message["content"] for message in reversed(chat.messages[:last]) if message["role"] == "user")
    return Prompt(ids, expected, category, record, place, next(asked, None))


def _documents(folders: list[str], options: AnswerOptions, tokenizer: Any) -> Iterator[tuple[Prompt, int | None]]:
    """Yield tokenized documents' prompts, and answers' special last tokens or None."""
    data = TokenizedData(folders, _KEY)
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
        category = data.category_names.get(number, str(number) if number else "")
        answer = ids[first : targets[-1] + 1].tolist()
        prompt, expected = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:first], answer))
        if problem := expected_problem(options.score, expected):
            raise DataError(f"{_KEY} must hold documents with an answer; row {row} of {folders[0]}: {problem}")
        record = {"prompt": prompt, "answer": expected, "category": category}
        yield (
            Prompt(ids[:first].tolist(), expected, category, record, f"row {row}"),
            (answer[-1] if answer[-1] in special else None),
        )
