"""The texts of one pack, and what a loss makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_ext.data import CategoryTable
from verl_ext.options import must
from verl_ext.packing.plan import offsets_of
from verl_ext.parallel.trees import PackDocuments, read_documents

Pack = Mapping[str, torch.Tensor]
Columns = Mapping[str, NDArray[Any]]  # by name, of equal lengths


@dataclass(frozen=True)
class PackTexts:
    """The whole texts of a pack's documents, S tokens together.

    Attributes:
        columns: those of the pack; loss_mask, category_ids and loss_weight are [S].
        documents: their own tokens.
        offsets: int64[D + 1], of the texts; padding is a last pseudo-document.
        real: the number of documents without the padding.
        padding: the number of tokens of padding.
        category: int64[S], the dense category of each target, 0 for other tokens.
    """

    columns: Columns
    documents: PackDocuments
    offsets: NDArray[np.int64]
    real: int
    padding: int
    category: NDArray[np.int64]

    @classmethod
    def read(cls, pack: Pack, categories: CategoryTable, shares_prefixes: bool) -> "PackTexts":
        """Read a pack of a `PackDataset`; raise ValueError for unexpected positions."""
        columns = {key: value.numpy() for key, value in pack.items()}
        mask, documents = columns.get("attention_mask"), read_documents(columns["position_ids"])
        if not shares_prefixes and documents.begins.any():
            needed = "give packs whose position_ids restart at 0 in every document, unless its facts() have `shared`"
            raise ValueError(must("data.custom_cls.name", needed, documents.begins[documents.begins > 0][0]))
        padding = 0 if mask is None else len(mask) - int(mask.sum())
        offsets = offsets_of(documents.lengths + documents.begins)
        real = int((offsets[:-1] < offsets[-1] - padding).sum())
        category = categories.index(columns["category_ids"]) * columns["loss_mask"]
        return cls(columns, documents, offsets, real, padding, category)

    @property
    def is_target(self) -> NDArray[np.int64]:
        """int64[S]: 1 for a target."""
        return self.columns["loss_mask"]


@dataclass(frozen=True)
class LossColumns:
    """What a loss makes of the texts of a pack, S tokens of D documents.

    Attributes:
        tokens: columns of the tokens, [S] each, which the list of targets gets.
        normalisers: the pack's part of Z of each term.
        is_counted: int64[S], 1 for the targets of the categories' means.
        documents: columns of the documents, [D] each; none if the loss needs no more than targets.
    """

    tokens: Columns
    normalisers: Sequence[float]
    is_counted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    documents: Columns = field(default_factory=dict)
