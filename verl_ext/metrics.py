"""Step metrics: each rank's sums, which are reduced once, when read.

The loss of a category is the plain mean of ℓ_t over its target tokens in the global step (or in the validation set), in
every loss mode and with any weights; so are its token accuracy and entropy. Sums are float64. Counts are whole numbers
below 2^53, which float64 also represents exactly. Every rank holds a slot for each category of a fixed table, so no
rank waits for a key that another rank lacks.

C is the number of categories. Slot 0 means "no category" and is never reported by itself. With LengthBins, each bin of
document lengths has C + 1 slots of its own: slot bin·(C + 1) + category.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

# A category must not have these names, because `<category>_tokens` would be another metric.
RESERVED = ("target", "total", "total_target")
VALIDATION = "val"  # the prefix of the metrics that include perplexities
_SCALARS = ("weighted_loss", "normaliser", "tokens", "computed_tokens", "target_tokens", "packs")


@dataclass(frozen=True)
class LengthBins:
    """The bins of document lengths between ascending edges, in tokens.

    Edges 8 and 16 make (0, 8], (8, 16] and (16, inf): 0_8, 8_16 and 16_inf. Without edges there is one bin, unnamed.
    """

    edges: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.edges) + 1

    def __bool__(self) -> bool:
        return bool(self.edges)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the bins; none without edges."""
        return tuple(f"{low}_{high}" for low, high in pairwise((0, *self.edges, "inf"))) if self.edges else ()

    def index(self, lengths: ArrayLike) -> NDArray[np.int64]:
        """Return the bin of each length."""
        return np.searchsorted(np.asarray(self.edges, np.int64), lengths, side="left")


ONE_BIN = LengthBins()


@dataclass
class StepSums:
    """One rank's sums of a step, or of its share of validation.

    Attributes:
        values: float64[6 + 4·(C + 1)] on the engine's device: weighted_loss, normaliser, tokens, computed_tokens,
            target_tokens, packs, then for each category slot the sums of losses, target tokens, correct predictions and
            entropies.
        slots: C + 1.
        has_stats: whether the last two were added.
    """

    values: torch.Tensor
    slots: int
    has_stats: bool = False

    @classmethod
    def zeros(cls, categories: int, device: torch.device | str) -> "StepSums":
        """Return sums that are all zero; ``categories`` is C."""
        slots = categories + 1
        return cls(torch.zeros(len(_SCALARS) + 4 * slots, dtype=torch.float64, device=device), slots)

    @property
    def weighted_loss(self) -> torch.Tensor:
        """Σ a_t·ℓ_t, a view of one element."""
        return self.values[0:1]

    @property
    def category_loss(self) -> torch.Tensor:
        """Σ ℓ_t over each category slot's targets, a view: float64[C + 1]."""
        return self._by_category[0]

    @property
    def _by_category(self) -> torch.Tensor:
        """The sums by category slot: float64[4, C + 1], a view."""
        return self.values[len(_SCALARS) :].view(4, self.slots)

    def add_targets(self, slots: torch.Tensor, nll: torch.Tensor, *stats: torch.Tensor) -> None:
        """Add losses, and correct predictions and entropies if given.

        slots: int64[T], each target's category slot; -1 for no target, whose values may be infinite.
        """
        is_target, slots = slots >= 0, slots.clamp(min=0)
        for row, values in ((0, nll), *enumerate(stats, start=2)):
            self._by_category[row].index_add_(0, slots, torch.where(is_target, values.detach().double(), 0.0))
        self.has_stats |= bool(stats)

    @property
    def loss(self) -> float:
        """Σ a_t·ℓ_t / Z, NaN if Z is 0; reads the device."""
        weighted, normaliser = self.values[:2].tolist()
        return weighted / normaliser if normaliser else math.nan

    def add_counts(self, counts: torch.Tensor) -> None:
        """Add float64[5 + C + 1]: `_SCALARS[1:]`, then target tokens by category."""
        counts = counts.to(self.values.device, non_blocking=True)
        self.values[1 : len(_SCALARS)] += counts[: len(_SCALARS) - 1]
        self._by_category[1] += counts[len(_SCALARS) - 1 :]

    def reduced(self, all_reduce: Callable[[torch.Tensor], None]) -> "StepSums":
        """Return the sums over all data-parallel ranks, in one reduction."""
        values = self.values.clone()
        all_reduce(values)
        return StepSums(values, self.slots, self.has_stats)

    def __add__(self, other: "StepSums") -> "StepSums":
        return StepSums(self.values + other.values, self.slots, self.has_stats and other.has_stats)

    def report(self, prefix: str, names: tuple[str, ...], bins: LengthBins = ONE_BIN) -> dict[str, float]:
        """Return the metrics by name; read the device once.

        A category without target tokens has no loss, and its count is 0. For a validation set, ``perplexity`` is exp of
        the plain mean of ℓ_t over all target tokens in every loss mode, and a category's perplexity is exp of its loss;
        a perplexity beyond float64 is inf. A bin's loss, like a category's, is the plain mean of its targets' ℓ_t.
        """
        # Read all sums in one transfer: each makes the host wait for the device.
        values = self.values.tolist()
        weighted_loss, normaliser, tokens, computed_tokens, target_tokens, packs = values[: len(_SCALARS)]
        cells = np.array(values[len(_SCALARS) :]).reshape(4, len(bins), len(names) + 1)
        sums, counts, correct, entropies = cells.sum(1).tolist()
        metrics = {
            f"{prefix}/loss": weighted_loss / normaliser if normaliser else float("nan"),
            f"{prefix}/tokens": int(tokens),
            f"{prefix}/target_tokens": int(target_tokens),
            f"{prefix}/packs": int(packs),
        }
        if computed_tokens != tokens:  # documents share beginnings
            metrics[f"{prefix}/computed_tokens"] = int(computed_tokens)
        # A category without targets has no mean, and 0 would pass for a perfect loss.
        for name, loss, count in zip(names, sums[1:], counts[1:], strict=True):
            if count:
                metrics[f"{prefix}/{name}_loss"] = loss / count
            if count and prefix == VALIDATION:
                metrics[f"{prefix}/{name}_perplexity"] = perplexity(loss, count)
            metrics[f"{prefix}/{name}_tokens"] = int(count)
        # Sums that no head added to are zeros, which would pass for values.
        if self.has_stats:
            for kind, totals in (("token_accuracy", correct), ("entropy", entropies)):
                if sum(counts):
                    metrics[f"{prefix}/{kind}"] = sum(totals) / sum(counts)
                for name, total, count in zip(names, totals[1:], counts[1:], strict=True):
                    if count:
                        metrics[f"{prefix}/{name}_{kind}"] = total / count
        # Divide the sums over all targets: a mean of categories would favour small ones.
        if prefix == VALIDATION:
            metrics[f"{prefix}/perplexity"] = perplexity(sum(sums), sum(counts))
        for bin_name, loss, count in zip(bins.names, *cells[:2].sum(2).tolist(), strict=bool(bins.edges)):
            metrics |= {f"{prefix}/loss_{bin_name}": loss / count} if count else {}
            metrics[f"{prefix}/target_tokens_{bin_name}"] = int(count)
        return metrics


