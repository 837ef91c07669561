"""PreferenceDataSet: the answers to one prompt in one pack, one after the other.

    row        0 chosen   1 rejected | 2 a document | 3 chosen   4 rejected   5 rejected
    units      0                       1              2
    pack       3 4 5 2                                each unit whole; a document that is no answer is one of its own

A pack has further columns, with a number for each of its documents:

    unit         3  0  0  1        the documents of a unit, on its first
    answer       1 -1 -1  0        1 preferred or desirable, -1 rejected or undesirable, 0 no answer
    pair_weight  of the unit       float64
    reference    Σ s_t·log π       of the reference model, float64, if `reference` was given
    mismatched_reference           of kto's mismatched answers, one number a pack, if it was given

With data.share_prefixes, an answer that begins with tokens of the one before has only its own, as in SFTDataSet.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from verl_ext.cache import fingerprint
from verl_ext.data.arrow import TokenizedData
from verl_ext.data.beginnings import FORMAT, row_reader
from verl_ext.data.dataset import DocumentSource
from verl_ext.data.facts import scan_documents
from verl_ext.data.omitted import OmittedDocuments, OverLength
from verl_ext.data.options import DatasetOptions
from verl_ext.data.ranks import Ranks, arrays_of_rank0
from verl_ext.data.sft import Rows, SFTDataSet
from verl_ext.data.sft_options import SFTOptions
from verl_ext.data.units import OVER_LENGTH_OF_UNITS, UnitRows
from verl_ext.files import file_state
from verl_ext.options import option
from verl_ext.packing import STRATEGIES, PackPlan, Spans
from verl_ext.packing.plan import Ints, index_type
from verl_ext.packing.shared import NOTHING, SharedBeginnings, shared_with_before


@dataclass(frozen=True)
class PairOptions(SFTOptions):
    """The options by which preferences become packs."""

    over_length: str = option(
        "error",
        "treatment of units (a prompt's answers) longer than max_tokens; an answer is never cut",
        choices=OVER_LENGTH_OF_UNITS,
        resume="same",
    )
    share_prefixes: bool | None = option(  # type: ignore[assignment]
        None,
        "true: tokens with which the answers of a prompt begin are computed once; null: where the model allows it",
        resume="same",
    )

    sharing_strategies: ClassVar[Iterable[str]] = tuple(STRATEGIES)  # a unit's documents follow each other in any order

    @override
    def problems(self) -> Iterable[str | None]:
        if self.pad_mode != "no_padding":
            yield f"data.pad_mode must be no_padding with data=preference; got {self.pad_mode}"
        yield from super().problems()


class PreferenceDataSet(SFTDataSet):
    """A dataset of packs of whole units, with facts of answers.

    reference: float64[N] by row, the sums of the reference model; None: not known or not needed.
    mismatched_reference: float64[P], the sum of those of each pack's mismatched answers (verl_ext.trainer.mismatched).
    """

    Options: ClassVar[type[DatasetOptions]] = PairOptions
    has_units: ClassVar[bool] = True
    reference: NDArray[np.float64] | None = None
    mismatched_reference: NDArray[np.float64] | None = None
    _data: TokenizedData

    @override
    def _open(self, paths: Sequence[str], tokenizer: Any, key: str) -> tuple[DocumentSource, NDArray[np.int64] | None]:
        data = TokenizedData(paths, key, with_answers=True)
        if data.units is None or not data.units.answer.any():
            needed = "the answers of preferences, as `verl-ext tokenize` writes them of chosen and rejected"
            raise ValueError(f"{key} must hold {needed}; got documents alone in {', '.join(data.folders)}: loss=token")
        return data, None

    @property
    def units(self) -> UnitRows:
        """The units of all rows."""
        assert self._data.units is not None, "it was opened with them"
        return self._data.units

    @override
    def _plan_ahead(self) -> None:
        if not self.options.packing.share_prefixes:  # else only the tokens show which units fit a pack
            super()._plan_ahead()

    @override
    def _first_samples(self, count: int) -> Rows:
        return slice(int(self.units.starts[: count + 1][-1]))

    @cached_property
    def _shared(self) -> Ints:
        """int64[N]: the tokens that each row has in common with the one before it in its unit."""
        shared = np.zeros(len(self._data.lengths), np.int64)
        if self.options.packing.share_prefixes:
            rows = np.setdiff1d(np.arange(len(shared)), self.units.starts[:-1], assume_unique=True)
            shared[rows] = shared_with_before(rows, self._data.lengths, row_reader(self._data))
        return np.where(shared < self.options.packing.share_least, 0, shared)

    @cached_property
    def _begins(self) -> Ints:
        """int64[N]: the tokens of each row that are not computed again."""
        return np.maximum(self._shared - 1, 0)

    @cached_property
    def _tokens(self) -> Ints:
        """int64[U]: the tokens of each unit that are computed."""
        return np.add.reduceat(self._data.lengths - self._begins, self.units.starts[:-1])

    @cached_property
    def _kept(self) -> Ints:
        """The units in the packs, ascending."""
        used = int(np.searchsorted(self.units.starts, len(self._data.lengths[self._in_use])))
        tokens, policy = self._tokens[:used], self.options.packing.over_length
        kept = self.units.fitting(tokens, self.max_tokens, policy, self.key)
        if not (has_tokens := tokens[kept] > 0).any():
            got = f"got {self.max_tokens}, and data.over_length={policy} leaves none"
            raise ValueError(f"data.max_tokens must hold at least one unit of {self.key}; {got}")
        return kept[has_tokens]

    @cached_property
    @override
    def spans(self) -> Spans:
        starts, sizes = self.units.starts[self._kept], self.units.sizes[self._kept]
        rows = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
        return Spans(rows, np.zeros(len(rows), np.int64), self._data.lengths[rows].astype(np.int32))

    @property
    @override
    def _wholes(self) -> Spans:
        tokens = self._tokens[self._kept].astype(np.int32)
        return Spans(self.units.starts[self._kept], np.zeros(len(tokens), np.int64), tokens)

    @override
    def _document_order(self) -> NDArray[np.integer]:
        units = len(self._kept)
        return np.random.default_rng(self.options.packing.seed).permutation(units).astype(index_type(units))

    @override
    def _planned(self, kin: SharedBeginnings) -> PackPlan:
        sizes = self.units.sizes[self._kept]
        begins = self._begins[self.spans.row] if self.options.packing.share_prefixes else None
        return super()._planned(NOTHING).expanded((np.cumsum(sizes) - sizes, sizes), begins)

    @override
    def read_together(self, ranks: Ranks) -> None:
        if self.options.packing.share_prefixes:

            def name() -> str:
                files = [file_state(file.path) for file in self._data.files]
                return f"units-{fingerprint([FORMAT, self.options.packing.share_least, files])}"

            self._shared = arrays_of_rank0(ranks, name, lambda: {"shared": self._shared})["shared"]
        with ranks.guard():
            self.plan = self._planned(NOTHING)
        self.scan = scan_documents(self._data, self.spans, self._over_length, ranks, keep=True)

    @property
    @override
    def _over_length(self) -> OverLength:
        return OverLength(np.zeros(0, np.int64), self.max_tokens, "drop")  # units are left out before they are read

    @property
    def num_pairs(self) -> int:
        """The pairs in the packs, each once."""
        return int(np.isin(self.units.pairs[1], self.spans.row).sum())

    @property
    def num_alone(self) -> int:
        """The answers with a label alone in the packs, each once."""
        units = self._kept
        return int((self.units.answer[self.units.starts[units]][self.units.sizes[units] == 1] != 0).sum())

    @property
    def packs_of_several(self) -> int:
        """The packs with the answers of at least two units."""
        units = self.units
        is_first = np.zeros(len(units.answer), np.int64)
        is_first[units.starts[:-1]] = units.answer[units.starts[:-1]] != 0  # a unit of answers begins with one
        return int((self.plan.pack_sums(is_first[self.spans.row]) > 1).sum())

    def rows_of(self, pack: int) -> NDArray[np.int64]:
        """Return the rows of a pack's documents, in its order."""
        return self.spans.row[self.plan.documents(range(len(self))[pack])]

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Return a pack as SFTDataSet does, and the columns of its documents."""
        rows, units = self.rows_of(pack), self.units
        number = np.searchsorted(units.starts, rows, side="right") - 1
        of_documents = {
            "unit": np.where(units.starts[number] == rows, units.sizes[number], 0),
            "answer": units.answer[rows].astype(np.int64),
            "pair_weight": units.weight[number],
        }
        if self.reference is not None:
            of_documents["reference"] = self.reference[rows]
        if self.mismatched_reference is not None:
            of_documents["mismatched_reference"] = self.mismatched_reference[pack : pack + 1]
        return super().__getitem__(pack) | {name: torch.from_numpy(values) for name, values in of_documents.items()}

    @override
    def collate_fn(self, items: Sequence[Mapping[str, torch.Tensor] | int]) -> dict[str, torch.Tensor]:
        raise ValueError("data must be packed outside of verl-ext's own trainer; got preference")

    def omitted_documents(self) -> list[OmittedDocuments]:
        """Return the documents that packs lack, those of long units among them."""
        in_use, lengths = len(self._data.lengths[self._in_use]), self._data.lengths
        dropped = np.setdiff1d(np.flatnonzero(lengths[:in_use]), self.spans.row, assume_unique=True)
        return [*self._omitted.by_category("drop", dropped, lengths[dropped]), *super().omitted_documents()]

    @override
    def report(self) -> dict[str, Any]:
        return {**super().report(), "units": len(self._kept), "pairs": self.num_pairs}

    @cached_property
    def digest(self) -> str:
        """A digest of the documents, their units, sides and weights."""
        rows, units = self.spans.row, self.units
        facts = (units.starts, units.answer[rows].astype(np.int64), units.weight)
        return fingerprint(super().digest, iter(facts), digits=16)
