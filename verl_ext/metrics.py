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
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

# A category must not have these names, because `<category>_tokens` would be another metric.
RESERVED = ("computed", "target", "total", "total_target")
VALIDATION = "val"  # the prefix of the metrics that include perplexities
_SCALARS = ("weighted_loss", "normaliser", "tokens", "computed_tokens", "target_tokens", "packs")
SumsT = TypeVar("SumsT", bound="StepSums")


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

    def folded(self, values: Sequence[float], slots: int) -> list[float]:
        """Return rows of `slots` sums as sums by category, over all bins."""
        return np.reshape(values, (-1, len(self), slots // len(self))).sum(1).ravel().tolist()


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
        return self.values[len(_SCALARS) :][: 4 * self.slots].view(4, self.slots)

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
        """The loss of the step, NaN without a term; reads the device."""
        return self._loss(self.values.tolist())

    def _loss(self, values: Sequence[float]) -> float:
        """Return Σ a_t·ℓ_t / Z of `values` on the host, NaN if Z is 0."""
        return values[0] / values[1] if values[1] else math.nan

    def add_counts(self, counts: torch.Tensor) -> None:
        """Add float64[5 + C + 1]: `_SCALARS[1:]`, then target tokens by category."""
        counts = counts.to(self.values.device, non_blocking=True)
        self.values[1 : len(_SCALARS)] += counts[: len(_SCALARS) - 1]
        self._by_category[1] += counts[len(_SCALARS) - 1 :]

    def reduced(self: SumsT, all_reduce: Callable[[torch.Tensor], None]) -> SumsT:
        """Return the sums over all data-parallel ranks, in one reduction."""
        values = self.values.clone()
        all_reduce(values)
        return replace(self, values=values)

    def __add__(self: SumsT, other: SumsT) -> SumsT:
        return replace(self, values=self.values + other.values, has_stats=self.has_stats and other.has_stats)

    def report(self, prefix: str, names: tuple[str, ...], bins: LengthBins = ONE_BIN) -> dict[str, float]:
        """Return the metrics by name; read the device once.

        A category without target tokens has no loss, and its count is 0. For a validation set, ``perplexity`` is exp of
        the plain mean of ℓ_t over all target tokens in every loss mode, and a category's perplexity is exp of its loss;
        a perplexity beyond float64 is inf. A bin's loss, like a category's, is the plain mean of its targets' ℓ_t.
        """
        # Read all sums in one transfer: each makes the host wait for the device.
        values = self.values.tolist()
        of_all = replace(self, slots=self.slots // len(bins))
        metrics = of_all._metrics(self._folded(values, bins), prefix, names)
        of_bins = np.reshape(values[len(_SCALARS) :][: 2 * self.slots], (2, len(bins), -1)).sum(2)
        for name, loss, count in zip(bins.names, *of_bins.tolist(), strict=bool(bins)):
            metrics |= {f"{prefix}/loss_{name}": loss / count} if count else {}
            metrics[f"{prefix}/target_tokens_{name}"] = int(count)
        return metrics

    def _folded(self, values: Sequence[float], bins: LengthBins) -> list[float]:
        """Return `values` with the sums of all bins added up."""
        first = len(_SCALARS)
        return [*values[:first], *bins.folded(values[first:][: 4 * self.slots], self.slots)]

    def _metrics(self, values: Sequence[float], prefix: str, names: tuple[str, ...]) -> dict[str, float]:
        """Return the metrics of `values` on the host by name."""
        _, _, tokens, computed_tokens, target_tokens, packs = values[: len(_SCALARS)]
        starts = range(len(_SCALARS), len(_SCALARS) + 4 * self.slots, self.slots)
        sums, counts, correct, entropies = (values[start : start + self.slots] for start in starts)
        metrics = {
            f"{prefix}/loss": self._loss(values),
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
class PreferenceSums(StepSums):
    """One rank's sums of a step of preferences, or of its share of validation.

    `values` go on with float64[2, 2], Σ a_t·ℓ_t and Z of preferred answers and of documents that are no answers, and
    float64[V, C + 1], the sums of PREFERENCE_VALUES by category slot. weighted_loss and normaliser are those of the
    pairs, and the means of token losses leave out rejected answers.

    Attributes:
        weights: `loss.nll_weight` and `loss.sft_weight`.
        has_reference: whether the loss has a reference; else no share of answers that became less likely is known.
    """

    weights: tuple[float, float] = (0.0, 0.0)
    has_reference: bool = True

    @classmethod
    def zeros(cls, categories: int, device: torch.device | str) -> "PreferenceSums":
        """Return sums that are all zero; ``categories`` is C."""
        slots = categories + 1
        number = len(_SCALARS) + 4 * slots + 4 + len(PREFERENCE_VALUES) * slots
        return cls(torch.zeros(number, dtype=torch.float64, device=device), slots)

    @property
    def likelihood(self) -> torch.Tensor:
        """The sums and normalisers of the terms of likelihood, a view: float64[2, 2]."""
        return self.values[self._start :][:4].view(2, 2)

    @property
    def _start(self) -> int:
        return len(_SCALARS) + 4 * self.slots

    def add_terms(self, values: Mapping[str, torch.Tensor], slots: torch.Tensor) -> None:
        """Add the values of n terms, float64[n] each, in category slots int64[n]."""
        of_terms = self.values[self._start + 4 :].view(len(PREFERENCE_VALUES), self.slots)
        of_terms.index_add_(1, slots, torch.stack([values[name].detach() for name in PREFERENCE_VALUES]))
        self.weighted_loss.add_(values["pair_loss"].detach().sum())

    def _folded(self, values: Sequence[float], bins: LengthBins) -> list[float]:
        rows = bins.folded(values[self._start + 4 :], self.slots)
        return [*super()._folded(values, bins), *values[self._start :][:4], *rows]

    def _loss(self, values: Sequence[float]) -> float:
        means = zip((1.0, *self.weights), self._means(values), strict=True)
        terms = [weight * mean for weight, mean in means if weight and mean is not None]
        return math.fsum(terms) if terms else math.nan

    def _means(self, values: Sequence[float]) -> list[float | None]:
        """Return the means over pairs, preferred answers and other documents; None without any."""
        quotients = [*values[:2], *values[self._start :][:4]]
        return [
            total / divisor if divisor else None for total, divisor in zip(quotients[::2], quotients[1::2], strict=True)
        ]

    def _metrics(self, values: Sequence[float], prefix: str, names: tuple[str, ...]) -> dict[str, float]:
        """Return the metrics of `values` on the host by name.

        Means of pairs are weighted by the pairs; log-probabilities are per target token.
        """
        metrics = super()._metrics(values, prefix, names)
        for name, mean in zip(("chosen_nll", "document_nll"), self._means(values)[1:], strict=True):
            if mean is not None:
                metrics[f"{prefix}/{name}"] = mean
        first = self._start + 4
        rows = [values[start : start + self.slots] for start in range(first, len(values), self.slots)]
        every = _preference_means([math.fsum(row) for row in rows])
        if not self.has_reference:
            every.pop("chosen_drop", None)
        metrics |= {f"{prefix}/{name}": value for name, value in every.items()}
        for slot, category in enumerate(names, start=1):
            own = _preference_means([row[slot] for row in rows])
            for name in ("preference", "reward_margin", "reward_accuracy", "pairs"):
                if name in own:
                    metrics[f"{prefix}/{category}_{name}"] = own[name]
        return metrics


def _preference_means(sums: Sequence[float]) -> dict[str, float]:
    """Return the means of sums by metric; none with divisor 0."""
    of = dict(zip(PREFERENCE_VALUES, sums, strict=True))
    ratios = {"preference": ("pair_loss", "weight"), "chosen_drop": ("chosen_drop", "chosen_weight")}
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
