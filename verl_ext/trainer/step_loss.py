"""The loss function that verl's engine calls for every micro-batch: ``fn(model_output, data, dp_group)``."""

import torch
from tensordict import TensorDict

from verl_ext.metrics import StepSums


class StepLoss:
    """One step's loss: each micro-batch's share of Σ a_t·ℓ_t / Z, and the sums that are reported.

    The engine's gradients are averaged over data-parallel ranks, so each share is multiplied by their number; verl's
    gather over sequence-parallel ranks already balances its own group. Nothing here waits for the device.

    Args:
        normaliser: Z of the global step, above 0.
        data_parallel_size: ranks whose shares add up to the loss.
        sums: where weighted and category losses are collected; None on steps that are not logged.
    """

    def __init__(self, normaliser: float, data_parallel_size: int, sums: StepSums | None) -> None:
        assert normaliser > 0, "a step without a weighted target is skipped, not divided by 0"
        self.scale = data_parallel_size / normaliser
        self.sums = sums

    def __call__(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: object = None
    ) -> tuple[torch.Tensor, dict]:
        """The micro-batch's share of the loss, a scalar, and no metrics of its own."""
        coefficients = data["loss_coefficients"].values()  # float32[T], of the token that position t predicts
        nll = -model_output["log_probs"].values()  # float32[T]
        # Where nothing is predicted, an infinite nll must not become NaN by a product with 0.
        terms = torch.where(coefficients != 0, coefficients * nll, torch.zeros_like(nll))
        if self.sums is not None:
            self.sums.weighted_loss.add_(terms.detach().double().sum())
            category = data["category_index"].values()
            of_targets = torch.where(category >= 0, nll.detach().double(), 0.0)
            self.sums.category_loss.index_add_(0, category.clamp(min=0), of_targets)
        return terms.sum() * self.scale, {}
