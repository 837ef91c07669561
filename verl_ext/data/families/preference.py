"""PreferenceDataSet: the answers to one prompt in one pack, one after the other.

    row        0 chosen   1 rejected | 2 a document | 3 chosen   4 rejected   5 rejected
    units      0                       1              2
    pack       3 4 5 2                                each unit whole; any other document is its own unit

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
from verl_ext.data.packs.documents import DocumentRows
from verl_ext.data.packs.grouping import PreferenceGrouping
from verl_ext.data.packs.omitted import OmittedDocuments
from verl_ext.data.packs.options import DatasetOptions
from verl_ext.data.packs.packed import PackedDataset
from verl_ext.data.packs.packs import Packs
from verl_ext.data.packs.sft_options import SFTOptions
from verl_ext.data.tokenized.arrow import TokenizedData
from verl_ext.data.tokenized.reports import unused_fields
from verl_ext.data.tokenized.units import OVER_LENGTH_OF_UNITS, UnitRows
from verl_ext.options import must, option
from verl_ext.packing import STRATEGIES


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
            yield must("data.pad_mode", "be no_padding with data=preference", self.pad_mode)
        yield from super().problems()


class PreferenceDataSet(PackedDataset):
    """A dataset of packs of whole units, with facts of answers.

    reference: float64[N] by row, the sums of the reference model; None: not known or not needed.
    mismatched_reference: float64[P], the sum of those of each pack's mismatched answers (verl_ext.trainer.mismatched).
    """

    Options: ClassVar[type[DatasetOptions]] = PairOptions
    has_units: ClassVar[bool] = True
    reference: NDArray[np.float64] | None = None
    mismatched_reference: NDArray[np.float64] | None = None

    @override
    def opened(self, paths: Sequence[str], tokenizer: Any, most: int | None) -> Packs:
        options = self.options
        data = TokenizedData(options.all_folders(paths), self.key, with_answers=True)
        if data.units is None or not data.units.answer.any():
            needed = "the answers of preferences, which `verl-ext tokenize` makes of chosen and rejected, or of kto_tag"
            labelled = "label" in unused_fields(data.folders)
            hint = "its records have a label, which columns={kto_tag: label} reads" if labelled else "loss=token"
            got = f"documents alone in {', '.join(data.folders)}: {hint}"
            raise ValueError(must(self.key, f"hold {needed}", got))
        self.units: UnitRows = data.units  # of all rows
        rows = None if most is None else int(self.units.starts[: most + 1][-1])
        documents = DocumentRows(data, most=rows, names=options.given_names)
        self.answers = PreferenceGrouping(documents, self.units, options)
        return Packs(documents, self.answers, options, paths)

    @property
    def num_pairs(self) -> int:
        """The pairs in the packs, each once."""
        return int(np.isin(self.units.pairs[1], self.spans.row).sum())

    @property
    def num_alone(self) -> int:
        """The answers with a label alone in the packs, each once."""
        units = self.answers.units
        return int((self.units.answer[self.units.starts[units]][self.units.sizes[units] == 1] != 0).sum())

    @property
    def packs_of_several(self) -> int:
        """The packs with the answers of at least two units."""
        units = self.units
        is_first = np.zeros(len(units.answer), np.int64)
        is_first[units.starts[:-1]] = units.answer[units.starts[:-1]] != 0  # a unit of answers begins with one
        return int((self.plan().pack_sums(is_first[self.spans.row]) > 1).sum())

    def rows_of(self, pack: int) -> NDArray[np.int64]:
        """Return the rows of a pack's documents, in its order."""
        return self.spans.row[self.packs.members(pack)]

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Return a pack, and the columns of its documents."""
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
        raise ValueError(must("data", "be packed outside of verl-ext's own trainer", "preference"))

    @override
    def omitted_documents(self) -> list[OmittedDocuments]:
        """Return the documents that are in no pack, including those of units that are too long."""
        documents = self.packs.documents
        lengths = documents.source.lengths
        dropped = np.setdiff1d(np.flatnonzero(documents.lengths), self.spans.row, assume_unique=True)
        return [*documents.by_category("drop", dropped, lengths[dropped]), *super().omitted_documents()]

    @override
    def report(self) -> dict[str, Any]:
        facts = {"units": len(self.answers.units), "pairs": self.num_pairs, "labels": self.num_alone}
        no_answers = self.units.answer[self.spans.row] == 0
        return {**super().report(), **facts, "documents_alone": int(no_answers.sum())}

    @cached_property
    def digest(self) -> str:
        """A digest of the documents, their units, sides and weights."""
        rows, units = self.spans.row, self.units
        facts = (units.starts, units.answer[rows].astype(np.int64), units.weight)
        return fingerprint(super().digest, iter(facts), digits=16)
