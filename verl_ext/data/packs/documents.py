"""Documents: the rows of a source that a set has, and those that its packs take."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.packs.dataset import PackedDocument
from verl_ext.data.packs.omitted import NO_CATEGORY, OmittedDocuments
from verl_ext.data.packs.usage import DataUse, data_use
from verl_ext.data.tokenized.facts import OverLength, OverLengthCount
from verl_ext.data.tokenized.source import DocumentSource
from verl_ext.metrics import LengthBins
from verl_ext.packing import PackPlan, Spans, cut_spans


@dataclass(frozen=True)
class DocumentRows:
    """The documents of a set.

    rows: its rows of the source, ascending; None: all, as numbers take 8 bytes each. most: how many of them packs may
    take from the start; None: all. names: names of category numbers that win over the source's. cut_reason: what a
    report calls documents that lost tokens when they were tokenized; "": it does not name them. never: what did not
    become a document.
    """

    source: DocumentSource
    rows: NDArray[np.int64] | None = None
    most: int | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    cut_reason: str = ""
    never: Sequence[OmittedDocuments] = ()

    def numbers(self, places: NDArray[Any]) -> NDArray[Any]:
        """Return the source's rows at these places among `rows`."""
        return places if self.rows is None else self.rows[places]

    @property
    def in_use(self) -> slice | NDArray[np.int64]:
        """The rows of the source that packs may take."""
        return slice(self.most) if self.rows is None else self.rows[: self.most]

    @property
    def lengths(self) -> NDArray[np.integer]:
        """The tokens of the documents in use."""
        return self.source.lengths[self.in_use]

    def cut(self, max_tokens: int, policy: str) -> Spans:
        """Return the documents in use by row, where longer ones follow `policy`; raise ValueError as `cut_spans`."""
        spans = cut_spans(self.lengths, max_tokens, policy, self.source.key)
        return Spans(self.numbers(spans.row), spans.start, spans.length)

    def over_length(self, max_tokens: int, policy: str) -> OverLength:
        """Return the documents in use that are longer than a pack."""
        return OverLength(self.numbers(np.flatnonzero(self.lengths > max_tokens)), max_tokens, policy)

    @cached_property
    def category_names(self) -> dict[int, str]:
        """The names of categories by number."""
        return {**self.source.category_names, **self.names}

    @cached_property
    def tokens(self) -> int:
        """The tokens of all documents of the set."""
        lengths = self.source.lengths if self.rows is None else self.source.lengths[self.rows]
        return int(lengths.sum(dtype=np.int64))

    def omitted(
        self, spans: Spans, plan: PackPlan, targets: NDArray[Any], over: Iterable[OverLengthCount], policy: str
    ) -> Iterator[OmittedDocuments]:
        """Yield what packs lack, have cut or hold without a target.

        targets: of each span. over: the counts of documents longer than a pack, which follow `policy`.
        """
        lengths, columns, used = self.source.lengths, self.source.document_columns, self.in_use
        if self.cut_reason:  # tokens are counted before the cut
            assert columns is not None, "verl-ext has tokenized them"
            full = columns.full_length[used]
            cut = np.flatnonzero(full > self.lengths)
            total, kept = int(full.sum(dtype=np.int64)), self.lengths[cut]
            yield from self.by_category(self.cut_reason, self.numbers(cut), full[cut], kept, total)
        for count in sorted(over, key=lambda count: (count.category == 0, count.category)):
            category, documents, tokens, tokens_kept = count
            yield self._omitted(category, policy, documents, tokens, tokens_kept)
        if empty := int((self.lengths == 0).sum()):
            yield OmittedDocuments(NO_CATEGORY, "empty", documents=empty)
        of_set = len(lengths) if self.rows is None else len(self.rows)
        beyond = self.numbers(np.arange(len(self.lengths), of_set))
        yield from self.by_category("beyond max_samples", beyond, lengths[beyond])
        # What the plan lacks, and documents without a target in all their pieces.
        is_packed = np.zeros(len(spans), bool)
        is_packed[plan.document_index] = True
        yield from self.by_category("not drawn", spans.row[~is_packed], spans.length[~is_packed])
        row, length = spans.row[is_packed], spans.length[is_packed]
        begins = np.flatnonzero(np.diff(row, prepend=-1))
        of_row, sums = (np.add.reduceat(values, begins, dtype=np.int64) for values in (targets[is_packed], length))
        none = of_row == 0
        yield from self.by_category("no target", row[begins][none], sums[none], sums[none])
        yield from self.never

    def by_category(
        self,
        reason: str,
        rows: NDArray[np.int64],
        tokens: NDArray[Any],
        kept: NDArray[Any] | None = None,
        total: int | None = None,
    ) -> Iterator[OmittedDocuments]:
        """Yield what one reason changes or leaves out, by category.

        rows int64[D]: one for each piece, with its tokens and those that are kept (None: none). total: the tokens that
        shares are of; None: the set's.
        """
        kept, columns = np.zeros_like(tokens) if kept is None else kept, self.source.document_columns
        category = np.zeros(len(rows), np.int64) if columns is None else columns.category[rows]
        for number in np.unique(category).tolist():
            chosen = category == number
            before, after = int(tokens[chosen].sum(dtype=np.int64)), int(kept[chosen].sum(dtype=np.int64))
            yield self._omitted(number, reason, len(np.unique(rows[chosen])), before, after, total)

    def _omitted(
        self, category: int, reason: str, documents: int, tokens: int, kept: int, total: int | None = None
    ) -> OmittedDocuments:
        name = self.category_names.get(category, str(category)) if category > 0 else NO_CATEGORY
        share = tokens / (self.tokens if total is None else total)
        return OmittedDocuments(name, reason, documents, tokens, share, kept, tokens - kept)

    def places(self, spans: Spans, documents: NDArray[np.integer]) -> Iterator[PackedDocument]:
        """Yield the place of each of these spans."""
        first_rows = self.source.first_rows()
        row, start, length = (values[documents] for values in (spans.row, spans.start, spans.length))
        folder = np.searchsorted(first_rows, row, side="right") - 1
        numbers = (folder, row - first_rows[folder], start, length)
        for of, *place in zip(*(values.tolist() for values in numbers), strict=True):
            yield PackedDocument(self.source.folders[of], *place)

    def usage(self, spans: Spans, plan: PackPlan, bins: LengthBins) -> list[DataUse]:
        """Return how often an epoch reads the documents, by source and length.

        A document's source is its category, or its folder if its record had none.
        """
        first_rows, columns = self.source.first_rows(), self.source.document_columns
        folder = -np.searchsorted(first_rows, spans.row, side="right").astype(np.int64)
        category = np.zeros_like(folder) if columns is None else columns.category[spans.row].astype(np.int64)
        number = np.where(category > 0, category, folder)
        names = {n: self.category_names.get(n, str(n)) for n in np.unique(category[category > 0]).tolist()}
        names |= {-n: os.path.basename(path) or path for n, path in enumerate(self.source.folders, start=1)}
        draws = np.bincount(plan.document_index, minlength=len(spans))
        return data_use(number, names, spans.length.astype(np.int64), draws, bins)
