"""ChosenDataSet: the preferred answers of preferences, as documents of supervised fine-tuning.

row      0 chosen   1 rejected   2 chosen   3 rejected   4 a document
packs    0          2                       4
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from verl_ext.data.packs.documents import DocumentRows
from verl_ext.data.packs.grouping import grouped
from verl_ext.data.packs.omitted import OmittedDocuments
from verl_ext.data.packs.options import DatasetOptions
from verl_ext.data.packs.packed import PackedDataset
from verl_ext.data.packs.packs import Packs
from verl_ext.data.packs.sft_options import SFTOptions
from verl_ext.data.tokenized.arrow import TokenizedData
from verl_ext.data.tokenized.units import UnitRows
from verl_ext.options import must


@dataclass(frozen=True)
class ChosenOptions(SFTOptions):
    """The options by which preferred answers become packs."""

    no_mixture: ClassVar[str] = "with data=chosen, which leaves rows out"


class ChosenDataSet(PackedDataset):
    """A dataset of preferred answers, and of documents that are not answers."""

    Options: ClassVar[type[DatasetOptions]] = ChosenOptions

    @override
    def opened(self, paths: Sequence[str], tokenizer: Any, most: int | None) -> Packs:
        data, key, options = TokenizedData(paths, self.key, with_answers=True), self.key, self.options
        if data.units is None:
            needed = "the answers of preferences, as `verl-ext tokenize` writes them of chosen and rejected"
            raise ValueError(must(key, f"hold {needed}", f"documents alone in {', '.join(data.folders)}: data=packed"))
        self._units: UnitRows = data.units
        rows = np.flatnonzero(data.units.answer >= 0)
        if not len(rows):
            raise ValueError(must(key, "hold a preferred answer with data=chosen", "rejected ones alone"))
        documents = DocumentRows(data, rows, most, options.given_names)
        return Packs(documents, grouped(documents, options), options)

    @cached_property
    def _weights(self) -> NDArray[np.float64] | None:
        """The weight of each row's unit, float64[N]; None if all are 1."""
        units = self._units
        return None if (units.weight == 1).all() else np.repeat(units.weight, units.sizes)

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Return a pack, its loss_weight multiplied by those of the units."""
        item = super().__getitem__(pack)
        if self._weights is not None:
            documents = self.packs.members(pack)
            weights = np.repeat(self._weights[self.spans.row[documents]], self.spans.length[documents])
            given = item.setdefault("loss_weight", torch.ones(len(item["loss_mask"])))
            given[: len(weights)] *= torch.from_numpy(weights)
        return item

    @override
    def omitted_documents(self) -> list[OmittedDocuments]:
        """Return also the rejected answers."""
        documents, lengths = self.packs.documents, self.packs.documents.source.lengths
        rejected, total = np.flatnonzero(self._units.answer < 0), int(lengths.sum(dtype=np.int64))
        left_out = documents.by_category("rejected answer", rejected, lengths[rejected], total=total)
        return [*left_out, *super().omitted_documents()]
