"""ChosenDataSet: the preferred answers of preferences, as documents of supervised fine-tuning.

row      0 chosen   1 rejected   2 chosen   3 rejected   4 a document
packs    0          2                       4
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from verl_ext.data.arrow import TokenizedData
from verl_ext.data.dataset import DocumentSource
from verl_ext.data.omitted import OmittedDocuments
from verl_ext.data.options import DatasetOptions
from verl_ext.data.sft import SFTDataSet, SFTOptions


@dataclass(frozen=True)
class ChosenOptions(SFTOptions):
    """The options by which preferred answers become packs."""

    no_mixture: ClassVar[str] = "with data=chosen, which leaves rows out"


class ChosenDataSet(SFTDataSet):
    """A dataset of preferred answers, and of documents that are none."""

    Options: ClassVar[type[DatasetOptions]] = ChosenOptions
    _data: TokenizedData

    @override
    def _open(self, paths: Sequence[str], tokenizer: Any, key: str) -> tuple[DocumentSource, NDArray[np.int64] | None]:
        data = TokenizedData(paths, key, with_answers=True)
        if data.units is None:
            needed = "the answers of preferences, as `verl-ext tokenize` writes them of chosen and rejected"
            raise ValueError(f"{key} must hold {needed}; got documents alone in {', '.join(data.folders)}: data=packed")
        rows = np.flatnonzero(data.units.answer >= 0)
        if not len(rows):
            raise ValueError(f"{key} must hold a preferred answer with data=chosen; got rejected ones alone")
        return data, rows

    @cached_property
    def _weights(self) -> NDArray[np.float64] | None:
        """The weight of each row's unit, float64[N]; None if all are 1."""
        units = self._data.units
        assert units is not None, "it was opened with them"
        return None if (units.weight == 1).all() else np.repeat(units.weight, units.sizes)

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Return a pack, its loss_weight multiplied by those of the units."""
        item = super().__getitem__(pack)
        if self._weights is not None:
            documents = self.plan.documents(range(len(self))[pack])
            weights = np.repeat(self._weights[self.spans.row[documents]], self.spans.length[documents])
            given = item.setdefault("loss_weight", torch.ones(len(item["loss_mask"])))
            given[: len(weights)] *= torch.from_numpy(weights)
        return item

    @override
    def omitted_documents(self) -> list[OmittedDocuments]:
        assert self._data.units is not None, "it was opened with them"
        rejected = np.flatnonzero(self._data.units.answer < 0)
        whole = replace(self._omitted, total=int(self._data.lengths.sum(dtype=np.int64)))
        left_out = whole.by_category("rejected answer", rejected, self._data.lengths[rejected])
        if (columns := self._data.document_columns) is not None:
            for row, number in zip(left_out, np.unique(columns.category[rejected]), strict=True):
                of_category = rejected[columns.category[rejected] == number]
                row.targets_removed = int(columns.num_targets[of_category].sum(dtype=np.int64))
        return [*left_out, *super().omitted_documents()]
