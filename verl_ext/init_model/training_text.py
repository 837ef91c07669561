"""The text that a tokenizer is trained on, read as a stream."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from verl_ext.commands.errors import DataError
from verl_ext.commands.progress import progress_bar
from verl_ext.tokenize.bad_record import BadRecord
from verl_ext.tokenize.chunks import read_chunks, text_blocks
from verl_ext.tokenize.json_records import parse_line
from verl_ext.tokenize.records import PlainText, parse_record
from verl_ext.tokenize.source_files import SourceFile, find_source_files, total_bytes


def find_training_files(patterns: Sequence[str]) -> list[SourceFile]:
    """The files of `tokenizer.train_on`; `UsageError` for one that is missing or of no known format."""
    return find_source_files({"train_on": list(patterns)}, "tokenizer.train_on")


class TrainingText:
    """Iterates over the text of `files`: blocks of text files, and what records say. Memory is that of a chunk.

    `characters` counts what was read. Raises `DataError` with file and place for what cannot be used.
    """

    def __init__(self, files: Sequence[SourceFile], text_key: str) -> None:
        self.files = files
        self.text_key = text_key
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        self.characters = 0
        total = total_bytes(self.files)
        texts = self._texts()
        first = list(islice(texts, 1))  # before the bar: files with a mistake at their start show none
        with progress_bar("training text", total, unit="B", unit_scale=True) as bar:
            for text, num_bytes in chain(first, texts):
                self.characters += len(text)
                if text:
                    yield text
                bar.update(num_bytes if total is None else min(num_bytes, total - bar.n))
            bar.update((total or bar.n) - bar.n)

    def _texts(self) -> Iterator[tuple[str, int]]:
        """Every file's texts, and the bytes of the file that were read for each."""
        for file in self.files:
            yield from self._blocks(file) if file.kind == "text" else self._records(file)

    def _blocks(self, file: SourceFile) -> Iterator[tuple[str, int]]:
        try:
            yield from text_blocks(file.path)
        except BadRecord as error:
            raise DataError(f"{file.path}: {error}") from error

    def _records(self, file: SourceFile) -> Iterator[tuple[str, int]]:
        """Every text of every record, and the bytes of the file that were read for it."""
        for chunk in read_chunks(file):
            for number, record in chunk.records:
                try:
                    texts = record_texts(parse_line(record) if isinstance(record, bytes) else record, self.text_key)
                except BadRecord as error:
                    raise DataError(f"{chunk.place(number)}: {error}") from error
                yield from ((text, 0) for text in texts)
            yield "", chunk.num_bytes


def record_texts(record: Any, text_key: str) -> list[str]:
    """What a record says: its field `text_key`, or else every message of the chat that it is to `verl_ext.tokenize`."""
    if isinstance(record, dict) and record.get(text_key) is not None:
        if not isinstance(text := record[text_key], str):
            raise BadRecord("non_string_content", f"{text_key} must be a string; got {type(text).__name__}")
        return [text]
    try:
        content = parse_record(record).content
    except BadRecord as error:
        if error.reason != "unknown_fields":
            raise
        content = PlainText("")
    if isinstance(content, PlainText):
        found = ", ".join(map(str, record)) or "none"
        raise BadRecord("unknown_fields", f"no field {text_key} (tokenizer.text_key) and no chat; its fields: {found}")
    return [message["content"] for message in content.messages]