# The sums of PreferenceSums for each category, in order (losses/preference_values.py).
PREFERENCE_VALUES = (
    *("weight", "pair_loss", "pairs", "paired_weight", "margin", "right", "chosen_drop"),
    *(
        f"{side}_{name}"
        for side in ("chosen", "rejected")
        for name in ("weight", "reward", "count", "log_prob", "targets")
    ),
)


@dataclass
class PreferenceSums:
    """One rank's sums of preferences in a step or a validation.

    values: float64[V, C + 1] on the engine's device, the sums of PREFERENCE_VALUES by category slot.
    """

    values: torch.Tensor

    @classmethod
    def zeros(cls, categories: int, device: torch.device | str) -> "PreferenceSums":
        """Return sums that are all zero; ``categories`` is C."""
        return cls(torch.zeros(len(PREFERENCE_VALUES), categories + 1, dtype=torch.float64, device=device))

    def add(self, values: Mapping[str, torch.Tensor], slots: torch.Tensor) -> None:
        """Add the values of n terms, float64[n] each, in category slots int64[n]."""
        self.values.index_add_(1, slots, torch.stack([values[name].detach() for name in PREFERENCE_VALUES]))

    def reduced(self, all_reduce: Callable[[torch.Tensor], None]) -> "PreferenceSums":
        """Return the sums over all data-parallel ranks, in one reduction."""
        values = self.values.clone()
        all_reduce(values)
        return PreferenceSums(values)

    def __add__(self, other: "PreferenceSums") -> "PreferenceSums":
        return PreferenceSums(self.values + other.values)

    def report(self, prefix: str, names: tuple[str, ...], has_reference: bool = True) -> dict[str, float]:
        """Return the metrics that have values by name; read the device once.

        Means are weighted by pairs; log-probabilities are per target token. Without a reference, no share of preferred
        answers that became less likely is known.
        """
        columns = list(zip(*self.values.tolist(), strict=True))
        every = _preference_means([math.fsum(row) for row in zip(*columns, strict=True)])
        if not has_reference:
            every.pop("chosen_drop", None)
        metrics = {f"{prefix}/{name}": value for name, value in every.items()}
        for category, column in zip(names, columns[1:], strict=True):
            own = _preference_means(column)
            for name in ("pair_loss", "reward_margin", "reward_accuracy", "pairs"):
                if name in own:
                    metrics[f"{prefix}/{category}_{name}"] = own[name]
        return metrics


def _preference_means(sums: Sequence[float]) -> dict[str, float]:
    """Return the means of sums by metric; none with divisor 0."""
    of = dict(zip(PREFERENCE_VALUES, sums, strict=True))
    ratios = {"pair_loss": ("pair_loss", "weight"), "chosen_drop": ("chosen_drop", "chosen_weight")}
    for side in ("chosen", "rejected"):
        ratios[f"reward_{side}"] = (f"{side}_reward", f"{side}_weight")
        ratios[f"logp_{side}"] = (f"{side}_log_prob", f"{side}_targets")
        ratios[f"{side}_length"] = (f"{side}_targets", f"{side}_count")
    ratios |= {"reward_margin": ("margin", "paired_weight"), "reward_accuracy": ("right", "paired_weight")}
    means = {name: of[total] / of[count] for name, (total, count) in ratios.items() if of[count]}
    if not of["pairs"] and {"reward_chosen", "reward_rejected"} <= means.keys():  # answers with labels
        means["reward_margin"] = means["reward_chosen"] - means["reward_rejected"]
    return {**means, "pairs": int(of["pairs"])}


def perplexity(loss: float, count: float) -> float:
    """Return exp(Σ ℓ_t / count); inf past float64, NaN without tokens."""
    try:
        return math.exp(loss / count) if count else math.nan
    except OverflowError:
        return math.inf
