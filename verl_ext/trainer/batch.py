"""A rank's packs of a step as flat tensors with loss coefficients.

```
packs            |  doc A  | doc B |      doc C      | idle |
input_ids        a0 a1 a2   b0 b1    c0 c1 c2 c3       0
position_ids      0  1  2    0  1     0  1  2  3       0
coefficients      0  x  0    y  0     0  0  z  0       0       a of the token that each position predicts
is_real           1  1  1    1  1     1  1  1  1       0       also 0 in padding
pack_lengths            5                4             1
```

If a pack's last token is only a label (`PackDataset.last_is_label`), it is dropped here and `next_ids` keeps it:

```
pack             a0 a1 a2 | b0 b1        input_ids  a0 a1 a2 b0        next_ids  a1 a2 b0 b1
```

verl's engine calls the loss function ``fn(model_output, data, dp_group)`` for every micro-batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode

from verl_ext.data import CategoryTable
from verl_ext.losses import TOKEN_STATS, LossSpec, pack_coefficients, shift_left
from verl_ext.metrics import StepSums
from verl_ext.trainer.hang import watch

Pack = Mapping[str, torch.Tensor]

# Keys that verl's engine reads from every batch.
_ENGINE_FLAGS = {"use_remove_padding": True, "pad_mode": DatasetPadMode.NO_PADDING, "temperature": 1.0}


@dataclass
class StepBatch:
    """A rank's share of one step, N tokens in all packs.

    Attributes:
        input_ids, position_ids: int64[N].
        coefficients: float32[N], a_t before normalization, of the token that each position predicts.
        category_index: int64[N], the dense category of that token; 0 for a target without a category, -1 for no target.
        is_real: bool[N], False for padding and idle tokens.
        pack_lengths: the number of tokens in each pack slot, including idle slots.
        counts: float64[4 + C + 1]: normaliser, tokens, target tokens, packs, target tokens by category slot.
        next_ids: int64[N], the token after each position if it is not always the next of input_ids; else None.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    coefficients: torch.Tensor
    category_index: torch.Tensor
    is_real: torch.Tensor
    pack_lengths: list[int]
    counts: torch.Tensor
    next_ids: torch.Tensor | None = None

    @property
    def categories(self) -> int:
        """C, the number of categories."""
        return len(self.counts) - 5

    @property
    def normaliser(self) -> torch.Tensor:
        """float64[1]: this rank's term of Z."""
        return self.counts[:1]

    def pin_memory(self) -> "StepBatch":
        """Return a copy in pinned memory, as torch's loader asks."""
        names = (*_COLUMNS, "counts", *(["next_ids"] if self.next_ids is not None else []))
        return replace(self, **{name: getattr(self, name).pin_memory() for name in names})

    def micro_batches(self, size: int, **flags: Any) -> Iterator[TensorDict]:
        """Cut the step into verl's jagged micro-batches of ``size`` packs, with flags."""
        edges = np.concatenate([[0], np.cumsum(self.pack_lengths)])
        columns = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "loss_coefficients": self.coefficients,
            "category_index": self.category_index,
            "is_real": self.is_real,
        }
        if self.next_ids is not None:
            columns["next_ids"] = self.next_ids
        for first in range(0, len(self.pack_lengths), size):
            cuts = edges[first : first + size + 1]
            offsets = torch.from_numpy(cuts - cuts[0])
            tensors: dict[str, Any] = {
                key: torch.nested.nested_tensor_from_jagged(values[cuts[0] : cuts[-1]], offsets)
                for key, values in columns.items()
            }
            yield tu.get_tensordict(tensors, {**_ENGINE_FLAGS, **flags})


_COLUMNS = ("input_ids", "position_ids", "coefficients", "category_index", "is_real")


