"""Encode text records, for an index of Megatron's form and for pretraining.

document 1        document 2 (unusable)      document 3            add_bos=false add_eos=true
t t t t EOS                                  t t EOS               tokens[8], lengths = 5 3
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.cache import fingerprint
from verl_ext.options import DataError, UsageError, must, option
from verl_ext.text.encoder import Encoder
from verl_ext.text.read.bad_record import BadRecord, RecordOptions, check_characters, readable_value
from verl_ext.text.read.readers import Chunk, read_record
from verl_ext.text.read.text_file import TextFile
from verl_ext.text.records.content import PlainText
from verl_ext.text.text_encoder import Encoded, TextEncoder
from verl_ext.text.tokens.documents import Document, Documents
from verl_ext.text.tokens.tokenizer import tokenizer_facts


@dataclass(frozen=True)
class RecordTextOptions(RecordOptions):
    """The fields of a record that hold its text."""

    text_key: Any = option(
        "text", "field of a record that holds its text, or a list of fields, joined by a newline", required=True
    )

    def problems(self) -> Iterable[str | None]:
        """Yield a line for a `text_key` that names no field."""
        keys = self.text_keys
        if not isinstance(keys, (list, tuple)) or not keys or not all(isinstance(name, str) and name for name in keys):
            yield must(self.key("text_key"), "name a field of a record, or several", self.text_key)

    @property
    def text_keys(self) -> list[str]:
        """The fields that a record's text is made of, joined by newlines."""
        return [self.text_key] if isinstance(self.text_key, str) else self.text_key

    @property
    def add_eos(self) -> bool:
        """Whether an EOS token follows each document."""
        return True


@dataclass(frozen=True)
class TextOptions(RecordTextOptions):
    """The options of text that becomes documents."""

    add_eos: bool = option(True, "one EOS token after each document of a text")


def optimal_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return Megatron's dtype of ids: uint16 below 65,500 tokens, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


def without_middle(ids: NDArray[Any], most: int, last: int) -> NDArray[Any]:
    """Return at most so many ids: the first and the `last` ones."""
    return ids if len(ids) <= most else np.concatenate([ids[: most - last], ids[len(ids) - last :]])


class TextRecordEncoder(Encoder):
    """An encoder of texts; all tokens but the first are targets.

    BOS and EOS are added even if a text begins or ends with them, as Megatron's `--append-eod` does. Raises
    `UsageError` if the tokenizer lacks a requested one.
    """

    reads = "records with a text"
    options: RecordTextOptions
    most_tokens: int | None = None  # of a document; a longer one loses tokens before its last

    def __init__(self, options: RecordTextOptions, tokenizer: Any = None, key: str = "", add_bos: bool = False) -> None:
        super().__init__(options, tokenizer, key)
        self.add_bos = add_bos
        self.columns = options.text_keys

    @cached_property
    def first(self) -> list[int]:
        """The token before each text, if any."""
        return self._added("bos") if self.add_bos else []

    @cached_property
    def last(self) -> list[int]:
        """The token after each text, if any."""
        return self._added("eos") if self.options.add_eos else []

    def _added(self, name: str) -> list[int]:
        token = getattr(self.tokenizer, f"{name}_token_id")
        if token is None:
            key = self.options.key(f"add_{name}")
            raise UsageError(must(key, f"be false for a tokenizer that has no {name}_token", True))
        return [token]

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer, self.options)

    def open(self) -> None:
        """Load the tokenizer, which must have the requested tokens."""
        _ = self.first, self.last, self._encoder

    def fingerprint(self) -> str:
        """Return a digest of tokenizer, tokens around a text, and options."""
        options = self.options
        read = [options.text_key, options.special_tokens_in_text, options.on_bad_record]
        return fingerprint([tokenizer_facts(self.tokenizer), self.first, self.last, self.most_tokens, read])

    def encode(self, chunk: Chunk) -> Documents:
        """Return the documents of a chunk, one for each record."""
        encoded = self._encoder.encode([self._text(raw) for _, raw in chunk.records])
        return self.one_each(chunk, (partial(self._document, each) for each in encoded))

    def _text(self, raw: Any) -> PlainText | BadRecord | DataError:
        try:
            if isinstance(raw, TextFile):  # whatever field `text_key` names
                return _checked(raw.read())
            record = read_record(raw)
            texts = []
            for key in self.options.text_keys:
                value = readable_value(record.get(key))
                if value is None:
                    found = ", ".join(str(name) for name, value in record.items() if value is not None) or "none"
                    got = f"{key}, its fields are {found}"
                    raise BadRecord("no_text", must(self.options.key("text_key"), "name a field of the record", got))
                if not isinstance(value, str):
                    raise BadRecord("non_string_text", must(key, "be a string", type(value).__name__))
                texts.append(value)
            return _checked("\n".join(texts))
        except (BadRecord, DataError) as error:
            return error

    def _document(self, encoded: Encoded | Exception) -> Document:
        if isinstance(encoded, Exception):
            raise encoded
        if not len(encoded.ids):
            raise BadRecord("empty", "the tokenizer makes no token of the text")
        ids = np.concatenate([np.array(self.first, np.int32), encoded.ids, np.array(self.last, np.int32)])
        if not 0 <= ids.min() <= ids.max() < self.vocabulary:
            wrong = ids[(ids < 0) | (ids >= self.vocabulary)][0]
            raise UsageError(must("the tokenizer", f"give tokens of its vocabulary, 0..{self.vocabulary - 1}", wrong))
        kept = without_middle(ids, self.most_tokens or len(ids), last=len(self.last))
        mask = np.ones(len(kept), np.int8)
        mask[0] = 0
        return Document(kept, mask, full_length=len(ids), special_tokens=encoded.special_tokens)


def _checked(text: str) -> PlainText:
    if not text.strip():
        raise BadRecord("empty", "the text is empty")
    check_characters(text)
    return PlainText(text)
