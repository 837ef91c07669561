"""The source record of a document, and its prompts at inference.

document     <|im_start|>user 2+2? <|im_end|> <|im_start|>assistant <think> </think> 4 <|im_end|>
prompt       <|im_start|>user 2+2? <|im_end|> <|im_start|>assistant              the document begins with it

A tokenized folder does not store the record that a document comes from. The finder reads the records of the sources in
order and tokenizes those that hold words of the document's targets, until one gives the same tokens.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from verl_ext.commands.preview import Decode
from verl_ext.files import working_in
from verl_ext.options import DataError, UsageError, one_line, options_of
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.encoder_chats import ChatEncoder, ShownText
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.readers import read_chunks, read_record
from verl_ext.text.read.sources import SourceFile, absolute_path, find_source_files, is_hub_name
from verl_ext.text.tokens.tokenizer import ModelOptions
from verl_ext.tools.show.compare import around, first_difference
from verl_ext.tools.show.documents import Report, Row

LONGEST_STRING = 2000  # characters of a record's string that are shown
_WORD = re.compile(r"[A-Za-z0-9]{3,}")
_WORDS = 8  # words of a document's targets that the search for its record uses


@dataclass(frozen=True)
class FoundRecord:
    """The record of a document, its place, and its rendered text."""

    place: str
    raw: Any
    text: ShownText


class RecordFinder:
    """The records of a tokenized folder's sources.

    Args:
        report: the folder's report.
        model: replaces the tokenizer of the report if it names one.

    Raises:
        UsageError: the report names no sources, or they cannot be found.
    """

    def __init__(self, report: Report, model: ModelOptions) -> None:
        given = report.get("options", {})
        sources = given.get("sources") or {}
        if not sources or "turns" not in given:
            needed = "record needs a folder whose report.json names sources, as `verl-ext tokenize` writes it"
            raise UsageError(f"{needed}; got one without")
        own = {name: value for name, value in given.items() if name in options_of(ChatOptions)}
        with working_in(report.get("working_folder")):
            listed = {name: [value] if isinstance(value, str) else value for name, value in sources.items()}
            patterns = {
                name: [path if is_hub_name(path) else absolute_path(path) for path in paths]
                for name, paths in listed.items()
            }
            options = ChatOptions.read({**own, "on_bad_record": "skip"})
            if model.tokenizer:
                options = replace(options, model=model)
            self._files = find_source_files(patterns)
            self._encoder = ChatEncoder(options, list(sources))
            self._encoder.open()  # a tokenizer's path may be relative

    def find(self, row: Row, category: str) -> FoundRecord:
        """Return a document's record; raise DataError if none gives its tokens."""
        words = self._words(row)
        for file in sorted(self._files, key=lambda file: self._encoder.sources[file.category_id - 1] != category):
            source = self._encoder.sources[file.category_id - 1]
            for place, raw in _candidates(file, words):
                with suppress(BadRecord, DataError):
                    for text in self._encoder.shown(raw, source):
                        if np.array_equal(text.input_ids, row.input_ids):
                            return FoundRecord(place, raw, text)
        needed = "record needs the sources, tokenizer and template with which the document was made"
        raise DataError(f"{needed}; no record gives its tokens now")

    def _words(self, row: Row) -> list[bytes]:
        """Return the longest words of a document's targets, else of all."""
        ids = row.input_ids[row.loss_mask] if row.loss_mask.any() else row.input_ids
        text = self._encoder.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        found = sorted(dict.fromkeys(_WORD.findall(text)), key=len, reverse=True)
        return [word.encode() for word in found[:_WORDS]]

    def view(self, row: Row, category: str) -> Text:
        """Return a document's record, rendered text and prompts at inference."""
        found = self.find(row, category)
        text = Text(no_wrap=True).append(f"record {one_line(found.place)}\n", "bold")
        text.append(f"{_fields(found.raw)}\n")
        text.append("rendered text\n", "bold")
        text.append("\n".join(map(one_line, found.text.text.split("\n"))) + "\n")
        decode = self._encoder.tokenizer.decode
        for turn, prompt in found.text.prompts:
            given = _prompt_view(np.array(self._encoder.ids(prompt)), row, decode)
            text.append(f"message {turn} at inference: ", "bold").append_text(given)
        return text


def _candidates(file: SourceFile, words: Sequence[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield records with half the words; templates may make the others."""
    for chunk in read_chunks(file):
        for place, raw in chunk.records:
            content = raw if isinstance(raw, bytes) else json.dumps(raw, ensure_ascii=False, default=str).encode()
            if 2 * sum(word in content for word in words) >= len(words):
                yield place, raw


def _fields(raw: Any) -> str:
    """Return a record as indented JSON with its long strings cut."""

    def cut(value: Any) -> Any:
        if isinstance(value, str) and len(value) > LONGEST_STRING:
            return f"{value[:LONGEST_STRING]} … {len(value) - LONGEST_STRING:,} characters"
        if isinstance(value, dict):
            return {name: cut(below) for name, below in value.items()}
        return [cut(below) for below in value] if isinstance(value, list) else value

    written = json.dumps(cut(read_record(raw)), ensure_ascii=False, indent=2, default=str)
    return "\n".join(map(one_line, written.split("\n")))


def _prompt_view(prompt: NDArray[Any], row: Row, decode: Decode) -> Text:
    """Return a line of equality, or both texts at their difference."""
    place = first_difference(prompt, row.input_ids[: len(prompt)])
    text = Text()
    if place is None:
        learnt = int(np.count_nonzero(row.loss_mask[: len(prompt)]))
        text.append(f"the document begins with its {len(prompt):,} tokens", "green")
        return text.append(f"; {learnt:,} of them are targets of turns before\n" if learnt else "\n")
    text.append(f"its {len(prompt):,} tokens differ from the document's at token {place:,}\n", "yellow")
    for name, ids in (("given  ", prompt), ("trained", row.input_ids)):
        text.append(f"  {name} ").append_text(around(ids, place, decode)).append("\n")
    return text
