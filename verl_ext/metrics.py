"""The numbers of a step: summed by each rank, and reduced over data-parallel ranks once, when they are read.

Category loss is the plain mean of ℓ_t over a category's target tokens of the global step (or of the whole validation
set), whatever the loss mode and weights: sums in float64, counts whole numbers below 2^53, so exact in the float64 that
travels. Every rank holds one slot for every category of a fixed table, so no rank waits for a key that another lacks.

Legend: C categories; slot 0 is "no category" and is never reported.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

RESERVED = ("target",)  # names that a category must not have: `<category>_tokens` would be another metric
VALIDATION = "val"  # the prefix of the metrics that have perplexities too
_SCALARS = ("weighted_loss", "normaliser", "tokens", "target_tokens", "packs")


@dataclass
class StepSums:
    """One rank's sums of a step (or of its share of the validation set).

    Attributes:
        values: float64[5 + 2·(C + 1)] on the engine's device: weighted_loss, normaliser, tokens, target_tokens, packs,
            then the loss sum and the token count of each category slot.
    """

    values: torch.Tensor
    slots: int

    @classmethod
    def zeros(cls, categories: int, device: torch.device | str) -> "StepSums":
        """Return the sums of no document; ``categories`` is C."""
        slots = categories + 1
        return cls(torch.zeros(len(_SCALARS) + 2 * slots, dtype=torch.float64, device=device), slots)

    @property
    def weighted_loss(self) -> torch.Tensor:
        """Σ a_t·ℓ_t, a view of one element."""
        return self.values[0:1]

    @property
    def category_loss(self) -> torch.Tensor:
        """Σ ℓ_t over the targets of each category slot, a view of C + 1 elements; slot 0 are those of no category."""
        return self.values[len(_SCALARS) : len(_SCALARS) + self.slots]

    @property
    def loss(self) -> float:
        """Σ a_t·ℓ_t / Z, NaN if Z is 0; reads the device."""
        weighted, normaliser = self.values[:2].tolist()
        return weighted / normaliser if normaliser else math.nan

    def add_counts(self, counts: torch.Tensor) -> None:
        """Add host-side ``float64[4 + C + 1]``: normaliser, tokens, target_tokens, packs, tokens by category slot."""
        counts = counts.to(self.values.device, non_blocking=True)
        self.values[1 : len(_SCALARS)] += counts[: len(_SCALARS) - 1]
        self.values[len(_SCALARS) + self.slots :] += counts[len(_SCALARS) - 1 :]

    def reduced(self, all_reduce: Callable[[torch.Tensor], None]) -> "StepSums":
        """Return the sums over all data-parallel ranks, in one reduction."""
        values = self.values.clone()
        all_reduce(values)
        return StepSums(values, self.slots)

    def report(self, prefix: str, names: tuple[str, ...]) -> dict[str, float]:
        """Return metrics by name; reads the device once.

        A category without a target token here has no mean: its loss is left out, its count is 0. Of a validation set
        ``perplexity`` is exp of the plain mean of ℓ_t over all targets, whatever the loss mode, and each category's
        of its loss; inf if that is past float64.
        """
        values = self.values.tolist()
        weighted_loss, normaliser, tokens, target_tokens, packs = values[: len(_SCALARS)]
        sums, counts = values[len(_SCALARS) :][: self.slots], values[len(_SCALARS) + self.slots :]
        metrics = {
            f"{prefix}/loss": weighted_loss / normaliser if normaliser else float("nan"),
            f"{prefix}/tokens": int(tokens),
            f"{prefix}/target_tokens": int(target_tokens),
            f"{prefix}/packs": int(packs),
        }
        for name, loss, count in zip(names, sums[1:], counts[1:], strict=True):
            if count:
                metrics[f"{prefix}/{name}_loss"] = loss / count
            if count and prefix == VALIDATION:
                metrics[f"{prefix}/{name}_perplexity"] = perplexity(loss, count)
            metrics[f"{prefix}/{name}_tokens"] = int(count)
        if prefix == VALIDATION:
            metrics[f"{prefix}/perplexity"] = perplexity(sum(sums), sum(counts))
        return metrics


def perplexity(loss: float, count: float) -> float:
    """exp(Σ ℓ_t / count): inf past float64, NaN for a count of 0."""
    try:
        return math.exp(loss / count) if count else math.nan
    except OverflowError:
        return math.inf
