"""Tokenize text records, in an index worker or in a training process.

document 1        document 2 (unusable)      document 3            add_bos=false add_eos=true
t t t t EOS                                  t t EOS               tokens[8], lengths = 5 3
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ext.options import UsageError, option
from verl_ext.text.read.json_records import BadRecord, RecordOptions, check_characters, read_record, readable_value
from verl_ext.text.read.readers import Batch, Chunk, TextFile
from verl_ext.text.tokens.documents import Counts
from verl_ext.text.tokens.encoders import Encoded, TextEncoder


def optimal_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype in which Megatron writes ids: uint16 below 65,500 tokens, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


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
            yield f"{self.key('text_key')} must name a field of a record, or several; got {self.text_key!r}"

    @property
    def text_keys(self) -> list[str]:
        """The fields that a record's text is made of, joined by newlines."""
        return [self.text_key] if isinstance(self.text_key, str) else self.text_key

    @property
    def read_columns(self) -> list[str]:
        """The columns of a table that are read."""
        return ["text", *self.text_keys]

    @property
    def add_eos(self) -> bool:
        """Whether an EOS token follows each document."""
        return True


@dataclass(frozen=True)
class TextOptions(RecordTextOptions):
    """The options of text that becomes documents."""

    add_eos: bool = option(True, "one EOS token after each document of a text")


@dataclass(frozen=True)
class BadText:
    """An unusable record: the number of documents before it, the reason, and its message."""

    after: int
    reason: str
    line: str


@dataclass
class PlainDocuments:
    """The documents of a batch: tokens[ΣT] of the tokenizer's `dtype` and lengths[D] int64.

    special_tokens[D] int64 counts the names of special tokens in each document's text that are encoded as text. `bad`
    holds the unusable records in order. `failure` is the error that ends the run after these documents are written.
    """

    source: int
    num_bytes: int
    tokens: np.ndarray
    lengths: np.ndarray
    bad: list[BadText]
    failure: str | None
    special_tokens: np.ndarray

    def counts(self, written: int | None = None) -> Counts:
        """Count the records, special tokens and bad records, of all documents or of the first `written` ones."""
        special = self.special_tokens[:written]
        bad = [record for record in self.bad if written is None or record.after < written]
        counts = Counts(records=len(special) + len(bad))
        counts.add_special_tokens(int(special.sum()), int((special > 0).sum()))
        for record in bad:
            counts.add_bad(record.reason, record.line)
        return counts


class TextTokenizer:
    """A tokenizer of record batches by `TextEncoder`, with BOS and EOS.

    BOS and EOS are added even if a text begins or ends with them, as Megatron's `--append-eod` does. Raises
    `UsageError` if the tokenizer lacks a requested one.
    """

    def __init__(self, tokenizer: Any, options: RecordTextOptions, add_bos: bool = False) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.encoder = TextEncoder(tokenizer, options)
        self.vocabulary = vocabulary_size(tokenizer)
        self.dtype = optimal_dtype(self.vocabulary)
        self.first = self._added("bos") if add_bos else []
        self.last = self._added("eos") if options.add_eos else []

    def _added(self, name: str) -> list[int]:
        token = getattr(self.tokenizer, f"{name}_token_id")
        if token is None:
            key = self.options.key(f"add_{name}")
            raise UsageError(f"{key} must be false for a tokenizer that has no {name}_token; got true")
        return [token]

    def tokenize(self, batch: Batch) -> PlainDocuments:
        """Return the documents; under `on_bad_record=error`, only those before the first bad record (`failure`)."""
        texts = list(record_texts(batch, self.options))
        usable = iter(self.encoder.encode([text for _, text in texts if not isinstance(text, BadRecord)]))
        encoded: list[Encoded] = []
        bad: list[BadText] = []
        failure = batch.failure
        for place, text in texts:
            outcome = text if isinstance(text, BadRecord) else next(usable)
            if isinstance(outcome, Encoded) and not len(outcome.ids):
                outcome = BadRecord("empty", "the tokenizer makes no token of the text")
            if isinstance(outcome, Encoded):
                encoded.append(outcome)
            elif isinstance(outcome, BadRecord):
                bad.append(BadText(len(encoded), outcome.reason, f"{place}: {outcome}"))
                if self.options.on_bad_record == "error":
                    skip = f"{self.options.key('on_bad_record')}=skip leaves such records out"
                    failure = f"{bad[-1].line} ({outcome.reason}; {skip})"
                    break
            else:
                failure = str(outcome)
                break
        lengths = np.array([len(text.ids) for text in encoded], dtype=np.int64)
        lengths += len(self.first) + len(self.last)
        special = np.array([text.special_tokens for text in encoded], dtype=np.int64)
        tokens = self._joined([text.ids for text in encoded])
        return PlainDocuments(batch.source, batch.num_bytes, tokens, lengths, bad, failure, special)

    def _joined(self, ids: list[np.ndarray]) -> np.ndarray:
        """Return the tokens of all documents one after the other, with BOS and EOS."""
        first, last = np.array(self.first, np.int32), np.array(self.last, np.int32)
        parts = [part for document in ids for part in (first, document, last)]
        tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            wrong = tokens[(tokens < 0) | (tokens >= self.vocabulary)][0]
            raise UsageError(f"the tokenizer must give tokens of its vocabulary, 0..{self.vocabulary - 1}; got {wrong}")
        return tokens.astype(self.dtype)


def record_texts(batch: Batch, options: RecordTextOptions) -> Iterator[tuple[str, str | TextFile | BadRecord]]:
    """Yield (place, text or error) of every record, up to the first error that ends the run."""
    for chunk in batch.chunks:
        for number, raw in chunk.records:
            try:
                yield chunk.place(number), _text(chunk, raw, options)
            except BadRecord as error:
                yield chunk.place(number), error
                if options.on_bad_record == "error":
                    return


def _text(chunk: Chunk, raw: Any, options: RecordTextOptions) -> str | TextFile:
    record = read_record(raw)
    if isinstance(record.get("text"), TextFile):
        return record["text"]
    texts = []
    for key in ["text"] if chunk.whole_file else options.text_keys:
        value = readable_value(record.get(key))
        if value is None:
            found = ", ".join(str(name) for name, value in record.items() if value is not None) or "none"
            needed = f"{options.key('text_key')} must name a field of the record"
            raise BadRecord("no_text", f"{needed}; got {key}, its fields are {found}")
        if not isinstance(value, str):
            raise BadRecord("non_string_text", f"{key} must be a string; got {type(value).__name__}")
        texts.append(value)
    text = "\n".join(texts)
    if not text.strip():
        raise BadRecord("empty", "the text is empty")
    check_characters(text)
    return text


def vocabulary_size(tokenizer: Any) -> int:
    """Return one more than the highest token id: `len(tokenizer)`, or more if the ids have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
