"""The tokenizer of a new model, trained on text: a byte-level BPE.

ChatML, and chat templates read from files.

Where the tokenizer comes from, and what a trained one is like.

The text that a tokenizer is trained on, read as a stream.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, islice
from typing import Any, ClassVar

from verl_ext.progress import progress_bar
from verl_ext.text.json_records import BadRecord, parse_line
from verl_ext.text.readers import read_chunks, text_blocks
from verl_ext.text.records import PlainText, parse_record
from verl_ext.text.sources import SourceFile, find_source_files, total_bytes
from verl_ext.text.tokenizer import check_template, read_template_file
from verl_ext.values import DataError, Options, option, show

KEY = "tokenizer.chat_template"
CHATML = "chatml"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def read_chat_template(named: str | None) -> str | None:
    """The template of `tokenizer.chat_template`: ChatML, a file's text, or none.

    Raises `UsageError` for a file that cannot be read as text, or is no Jinja.
    """
    if named is None or named == CHATML:
        return CHATML_TEMPLATE if named else None
    template = read_template_file(named, KEY)
    check_template(template, named, KEY)
    return template


BYTES = 256  # tokens that a byte-level tokenizer has beside special ones and merges


@dataclass(frozen=True)
class TokenizerOptions(Options):
    """A tokenizer to copy (`path`), or text to train one on (`train_on`) and its settings."""

    prefix: ClassVar[str] = "tokenizer"

    path: str | None = option(None, "copied: a tokenizer's folder, or its name on the Hub; this or train_on")
    train_on: Any = option(
        [],
        "byte-level BPE trained on these files, folders, globs or URLs (txt, jsonl, json, csv, tsv, also as .gz, .bz2, "
        ".xz, .zst; parquet; Arrow): a record's text_key, or every message of a chat",
    )
    text_key: str = option("text", "the field of a record that is its text")
    vocab_size: int = option(6400, "tokens in all, the 256 bytes and the special ones included")
    bos_token: str | None = option("<|im_start|>", "null: none")
    eos_token: str | None = option("<|im_end|>", "null: none")
    pad_token: str | None = option("<|endoftext|>", "null: none")
    special_tokens: list[str] = option([], "further ones, such as a template's")
    chat_template: str | None = option(
        CHATML, "chatml, whose <|im_start|> and <|im_end|> become special; a Jinja file; null: none"
    )

    def train_patterns(self) -> list[str]:
        """Paths and globs of the text to train on."""
        values = [self.train_on] if isinstance(self.train_on, str) else self.train_on
        return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []

    def all_special_tokens(self) -> list[str]:
        """The special tokens, each once, in the order of their ids: pad, bos, ChatML's, eos, `special_tokens`."""
        chatml = CHATML_TOKENS if self.chat_template == CHATML else ()
        tokens = [self.pad_token, self.bos_token, *chatml, self.eos_token, *self.special_tokens]
        return list(dict.fromkeys(token for token in tokens if token))

    def source_problems(self) -> list[str]:
        """One line for every mistake that can be seen without loading a tokenizer or opening a text."""
        values = [self.train_on] if isinstance(self.train_on, str) else self.train_on
        if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
            return [f"tokenizer.train_on must be a path, a glob or a list of them; got {show(self.train_on)}"]
        if bool(self.path) == bool(values):
            got = f"{self.path} and {values}" if values else "neither"
            return [f"exactly one of tokenizer.path and tokenizer.train_on must be given; got {got}"]
        return self._path_problems(self.path) if self.path else self._training_problems()

    def _path_problems(self, path: str) -> list[str]:
        problems = []
        if not os.path.isdir(path) and not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
            problems.append(f"tokenizer.path must be a folder that exists; got {path}")
        defaults = TokenizerOptions()
        for setting in fields(self)[2:]:
            if (value := getattr(self, setting.name)) != getattr(defaults, setting.name):
                must = f"tokenizer.{setting.name} must be left out with tokenizer.path, which is copied as it is"
                problems.append(f"{must}; got {show(value)}")
        return problems

    def _training_problems(self) -> list[str]:
        problems = []
        for name in ("bos_token", "eos_token", "pad_token"):
            if getattr(self, name) == "":
                problems.append(f"tokenizer.{name} must be a text or null; got ''")
        if not all(self.special_tokens):
            problems.append(f"tokenizer.special_tokens must be texts; got {self.special_tokens}")
        least = BYTES + len(self.all_special_tokens())
        if self.vocab_size < least:
            what = f"{least}, the {BYTES} bytes and the special tokens"
            problems.append(f"tokenizer.vocab_size must be at least {what}; got {self.vocab_size}")
        if self.chat_template not in (None, CHATML) and not os.path.isfile(str(self.chat_template)):
            must = f"tokenizer.chat_template must be {CHATML}, a file that exists, or null"
            problems.append(f"{must}; got {show(self.chat_template)}")
        return problems


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


def trained_tokenizer(texts: Iterable[str], config: TokenizerOptions) -> Any:
    """A transformers tokenizer trained on `texts`: any text is encoded, none is unknown.

    It has fewer than `config.vocab_size` tokens where the text has too few pairs to merge, and no merges without text.
    """
    from transformers import PreTrainedTokenizerFast

    template = read_chat_template(config.chat_template)
    bpe = train_bpe(texts, config.vocab_size, config.all_special_tokens())
    named = {"bos_token": config.bos_token, "eos_token": config.eos_token, "pad_token": config.pad_token}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token is not None},
    )


def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> Any:
    """A `tokenizers.Tokenizer` of at most `vocab_size` tokens: special ones from id 0, the 256 bytes, merges.

    The pieces that merges stay inside are GPT-2's: words with the space before them, numbers, signs, white space. Words
    are counted as the texts come; the same texts in the same order give the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
