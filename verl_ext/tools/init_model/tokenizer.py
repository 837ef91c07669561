"""A new model's tokenizer: a copy, or a byte-level BPE trained."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, ClassVar

from verl_ext.commands.command_line import as_list, is_names
from verl_ext.progress import progress_bar
from verl_ext.text.json_records import BadRecord, parse_line
from verl_ext.text.messages import PlainText
from verl_ext.text.readers import read_chunks, text_blocks
from verl_ext.text.records import parse_record
from verl_ext.text.sources import FORMATS, SourceFile, find_source_files, total_bytes
from verl_ext.text.tokenizer import check_template, read_template, tokenizer_path_problems
from verl_ext.values import DataError, Options, option, show

CHATML = "chatml"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BYTES = 256  # byte tokens of a byte-level tokenizer, besides special tokens and merges
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token")


@dataclass(frozen=True)
class TokenizerOptions(Options):
    """A tokenizer to copy, or text and settings to train one."""

    prefix: ClassVar[str] = "tokenizer"

    path: str | None = option(None, "tokenizer to copy: a folder or a name on the Hub; exclusive with train_on")
    train_on: Any = option(
        [],
        f"data to train a byte-level BPE on, text_key of a record or every message of a chat: {FORMATS}",
    )
    text_key: str = option("text", "field of a record that holds its text")
    vocab_size: int = option(6400, "size of the vocabulary, including the 256 bytes and the special tokens")
    bos_token: str | None = option("<|im_start|>", "BOS token; null: none; in a shell 'tokenizer.bos_token=\"<s>\"'")
    eos_token: str | None = option("<|im_end|>", "EOS token; null: none")
    pad_token: str | None = option("<|endoftext|>", "padding token; null: none")
    special_tokens: list[str] = option([], "further special tokens, such as a template's")
    chat_template: str | None = option(
        CHATML, "chat template: chatml, whose <|im_start|> and <|im_end|> become special; a Jinja file; null: none"
    )

    @property
    def train_patterns(self) -> list[str]:
        """The paths and globs of `train_on`."""
        return as_list(self.train_on)

    @property
    def all_special_tokens(self) -> list[str]:
        """The distinct special tokens by id: pad, bos, ChatML's, eos, `special_tokens`."""
        chatml = CHATML_TOKENS if self.chat_template == CHATML else ()
        tokens = [self.pad_token, self.bos_token, *chatml, self.eos_token, *self.special_tokens]
        return list(dict.fromkeys(token for token in tokens if token))

    def problems(self) -> Iterator[str]:
        """Yield a line for every mistake visible without opening a text."""
        if self.train_on != [] and not is_names(self.train_on):
            yield f"tokenizer.train_on must be a path, a glob or a list of them; got {show(self.train_on)}"
        for name in NAMED_TOKENS:
            if getattr(self, name) == "":
                yield f"tokenizer.{name} must be a text or null; got ''"
        if not all(self.special_tokens):
            yield f"tokenizer.special_tokens must hold no empty text; got {self.special_tokens}"
            return
        least = BYTES + len(self.all_special_tokens)
        if self.vocab_size < least:
            must = f"tokenizer.vocab_size must be at least {least}, the {BYTES} bytes and the special tokens"
            yield f"{must}; got {self.vocab_size}"
        template = self.chat_template
        if template is not None and template != CHATML and not os.path.isfile(template):
            yield f"tokenizer.chat_template must be {CHATML}, a file that exists, or null; got {show(template)}"

    def source_problems(self) -> Iterator[str]:
        """Yield lines unless one source is given, without settings beside a copy."""
        if bool(self.path) == bool(self.train_on):
            got = f"{self.path} and {self.train_patterns}" if self.path else "neither"
            yield f"exactly one of tokenizer.path and tokenizer.train_on must be given; got {got}"
        elif self.path:
            yield from tokenizer_path_problems(self.path, "tokenizer.path")
            for name, value in self.changed().items():
                if name != "path":
                    must = f"tokenizer.{name} must be left out with tokenizer.path, which is copied as it is"
                    yield f"{must}; got {show(value)}"


class TrainingText:
    """A stream of text: blocks of files, and texts of records.

    `characters` counts the characters so far. Raises UsageError for files that are missing or have an unknown format,
    and DataError for unusable content.
    """

    def __init__(self, patterns: Sequence[str], text_key: str) -> None:
        self.files = find_source_files({"train_on": list(patterns)}, "tokenizer.train_on")
        self.text_key = text_key
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        texts = (pair for file in self.files for pair in self._texts(file))
        first = list(islice(texts, 1))  # before the bar, so that files with a mistake at their start show no bar
        with progress_bar("training text", total_bytes(self.files), unit="B", unit_scale=True) as bar:
            for text, num_bytes in chain(first, texts):
                self.characters += len(text)
                bar.update(num_bytes)
                if text:
                    yield text

    def _texts(self, file: SourceFile) -> Iterator[tuple[str, int]]:
        """Yield each text of a file and the bytes read."""
        if file.kind == "text":
            try:
                yield from text_blocks(file.path)
            except BadRecord as error:
                raise DataError(f"{file.path}: {error}") from error
            return
        for chunk in read_chunks(file):
            for number, record in chunk.records:
                try:
                    texts = training_texts(parse_line(record) if isinstance(record, bytes) else record, self.text_key)
                except BadRecord as error:
                    raise DataError(f"{chunk.place(number)}: {error}") from error
                yield from ((text, 0) for text in texts)
            yield "", chunk.num_bytes


def training_texts(record: Any, text_key: str) -> list[str]:
    """Return a record's field `text_key`, or else its chat's messages."""
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


def trained_tokenizer(texts: Iterable[str], options: TokenizerOptions) -> Any:
    """Return a transformers tokenizer trained on `texts`.

    It has fewer than `options.vocab_size` tokens if the texts have too few pairs to merge. Raises UsageError for a
    chat template's file that is not readable text or not valid Jinja.
    """
    from transformers import PreTrainedTokenizerFast

    template = options.chat_template
    if template == CHATML:
        template = CHATML_TEMPLATE
    elif template is not None:
        template = read_template(template, "tokenizer.chat_template")
        check_template(template, str(options.chat_template), "tokenizer.chat_template")
    named = {name: token for name in NAMED_TOKENS if (token := getattr(options, name)) is not None}
    bpe = train_bpe(texts, options.vocab_size, options.all_special_tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, chat_template=template, clean_up_tokenization_spaces=False, **named
    )


def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> Any:
    """Return a `tokenizers.Tokenizer` of at most `vocab_size` tokens.

    Its tokens are the special tokens from id 0, the 256 bytes, and merges within GPT-2's pre-tokens. The same texts in
    the same order give the same tokenizer.
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
