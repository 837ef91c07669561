"""Grouping: which documents a pack must hold together, and which tokens of theirs are computed once.

documents   0  1  2  3  4  5           wholes are what is drawn, ordered and packed, by the tokens to compute
Grouping    0  1  2  3  4  5           wholes are documents
Shared      0  1+3  2  4+5             likewise, and those that begin alike come together, unless a pack is too small
Preferences 0 1 | 2 3 4 | 5            wholes are preferences, whose documents follow each other
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from verl_ext.data.packs.documents import DocumentRows
from verl_ext.data.packs.sft_options import SFTOptions
from verl_ext.data.tokenized.beginnings import beginnings_of_ranks, unit_beginnings
from verl_ext.data.tokenized.facts import OverLength
from verl_ext.data.tokenized.ranks import Ranks, together
from verl_ext.data.tokenized.units import UnitRows
from verl_ext.options import must
from verl_ext.packing import PackPlan, Spans
from verl_ext.packing.plan import Ints, index_type
from verl_ext.packing.shared import NOTHING, SharedBeginnings


class Grouping:
    """Each document alone; what it declares, others change.

    reads_tokens: whether the wholes are known only when tokens have been read.
    """

    reads_tokens = False

    def __init__(self, documents: DocumentRows, packing: SFTOptions) -> None:
        self._documents, self._packing, self._data = documents, packing, documents.source

    @cached_property
    def spans(self) -> Spans:
        """The documents in packs, cut to the budget."""
        return self._documents.cut(self._packing.max_tokens, self._packing.over_length)

    @property
    def over_length(self) -> OverLength:
        """The documents that are cut or left out, whose tokens are read for the report."""
        return self._documents.over_length(self._packing.max_tokens, self._packing.over_length)

    def shared(self, ranks: Ranks | None) -> SharedBeginnings:
        """Return the wholes that begin alike; collective, unless `ranks` is None."""
        return NOTHING

    def wholes(self) -> Spans:
        """Return what is drawn, ordered and packed whole."""
        return self.spans

    def order(self, seed: int) -> NDArray[np.integer]:
        """Return the wholes in the order of shuffled documents, that of `datasets.Dataset.shuffle(seed)`."""
        place = np.arange(len(self._data.lengths))
        rows = place[self._documents.in_use]
        place[rows[np.random.default_rng(seed).permutation(len(rows))]] = np.arange(len(rows))
        return np.argsort(place[self.spans.row], kind="stable").astype(index_type(len(self.spans)))

    def expand(self, plan: PackPlan) -> PackPlan:
        """Return the packs of documents for packs of wholes."""
        return plan


class Shared(Grouping):
    """Documents that begin with the same tokens together, as far as packs have room."""

    @override
    def shared(self, ranks: Ranks | None) -> SharedBeginnings:
        return beginnings_of_ranks(self._data, self.spans, self._packing.share_least, ranks)


class PreferenceGrouping(Grouping):
    """The documents of a preference together; another document is a whole by itself."""

    def __init__(self, documents: DocumentRows, all_units: UnitRows, packing: SFTOptions) -> None:
        super().__init__(documents, packing)
        self._all, self.reads_tokens = all_units, packing.share_prefixes

    @property
    @override
    def over_length(self) -> OverLength:
        return OverLength(np.zeros(0, np.int64), self._packing.max_tokens, "drop")  # long units are not read

    @together
    def begins(self, ranks: Ranks | None) -> Ints:
        """Return int64[N], the tokens of each row that are not computed again."""
        if not self._packing.share_prefixes:
            return np.zeros(len(self._data.lengths), np.int64)
        return np.maximum(unit_beginnings(self._data, self._all, self._packing.share_least, ranks) - 1, 0)

    @cached_property
    def tokens(self) -> Ints:
        """int64[U]: the tokens of each unit that are computed."""
        return np.add.reduceat(self._data.lengths - self.begins(), self._all.starts[:-1])

    @cached_property
    def units(self) -> Ints:
        """The units in packs, ascending."""
        packing, key = self._packing, self._data.key
        tokens = self.tokens[: int(np.searchsorted(self._all.starts, len(self._documents.lengths)))]
        fitting = self._all.fitting(tokens, packing.max_tokens, packing.over_length, key)
        if not (has_tokens := tokens[fitting] > 0).any():
            got = f"{packing.max_tokens}, and data.over_length={packing.over_length} leaves none"
            raise ValueError(must("data.max_tokens", f"hold at least one unit of {key}", got))
        return fitting[has_tokens]

    @cached_property
    @override
    def spans(self) -> Spans:
        starts, sizes = self._all.starts[self.units], self._all.sizes[self.units]
        rows = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
        return Spans(rows, np.zeros(len(rows), np.int64), self._data.lengths[rows].astype(np.int32))

    @override
    def shared(self, ranks: Ranks | None) -> SharedBeginnings:
        self.begins(ranks)  # no unit shares tokens with another
        return NOTHING

    @override
    def wholes(self) -> Spans:
        tokens = self.tokens[self.units].astype(np.int32)
        return Spans(self._all.starts[self.units], np.zeros(len(tokens), np.int64), tokens)

    @override
    def order(self, seed: int) -> NDArray[np.integer]:
        count = len(self.units)
        return np.random.default_rng(seed).permutation(count).astype(index_type(count))

    @override
    def expand(self, plan: PackPlan) -> PackPlan:
        sizes = self._all.sizes[self.units]
        begins = self.begins()[self.spans.row] if self._packing.share_prefixes else None
        return plan.expanded((np.cumsum(sizes) - sizes, sizes), begins)


def grouped(documents: DocumentRows, packing: SFTOptions) -> Grouping:
    """Return the grouping of documents that `data.share_prefixes` asks for."""
    return (Shared if packing.share_prefixes else Grouping)(documents, packing)
