"""PackDataset: what the trainer asks of a dataset, whatever its packs are made of."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_ext.data.categories import CategoryTable
from verl_ext.data.mixture_report import MixtureRow
from verl_ext.data.over_length_report import OverLengthRow
from verl_ext.packing import CostModel


class PackDataset(torch.utils.data.Dataset):
    """Item k is pack k as a dict of 1-D tensors of one length: input_ids, position_ids (from 0 in every document),
    loss_mask and category_ids int64, loss_weight float32 where there are weights. P packs, known before any is read.

    key: the config key that messages name for the data; max_tokens: the most tokens that a model reads of a pack.
    last_is_label: a pack's last token is only predicted, so that the model reads one token less than the pack has.
    needs_tokenizer: it reads text.
    is_ordered: the packs stand in the order of the whole run, which the trainer keeps; else an epoch visits each once.
    epochs: how often they hold the data together.
    """

    key: str
    max_tokens: int
    needs_tokenizer: bool = False
    last_is_label: bool = False
    is_ordered: bool = False
    epochs: float = 1.0
    mixture_report: Sequence[MixtureRow] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]: ...

    @property
    @abstractmethod
    def folders(self) -> tuple[str, ...]:
        """What is read, absolute."""

    @property
    @abstractmethod
    def categories(self) -> CategoryTable:
        """The categories of its targets."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """16 hex digits of the data that the packs hold."""

    @property
    @abstractmethod
    def token_range(self) -> tuple[int, int]:
        """The lowest and the highest token id."""

    @property
    @abstractmethod
    def longest_document(self) -> int:
        """Tokens of the longest document of a pack, as a model reads it: the positions that it needs."""

    @abstractmethod
    def pack_tokens(self) -> NDArray[np.int64]:
        """int64[P]: tokens that a model reads of each pack, without padding."""

    @abstractmethod
    def pack_costs(self, cost: CostModel) -> NDArray[np.float64]:
        """float64[P]: what each pack costs to run."""

    @abstractmethod
    def pack_documents(self) -> NDArray[np.int64]:
        """int64[P]: documents of each pack."""

    @abstractmethod
    def pack_targets(self) -> NDArray[np.int64]:
        """int64[P]: target tokens of each pack."""

    def plan_options(self) -> dict[str, Any]:
        """What else than its config's keys decides which pack has which tokens, by the words that tell it."""
        return {}

    def not_as_they_stand(self) -> list[OverLengthRow]:
        """Documents that are not trained on as they stand, by category and reason."""
        return []

    def facts(self) -> dict[str, Any]:
        """What else its report says."""
        return {}
