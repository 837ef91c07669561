"""The loss of a step by micro-batches.

verl's engine calls the loss function ``fn(model_output, data, dp_group)`` for every micro-batch.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from typing_extensions import override

from verl_ext.losses import TOKEN_STATS, row_coefficients
from verl_ext.metrics import StepSums
from verl_ext.trainer.hang import watch
from verl_ext.trainer.texts import Columns


@dataclass
class StepLoss:
    """The loss of a step, Σ a_t·ℓ_t / Z, by micro-batches.

    The engine averages gradients over data-parallel ranks, so each share is multiplied by their number; verl's gather
    over sequence-parallel ranks already balances its own group. Nothing here waits for the device.

    Attributes:
        normaliser: Z of the global step, above 0.
        data_parallel_size: the number of ranks whose shares add up to the loss.
        sums: collects the weighted and category losses; None for steps that are not logged.
        losses: receives each micro-batch's ℓ_t, float32[T] on the device; None: nobody reads them.
        answer_sums: where sums are collected, each micro-batch's Σ s_t·log π of every document, float64[A] on the
            device; none of losses of tokens.
    """

    normaliser: float
    data_parallel_size: int
    sums: StepSums | None = None
    losses: list[torch.Tensor] | None = None
    answer_sums: list[torch.Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        assert self.normaliser > 0, "a step without a weighted target is skipped, not divided by 0"

    def __call__(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict]:
        """Return the micro-batch's share of the loss, a scalar, and empty metrics.

        The gradient of a non-finite share is NaN, so the gradient norm, which all ranks share, makes every rank skip
        the step, even if only the loss is infinite.
        """
        watch.mark()
        nll = -model_output["log_probs"].values()  # float32[T]
        if "loss_terms" in model_output:  # from a fused head
            terms = model_output["loss_terms"].values()
        else:  # the infinite nll of a token that is not a target must not become NaN by a product with 0
            coefficients = self.coefficients(data, nll.detach())
            terms = torch.where(coefficients != 0, coefficients * nll, torch.zeros_like(nll))
        if self.losses is not None:
            self.losses.append(nll.detach())
        if self.sums is not None:
            stats = [model_output[name].values() for name in TOKEN_STATS if name in model_output]
            self.add_up(self.sums, data, terms.detach(), nll.detach(), stats)
        share = terms.sum() * (self.data_parallel_size / self.normaliser)
        return share * torch.where(share.detach().isfinite(), 1.0, torch.nan), {}

    def flags(self, documents: Columns) -> dict[str, Any]:
        """Return what a micro-batch of these documents carries beside its tensors."""
        return {}

    def coefficients(self, data: TensorDict, nll: torch.Tensor) -> torch.Tensor:
        """Return a_t, float32[T], for the token that position t predicts; nll float32[T]."""
        return row_coefficients(data["target_row"].values(), data["target_coefficient"].values(), len(nll))

    def add_up(
        self, sums: StepSums, data: TensorDict, terms: torch.Tensor, nll: torch.Tensor, stats: Sequence[torch.Tensor]
    ) -> None:
        """Add a micro-batch to the sums of the step; terms, nll and the stats are float32[T]."""
        sums.totals.add_(terms.double().sum())
        rows = data["target_row"].values()
        sums.add_targets(data["target_slot"].values(), *(column[rows] for column in (nll, *stats)))


class LossOfLosses(StepLoss):
    """A loss whose coefficients follow from the losses of its targets, which the head computes first."""

    @override
    def flags(self, documents: Columns) -> dict[str, Any]:
        return {"coefficients_of": self.of_rows}

    @override
    def coefficients(self, data: TensorDict, nll: torch.Tensor) -> torch.Tensor:
        return self.of_rows(data, nll)

    @abstractmethod
    def of_rows(
        self, data: TensorDict, nll: torch.Tensor, reduce: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Return float32[T] from the losses, 0 for other ranks' tokens; `reduce` adds up over a pack's ranks."""


class ProbabilityLoss(LossOfLosses):
    """Dynamic fine-tuning: Σ a_t·p_t·ℓ_t / Z (arXiv 2508.05629).

    p_t = exp(−ℓ_t) gets no gradient: targets it thinks unlikely move a model less. The head passes over its blocks
    twice, as p_t comes first.
    """

    @override
    def of_rows(
        self, data: TensorDict, nll: torch.Tensor, reduce: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        return StepLoss.coefficients(self, data, nll) * torch.exp(-nll)
