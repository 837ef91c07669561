"""Read records that are tokenized already, in the columns of a tokenized dataset.

    {"input_ids": [100, 101, 102], "loss_mask": [0, 0, 1], "category_ids": [0, 0, 12], "length": 3}

The tokens, targets and categories are those of the record, also where one document has several categories.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.options import DataError, UsageError
from verl_ext.text.chat.renderer import ChatOptions
from verl_ext.text.encoder_texts import vocabulary_size
from verl_ext.text.read.json_records import BadRecord, read_record, readable_value
from verl_ext.text.read.readers import Chunk, ChunkSize, read_chunks
from verl_ext.text.read.sources import SourceFile
from verl_ext.text.tokens.documents import Counts, Document, Documents, concat_documents, cut_to_length, preview_of
from verl_ext.text.tokens.tokenizer import load_tokenizer

REQUIRED = ("input_ids", "loss_mask", "category_ids")
COLUMNS = (*REQUIRED, "length", "loss_weight")


def has_tokens(files: Iterable[SourceFile]) -> bool:
    """Return whether the first record of each source holds tokens. Raises `UsageError` if only some do."""
    found: dict[bool, str] = {}
    for file in {file.category_id: file for file in reversed(list(files))}.values():
        is_tokens = False
        if file.kind not in ("text", "csv", "tsv"):
            first = (record for chunk in read_chunks(file, ChunkSize(1, 1), REQUIRED) for _, record in chunk.records)
            with suppress(BadRecord, DataError):  # which the reading of all files raises, in their order
                is_tokens = read_record(next(first, None)).keys() >= set(REQUIRED)
        found.setdefault(is_tokens, file.path)
    if len(found) == 2:
        needed = f"sources must all hold tokenized records ({', '.join(REQUIRED)}), or none"
        raise UsageError(f"{needed}; got some in {found[True]} and others in {found[False]}")
    return True in found


class TokenRecordEncoder:
    """A reader of tokenized records with the methods of `ChatEncoder`; the tokenizer's vocabulary bounds the tokens."""

    def __init__(self, options: ChatOptions, sources: Sequence[str] = (), preview: int = 0) -> None:
        """Load the tokenizer. Raises `UsageError` if there is none, or an option asks for what records do not have."""
        if options.category_field:
            got = f"got {options.category_field}"
            raise UsageError(f"category_field must be null for tokenized records, which have category_ids; {got}")
        self.options, self._preview = options, preview
        self.tokenizer = load_tokenizer(options.model)
        self._vocabulary = vocabulary_size(self.tokenizer)

    def fingerprint(self) -> str:
        """Return what decides a record's document besides the options: the size of the vocabulary."""
        return str(self._vocabulary)

    def encode(self, chunk: Chunk) -> Documents:
        """Return a chunk's documents. Raises `DataError` for the first bad record under `on_bad_record=error`."""
        counts, found = Counts(), []
        decode = partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
        for number, raw in chunk.records:
            counts.records += 1
            place = chunk.place(number)
            try:
                document = self._document(read_record(raw))
                pieces = cut_to_length(document, self.options.max_tokens, self.options.over_length, counts.over_length)
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
            except BadRecord as error:
                # The user accepts that a cut loses targets.
                if self.options.on_bad_record == "error" and not error.reason.startswith("no_target_after"):
                    left_out = f"({error.reason}; on_bad_record=skip leaves such records out)"
                    raise DataError(f"{place}: {error} {left_out}") from error
                counts.add_bad(error.reason, f"{place}: {error}")
                continue
            found += pieces
            counts.add_documents((len(p.input_ids) for p in pieces), sum(int(p.loss_mask.sum()) for p in pieces))
        documents = concat_documents(found, chunk.category_id, chunk.num_bytes, counts)
        documents.preview = [preview_of(each.input_ids, each.loss_mask, decode) for each in found[: self._preview]]
        return documents

    def _document(self, record: dict[str, Any]) -> Document:
        ids = _numbers(record, "input_ids", self._vocabulary - 1)
        mask = _numbers(record, "loss_mask", 1, len(ids)).astype(np.int8)
        categories = _numbers(record, "category_ids", np.iinfo(np.int32).max, len(ids))
        if (length := readable_value(record.get("length"))) not in (None, len(ids)):
            raise BadRecord("bad_tokens", f"length must be the number of input_ids, {len(ids)}; got {length!r}")
        weights = readable_value(record.get("loss_weight"))
        if weights is not None:
            weights = np.asarray(weights) if isinstance(weights, list) and len(weights) == len(ids) else np.array("")
            if weights.dtype.kind not in "iuf" or not np.isfinite(weights).all() or (weights < 0).any():
                needed = f"loss_weight must be {len(ids)} numbers of at least 0, one for each of input_ids"
                raise BadRecord("bad_tokens", needed)
            weights = weights.astype(np.float32)
        mask[:1] = 0
        if not mask.any():
            raise BadRecord("no_target", "no token is left to learn after the first")
        return Document(ids, mask, weights, category_ids=categories * mask)


def _numbers(record: dict[str, Any], name: str, most: int, count: int | None = None) -> NDArray[np.int32]:
    """Return the whole numbers 0..most in a field, `count` of them. Raises `BadRecord`."""
    values = readable_value(record.get(name))
    needed = f"{name} must be a list of {'' if count is None else f'{count} '}whole numbers of 0 to {most}"
    if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
        raise BadRecord("bad_tokens", f"{needed}; got {type(values).__name__ if values else repr(values)}")
    if count is not None and len(values) != count:
        raise BadRecord("bad_tokens", f"{needed}, one for each of input_ids; got {len(values)}")
    if wrong := [value for value in (min(values), max(values)) if not 0 <= value <= most]:
        raise BadRecord("bad_tokens", f"{needed}; got {wrong[0]}")
    return np.array(values, np.int32)
