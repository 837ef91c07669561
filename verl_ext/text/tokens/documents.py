"""Tokenized documents.

document 1   document 2
5 6 7        8 9          input_ids  5 6 7 8 9      lengths  3 2
0 1 1        0 1          loss_mask  0 1 1 0 1
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.text.tokens.counts import Counts, add_by_category

UNIT_COLUMNS = {"unit": np.int32, "answer": np.int8, "pair_weight": np.float32}


class RecordFacts(NamedTuple):
    """The R records of a chunk, for whoever chooses among them.

    keys: uint64[R], a hash of each one's content. owners: int64[D], the record of each document. counts: the category
    and the counts of each.
    """

    keys: NDArray[np.uint64]
    owners: NDArray[np.int64]
    counts: list[tuple[str, Counts]]


class Document(NamedTuple):
    """A document of T tokens.

    weights: of each target; None for 1. full_length: the number of tokens before it was cut; None if it was not.
    special_tokens: the number of special tokens' names in its text that are encoded as text. category_ids: those of a
    record that was tokenized already. texts: further columns. unit: the documents of its preference in its first one, 0
    in the others; 1 for a document alone. answer: 1 for a preferred answer, -1 for a rejected one, 0 for neither.
    pair_weight: of the preference.
    """

    input_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.int8]  # [T]
    weights: NDArray[np.float32] | None = None  # [T]
    full_length: int | None = None
    special_tokens: int = 0
    category_ids: NDArray[np.int32] | None = None  # [T]
    texts: Sequence[str] = ()
    unit: int = 1
    answer: int = 0
    pair_weight: float = 1.0


@dataclass(frozen=True)
class Documents:
    """The D documents of a chunk of records, concatenated to ΣT tokens."""

    category_id: int  # the number of their source, from 1
    num_bytes: int  # the bytes that the records take in the source's files
    input_ids: NDArray[np.int32]  # [ΣT]
    loss_mask: NDArray[np.int8]  # [ΣT]
    lengths: NDArray[np.int64]  # [D]
    weights: NDArray[np.float32] | None  # [ΣT]; None if no target has one
    full_lengths: NDArray[np.int64]  # [D], the tokens before a cut
    special_tokens: NDArray[np.int64]  # [D], the names of special tokens encoded as text
    token_categories: NDArray[np.int32] | None  # [ΣT], of records that were tokenized already
    counts: Counts = field(default_factory=Counts)  # of the records; `counted` counts the documents
    failure: str | None = None  # the error that ends the run after these documents
    category_names: list[str] | None = None  # one for each document, if records name their categories
    category_counts: dict[str, Counts] = field(default_factory=dict)  # the counts of records of each of these
    category_ids: NDArray[np.int32] | None = None  # [D], the numbers of `category_names`
    chat_template: str | None = None  # of the chats; None for texts alone, or for several templates by name
    end_of_chat: str | None = None  # the text after the last turn; earlier turns, or parts of turns, may end otherwise
    texts: dict[str, list[str]] = field(default_factory=dict)  # further columns, with one text for each document
    units: dict[str, NDArray[Any]] | None = None  # UNIT_COLUMNS of each document; None if none is an answer
    records: RecordFacts | None = None  # only if an encoder's `by_record` asks for them

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first token of each document, int64[D]."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def counted(self, chosen: Any = ...) -> Counts:
        """Count the documents, or the ones of bool[D], without their records."""
        if not len(self.lengths):
            return Counts()
        lengths, special = self.lengths[chosen], self.special_tokens[chosen]
        targets = np.add.reduceat(self.loss_mask, self.starts, dtype=np.int64)[chosen]
        cut = self.full_lengths[chosen] - lengths
        return Counts(
            documents=len(lengths),
            tokens=int(lengths.sum()),
            target_tokens=int(targets.sum()),
            lengths=Counter(lengths.tolist()),
            over_length=+Counter(documents=int((cut > 0).sum()), tokens=int(cut.sum(dtype=np.int64))),
            special_tokens=+Counter(records=int((special > 0).sum()), occurrences=int(special.sum())),
        )

    def only(self, records: NDArray[np.bool_], documents: NDArray[np.bool_]) -> "Documents":
        """Return the chosen documents, with the counts of the chosen records.

        records: bool[R]. documents: bool[D], those of a record all alike.
        """
        assert self.records is not None, "the encoder has told the records apart"
        tokens, names = np.repeat(documents, self.lengths), self.category_names
        # Nothing of a chosen document follows from those beside it, which differ with the size of chunks.
        weights = None if self.weights is None else self.weights[tokens]
        units = None if self.units is None else {name: values[documents] for name, values in self.units.items()}
        by_category = add_by_category([self.records.counts[at] for at in np.flatnonzero(records).tolist()])
        places = np.flatnonzero(documents).tolist()
        return replace(
            self,
            input_ids=self.input_ids[tokens],
            loss_mask=self.loss_mask[tokens],
            lengths=self.lengths[documents],
            weights=None if weights is None or (weights == 1).all() else weights,
            full_lengths=self.full_lengths[documents],
            special_tokens=self.special_tokens[documents],
            token_categories=None if self.token_categories is None else self.token_categories[tokens],
            counts=Counts().add(*by_category.values()),
            category_names=None if names is None else [names[at] for at in places],
            category_counts=by_category if self.category_counts else {},
            category_ids=None if self.category_ids is None else self.category_ids[documents],
            texts={name: [values[at] for at in places] for name, values in self.texts.items()},
            units=None if units is None or not units["answer"].any() else units,
            records=None,
        )


def join_documents(documents: Sequence[Document], category_id: int, num_bytes: int, **of_records: Any) -> Documents:
    """Concatenate documents; `of_records` are fields of `Documents`."""
    weights = None
    if any(document.weights is not None for document in documents):
        weights = np.concatenate(
            [np.ones(len(d.input_ids), np.float32) if d.weights is None else d.weights for d in documents]
        )
    categories = [d.category_ids for d in documents if d.category_ids is not None]
    lengths = [len(d.input_ids) for d in documents]
    return Documents(
        category_id,
        num_bytes,
        _concatenated([d.input_ids for d in documents], np.int32),
        _concatenated([d.loss_mask for d in documents], np.int8),
        np.array(lengths, np.int64),
        weights,
        np.array([d.full_length or length for d, length in zip(documents, lengths, strict=True)], np.int64),
        np.array([d.special_tokens for d in documents], np.int64),
        np.concatenate(categories) if categories else None,
        units={name: np.array([getattr(d, name) for d in documents], kind) for name, kind in UNIT_COLUMNS.items()}
        if any(document.answer for document in documents)
        else None,
        **of_records,
    )


def _concatenated(arrays: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, dtype), *arrays])  # a book is not copied


def numbered(documents: Documents, numbers: dict[str, int]) -> Documents:
    """Return documents with the numbers of the categories that their records name; add those of new ones."""
    if documents.category_names is None:
        return documents
    ids = [numbers.setdefault(name, len(numbers) + 1) for name in documents.category_names]
    return replace(documents, category_ids=np.array(ids, np.int32))
