"""A new model's tokenizer: a copy, or a byte-level BPE trained."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from verl_ext.commands.command_line import as_list, is_names
from verl_ext.options import DataError, Options, must, option
from verl_ext.progress import progress_bar
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.readers import read_chunks, read_record
from verl_ext.text.read.sources import FORMATS, SourceFile, find_source_files, total_bytes
from verl_ext.text.read.text_file import text_blocks
from verl_ext.text.records.records import parse_record
from verl_ext.text.tokens.tokenizer import check_template, read_template

CHATML = "chatml"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token")


@dataclass(frozen=True)
class TokenizerOptions(Options):
    """A tokenizer to copy, or text and settings to train one."""

    prefix: ClassVar[str] = "tokenizer"

    path: str | None = option(None, "tokenizer to copy: a folder or a name on the Hub; exclusive with train_on")
    train_on: Any = option(
        [], f"data to train a byte-level BPE on, text_key of a record or every message of a chat: {FORMATS}"
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
            yield must("tokenizer.train_on", "be a path, a glob or a list of them", self.train_on)
        for name in (*NAMED_TOKENS, "special_tokens"):
            if "" in (as_list(getattr(self, name)) or ()):
                yield must(f"tokenizer.{name}", "hold no empty text", getattr(self, name))
        if self.vocab_size < (least := 256 + len(self.all_special_tokens)):
            needed = f"be at least {least}, the 256 bytes and the special tokens"
            yield must("tokenizer.vocab_size", needed, self.vocab_size)


class TrainingText:
    """A stream of text: blocks of files, and texts of records.

    `characters` counts the characters so far. Raises UsageError for files that are missing or have an unknown format,
    and DataError for unusable content.
    """

    def __init__(self, patterns: Sequence[str], text_key: str) -> None:
        self.patterns = patterns
        self.files = find_source_files({"train_on": list(patterns)}, "tokenizer.train_on")
        self.text_key = text_key
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        with progress_bar("training text", total_bytes(self.files), unit="B", unit_scale=True) as bar:
            for text, num_bytes in chain.from_iterable(map(self._texts, self.files)):
                self.characters += len(text)
                bar.update(num_bytes)
                yield text
        if not self.characters:
            raise DataError(must("tokenizer.train_on", "hold text", f"none in {', '.join(self.patterns)}"))

    def _texts(self, file: SourceFile) -> Iterator[tuple[str, int]]:
        """Yield each text of a file, maybe empty, and the bytes read."""
        place = file.path
        try:
            if file.kind == "text":
                yield from text_blocks(place)
                return
            for chunk in read_chunks(file):
                for at, raw in chunk.records:
                    place = at
                    yield from ((text, 0) for text in training_texts(read_record(raw), self.text_key))
                yield "", chunk.num_bytes
        except BadRecord as error:
            raise DataError(f"{place}: {error}") from error


def training_texts(record: dict[str, Any], text_key: str) -> list[str]:
    """Return a record's field `text_key`, or else its chat's messages."""
    if (text := record.get(text_key)) is not None:
        if not isinstance(text, str):
            raise BadRecord("non_string_content", must(text_key, "be a string", type(text).__name__))
        return [text]
    try:
        chats = parse_record(record, drop_nulls=True).content.chats
        if texts := [message["content"] for chat in chats for message in chat.messages]:
            return list(dict.fromkeys(texts)) if len(chats) > 1 else texts
    except BadRecord as error:
        if error.reason != "unknown_fields":
            raise
    fields = ", ".join(map(str, record)) or "none"
    raise BadRecord("unknown_fields", f"no field {text_key} (tokenizer.text_key) and no chat; its fields: {fields}")


def trained_tokenizer(texts: Iterable[str], options: TokenizerOptions) -> Any:
    """Return a transformers tokenizer: a byte-level BPE trained on `texts`.

    Its tokens are the special tokens from id 0, the 256 bytes, and merges within GPT-2's pre-tokens, fewer than
    `options.vocab_size` if the texts have too few pairs to merge. The same texts in the same order give the same
    tokenizer. Raises UsageError for a chat template's file that is not readable text or not valid Jinja.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template = CHATML_TEMPLATE if options.chat_template == CHATML else options.chat_template
    if template is not None:
        template = read_template(template, "tokenizer.chat_template")
        check_template(template, str(options.chat_template), "tokenizer.chat_template")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        special_tokens=options.all_special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokens = {name: token for name in NAMED_TOKENS if (token := getattr(options, name)) is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, chat_template=template, clean_up_tokenization_spaces=False, **tokens
    )
