"""Encode records that are tokenized already, in a tokenized dataset's columns.

    {"input_ids": [100, 101, 102], "loss_mask": [0, 0, 1], "category_ids": [0, 0, 12], "length": 3}

The tokens, targets and categories are those of the record, also where one document has several categories.
"""

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.options import DataError, UsageError, must
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.encoder import Encoder
from verl_ext.text.held_out import hashed_key
from verl_ext.text.read.bad_record import BadRecord, readable_value
from verl_ext.text.read.readers import Chunk, ChunkSize, read_chunks, read_record
from verl_ext.text.read.sources import SourceFile
from verl_ext.text.records.messages import FLOAT32
from verl_ext.text.tokens.documents import Document, Documents

REQUIRED = ("input_ids", "loss_mask", "category_ids")
COLUMNS = (*REQUIRED, "length", "loss_weight", "unit", "answer")


def has_tokens(files: Iterable[SourceFile]) -> bool:
    """Return whether sources begin with tokens; raise `UsageError` if only some do."""
    found: dict[bool, str] = {}
    for file in {file.category_id: file for file in reversed(list(files))}.values():
        is_tokens = False
        if file.kind not in ("text", "csv", "tsv"):
            first = (record for chunk in read_chunks(file, ChunkSize(1, 1), REQUIRED) for _, record in chunk.records)
            with suppress(BadRecord, DataError):  # which the reading of all files raises, in their order
                is_tokens = read_record(next(first, None)).keys() >= set(REQUIRED)
        found.setdefault(is_tokens, file.path)
    if len(found) == 2:
        needed = f"all hold tokenized records ({', '.join(REQUIRED)}), or none"
        raise UsageError(must("sources", needed, f"some in {found[True]} and others in {found[False]}"))
    return True in found


class TokenRecordEncoder(Encoder):
    """An encoder that copies tokenized records; the vocabulary bounds their tokens."""

    options: ChatOptions
    columns = COLUMNS

    def open(self) -> None:
        """Load the tokenizer. Raises `UsageError` for options that records cannot meet."""
        if self.options.category_field:
            needed = "be null for tokenized records, which have category_ids"
            raise UsageError(must("category_field", needed, self.options.category_field))
        super().open()

    def fingerprint(self) -> str:
        """Return the vocabulary's size, which decides documents besides the options."""
        return str(self.vocabulary)

    def encode(self, chunk: Chunk) -> Documents:
        """Return the documents of a chunk, one for each record."""
        return self.one_each(chunk, (partial(self._document, raw) for _, raw in chunk.records))

    def record_key(self, raw: Any, source: int) -> int:
        """Return 64 bits of a hash of a record's tokens. Raises `BadRecord`."""
        return hashed_key([_numbers(read_record(raw), "input_ids", np.iinfo(np.int32).max).tobytes()])

    def _document(self, raw: Any) -> Document:
        record = read_record(raw)
        ids = _numbers(record, "input_ids", self.vocabulary - 1)
        mask = _numbers(record, "loss_mask", 1, len(ids)).astype(np.int8)
        categories = _numbers(record, "category_ids", np.iinfo(np.int32).max, len(ids))
        if (length := readable_value(record.get("length"))) not in (None, len(ids)):
            raise BadRecord("bad_tokens", must("length", f"be the number of input_ids, {len(ids)}", repr(length)))
        weights = readable_value(record.get("loss_weight"))
        if weights is not None:
            weights = np.asarray(weights) if isinstance(weights, list) and len(weights) == len(ids) else np.array("")
            fits = weights.dtype.kind in "iuf" and ((weights == 0) | (weights >= FLOAT32[0])) & (weights <= FLOAT32[1])
            if not np.all(fits):
                needed = f"loss_weight must be {len(ids)} numbers of at least 0, one for each of input_ids"
                raise BadRecord("bad_tokens", f"{needed}, that fit in float32")
            weights = weights.astype(np.float32)
        # A unit that lost one of its rows would be broken, and an answer alone no document to learn.
        unit, answer = (readable_value(record.get(name)) for name in ("unit", "answer"))
        if type(unit) is int and type(answer) is int and answer:
            needed = "be 0: tokenized preferences must be made again from their records"
            raise BadRecord("preference", must("answer", needed, answer))
        mask[:1] = 0
        self.check_length(len(ids))
        if not mask.any():
            raise BadRecord("no_target", "no token is left to learn after the first")
        return Document(ids, mask, weights, category_ids=categories * mask)


def _numbers(record: dict[str, Any], name: str, most: int, count: int | None = None) -> NDArray[np.int32]:
    """Return a field's `count` whole numbers 0..most. Raises `BadRecord`."""
    values = readable_value(record.get(name))
    needed = f"be a list of {'' if count is None else f'{count} '}whole numbers of 0 to {most}"
    if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
        raise BadRecord("bad_tokens", must(name, needed, type(values).__name__ if values else values))
    if count is not None and len(values) != count:
        raise BadRecord("bad_tokens", must(name, f"{needed}, one for each of input_ids", len(values)))
    if wrong := [value for value in (min(values), max(values)) if not 0 <= value <= most]:
        raise BadRecord("bad_tokens", must(name, needed, wrong[0]))
    return np.array(values, np.int32)