@dataclass(frozen=True)
class StepCollator:
    """A collator in the loader's workers: packs to a :class:`StepBatch`.

    Attributes:
        loss: the configured loss.
        categories: the fixed category table of the dataset.
        idle_tokens: the number of tokens that an idle rank runs.
        last_is_label: whether a pack's last token is only predicted.
    """

    loss: LossSpec
    categories: CategoryTable
    idle_tokens: int = 1
    last_is_label: bool = False

    def __post_init__(self) -> None:
        assert len(self.loss.category_weights) == len(self.categories.ids) + 1, (
            "a weight for each category and for none"
        )

    def __call__(self, packs: Sequence[Pack | None]) -> StepBatch:
        """Collate packs from a `PackDataset`; None stands for an idle rank."""
        slots = len(self.categories.ids) + 1
        counts = np.zeros(4 + slots)
        columns: list[tuple[np.ndarray, ...]] = []
        for pack in packs:
            columns.append(self._idle() if pack is None else self._laid_out(pack, counts))
        flat = (parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*columns, strict=True))
        return StepBatch(
            **dict(zip(self._names, map(torch.from_numpy, flat), strict=True)),
            pack_lengths=[len(column[0]) for column in columns],
            counts=torch.from_numpy(counts),
        )

    @property
    def _names(self) -> tuple[str, ...]:
        return (*_COLUMNS, "next_ids") if self.last_is_label else _COLUMNS

    def _laid_out(self, pack: Pack, counts: np.ndarray) -> tuple[np.ndarray, ...]:
        """Lay out a pack's columns; add its tokens and targets to ``counts``."""
        columns = {key: value.numpy() for key, value in pack.items()}
        ids, mask = columns["input_ids"], columns.get("attention_mask")
        offsets = np.append(np.flatnonzero(columns["position_ids"] == 0), len(ids))
        tokens = len(ids) if mask is None else int(mask.sum())
        documents = int((offsets[:-1] < tokens).sum())  # without the padding, which is one last pseudo-document
        category = self.categories.index(columns["category_ids"]) * columns["loss_mask"]
        share = pack_coefficients(
            self.loss, columns["loss_mask"], category, offsets, columns.get("loss_weight"), documents
        )
        targets = int(columns["loss_mask"].sum())
        by_category = np.bincount(category, minlength=len(counts) - 4)
        by_category[0] = targets - by_category[1:].sum()  # without the tokens that are not targets
        counts[:4] += share.normaliser, tokens - self.last_is_label, targets, 1
        counts[4:] += by_category
        laid_out = (
            ids,
            columns["position_ids"],
            shift_left(share.coefficients.astype(np.float32), offsets),
            shift_left(np.where(columns["loss_mask"] == 1, category + 1, 0), offsets) - 1,
            np.arange(len(ids)) < tokens,
        )
        return (*(column[:-1] for column in laid_out), ids[1:]) if self.last_is_label else laid_out

    def _idle(self) -> tuple[np.ndarray, ...]:
        """Make an idle rank's tokens, which only let others' collectives complete."""
        zeros = np.zeros(self.idle_tokens, dtype=np.int64)
        positions = np.maximum(np.arange(self.idle_tokens) - 1, 0)
        return (zeros, positions, zeros.astype(np.float32), zeros - 1, zeros > 0, zeros)[: len(self._names)]


class StepLoss:
    """The loss of a step, Σ a_t·ℓ_t / Z, by micro-batches.

    The engine averages gradients over data-parallel ranks, so each share is multiplied by their number; verl's gather
    over sequence-parallel ranks already balances its own group. Nothing here waits for the device.

    Args:
        normaliser: Z of the global step, above 0.
        data_parallel_size: the number of ranks whose shares add up to the loss.
        sums: collects the weighted and category losses; None for steps that are not logged.
        kept: receives each micro-batch's ℓ_t, float32[T] on the device; None: ℓ_t is not kept.
    """

    def __init__(
        self,
        normaliser: float,
        data_parallel_size: int,
        sums: StepSums | None,
        kept: list[torch.Tensor] | None = None,
    ) -> None:
        assert normaliser > 0, "a step without a weighted target is skipped, not divided by 0"
        self.scale = data_parallel_size / normaliser
        self.sums, self.kept = sums, kept

    def __call__(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict]:
        """Return the micro-batch's share of the loss, a scalar, and empty metrics.

        The gradient of a non-finite share is NaN, so the gradient norm, which all ranks share, makes every rank skip
        the step, even if only the loss is infinite.
        """
        watch.mark()
        coefficients = data["loss_coefficients"].values()  # float32[T], for the token that position t predicts
        nll = -model_output["log_probs"].values()  # float32[T]
        if "loss_terms" in model_output:  # from a fused head
            terms = model_output["loss_terms"].values()
        else:  # the infinite nll of a token that is not a target must not become NaN by a product with 0
            terms = torch.where(coefficients != 0, coefficients * nll, torch.zeros_like(nll))
        if self.kept is not None:
            self.kept.append(nll.detach())
        if self.sums is not None:
            self.sums.weighted_loss.add_(terms.detach().double().sum())
            category = data["category_index"].values()
            is_target, slots = category >= 0, category.clamp(min=0)
            self.sums.category_loss.index_add_(0, slots, torch.where(is_target, nll.detach().double(), 0.0))
            if "entropy" in model_output:
                self.sums.add_token_stats(slots, is_target, *(model_output[name].values() for name in TOKEN_STATS))
        share = terms.sum() * self.scale
        return share * torch.where(share.detach().isfinite(), 1.0, torch.nan), {}
