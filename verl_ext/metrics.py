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
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

# A category must not have these names, because `<category>_tokens` or `<category>_loss` would be another metric.
RESERVED = ("computed", "router", "target", "total", "total_target")
VALIDATION = "val"  # the prefix of the metrics that include perplexities
COUNTS = ("tokens", "computed_tokens", "target_tokens", "packs")
# The sums of each category slot: target tokens, their losses, and if known, correct predictions and entropies.
TARGET_SUMS = ("targets", "nll", "token_accuracy", "entropy")
# Those of preferences besides (losses/preference_values.py).
PREFERENCE_VALUES = (
    *("weight", "pair_loss", "pairs", "paired_weight", "margin", "right", "chosen_drop"),
    *(
        f"{side}_{name}"
        for side in ("chosen", "rejected")
        for name in ("weight", "reward", "count", "log_prob", "targets")
    ),
)


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


@dataclass(frozen=True)
class Measures:
    """What a loss adds up in a step.

    terms: the weight in the loss of each of its means, by their names. by_slot: the sums of each category slot,
    TARGET_SUMS first.
    """

    terms: Mapping[str, float] = field(default_factory=lambda: {"loss": 1.0})
    by_slot: tuple[str, ...] = TARGET_SUMS


@dataclass
class StepSums:
    """One rank's sums of a step, or of its share of validation.

    Attributes:
        values: float64 on one device: the total and then the normaliser of each term, COUNTS, and the sums by slot.
        slots: (C + 1) · bins.
        measures: what is added up.
        has_stats: whether correct predictions and entropies were added.
    """

    values: torch.Tensor
    slots: int
    measures: Measures = field(default_factory=Measures)
    has_stats: bool = False

    @classmethod
    def zeros(cls, slots: int, device: torch.device | str, measures: Measures | None = None) -> "StepSums":
        """Return sums that are all zero."""
        measures = measures or Measures()
        size = 2 * len(measures.terms) + len(COUNTS) + len(measures.by_slot) * slots
        return cls(torch.zeros(size, dtype=torch.float64, device=device), slots, measures)

    @property
    def totals(self) -> torch.Tensor:
        """Σ a_t·ℓ_t or Σ w·f of each term, a view."""
        return self.values[: len(self.measures.terms)]

    @property
    def normalisers(self) -> torch.Tensor:
        """The part of Z of each term, a view."""
        return self.values[len(self.measures.terms) :][: len(self.measures.terms)]

    @property
    def by_slot(self) -> torch.Tensor:
        """The sums by category slot, a view: float64[rows, slots]."""
        return self.values[2 * len(self.measures.terms) + len(COUNTS) :].view(-1, self.slots)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one of COUNTS, float64[], or the sums of all slots, float64[slots], as a view."""
        if name in COUNTS:
            return self.values[2 * len(self.measures.terms) + COUNTS.index(name)]
        return self.by_slot[self.measures.by_slot.index(name)]

    def add_targets(self, slots: torch.Tensor, nll: torch.Tensor, *stats: torch.Tensor) -> None:
        """Add losses, and correct predictions and entropies if known.

        slots: int64[T], each target's category slot; -1 for no target, whose values may be infinite.
        """
        is_target, slots = slots >= 0, slots.clamp(min=0)
        for name, values in zip(TARGET_SUMS[1:], (nll, *stats), strict=False):
            self[name].index_add_(0, slots, torch.where(is_target, values.detach().double(), 0.0))
        self.has_stats |= bool(stats)

    def add_terms(self, values: Mapping[str, torch.Tensor], slots: torch.Tensor) -> None:
        """Add the values of n answers or pairs, float64[n] each, in category slots int64[n]."""
        names = self.measures.by_slot[len(TARGET_SUMS) :]
        self.by_slot[len(TARGET_SUMS) :].index_add_(1, slots, torch.stack([values[name].detach() for name in names]))

    @property
    def loss(self) -> float:
        """The loss of the step, NaN without a term; reads the device."""
        return self._loss(self._means(self.values.tolist()))

    def _means(self, values: Sequence[float]) -> dict[str, float]:
        """Return the mean of each term that has a normaliser, from `values` on the host."""
        terms = len(self.measures.terms)
        parts = zip(self.measures.terms, values[:terms], values[terms : 2 * terms], strict=True)
        return {name: total / normaliser for name, total, normaliser in parts if normaliser}

    def _loss(self, means: Mapping[str, float]) -> float:
        terms = [weight * means[name] for name, weight in self.measures.terms.items() if weight and name in means]
        return math.fsum(terms) if terms else math.nan

    def on(self, device: torch.device | str) -> "StepSums":
        """Return a copy on a device, without waiting."""
        return replace(self, values=self.values.to(device, non_blocking=True, copy=True))

    def pin_memory(self) -> "StepSums":
        """Return a copy in pinned memory."""
        return replace(self, values=self.values.pin_memory())

    def reduced(self, all_reduce: Callable[[torch.Tensor], None]) -> "StepSums":
        """Return the sums over all data-parallel ranks, in one reduction."""
        values = self.values.clone()
        all_reduce(values)
        return replace(self, values=values)

    def __add__(self, other: "StepSums") -> "StepSums":
        return replace(self, values=self.values + other.values, has_stats=self.has_stats and other.has_stats)

    def report(self, prefix: str, names: tuple[str, ...], bins: LengthBins = ONE_BIN) -> dict[str, float]:
        """Return the metrics by name; read the device once.

        A category without target tokens has no loss, and its count is 0. For a validation set, ``perplexity`` is exp of
        the plain mean of ℓ_t over all target tokens in every loss mode, and a category's perplexity is exp of its loss;
        a perplexity beyond float64 is inf. A bin's loss, like a category's, is the plain mean of its targets' ℓ_t.
        """
        # Read all sums in one transfer: each makes the host wait for the device.
        host = self.values.tolist()
        means, counts = self._means(host), dict(zip(COUNTS, host[2 * len(self.measures.terms) :], strict=False))
        rows = np.reshape(host[-len(self.measures.by_slot) * self.slots :], (-1, len(bins), self.slots // len(bins)))
        of = dict(zip(self.measures.by_slot, rows.sum(1).tolist(), strict=True))
        metrics = {"loss": self._loss(means), **{name: int(counts[name]) for name in ("tokens", *COUNTS[2:])}}
        if counts["computed_tokens"] != counts["tokens"]:  # documents share beginnings
            metrics["computed_tokens"] = int(counts["computed_tokens"])
        metrics |= _target_means(of, names, prefix == VALIDATION, self.has_stats)
        if len(self.measures.terms) > 1:
            metrics |= means | _preference_metrics(of, names)
        for name, count, loss in zip(bins.names, *rows[:2].sum(2).tolist(), strict=bool(bins)):
            metrics |= {f"loss_{name}": loss / count} if count else {}
            metrics[f"target_tokens_{name}"] = int(count)
        return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _target_means(
    of: Mapping[str, list[float]], names: tuple[str, ...], with_perplexity: bool, with_stats: bool
) -> dict[str, float]:
    """Return the metrics of target tokens: `of` has the sums of each category slot by name."""
    metrics: dict[str, float] = {}
    sums, counts = of["nll"], of["targets"]
    # A category without targets has no mean, and 0 would pass for a perfect loss.
    for name, loss, count in zip(names, sums[1:], counts[1:], strict=True):
        if count:
            metrics[f"{name}_loss"] = loss / count
        if count and with_perplexity:
            metrics[f"{name}_perplexity"] = perplexity(loss, count)
        metrics[f"{name}_tokens"] = int(count)
    # Sums that no head added to are zeros, which would pass for values.
    for kind in TARGET_SUMS[2:] if with_stats else ():
        if sum(counts):
            metrics[kind] = sum(of[kind]) / sum(counts)
        for name, total, count in zip(names, of[kind][1:], counts[1:], strict=True):
            if count:
                metrics[f"{name}_{kind}"] = total / count
    # Divide the sums over all targets: a mean of categories would favour small ones.
    if with_perplexity:
        metrics["perplexity"] = perplexity(sum(sums), sum(counts))
    return metrics


def _preference_metrics(of: Mapping[str, list[float]], names: tuple[str, ...]) -> dict[str, float]:
    """Return the metrics of preferences: means weighted by the pairs, and log-probabilities per target token."""
    metrics = _preference_means({name: math.fsum(row) for name, row in of.items()})
    for slot, category in enumerate(names, start=1):
        own = _preference_means({name: row[slot] for name, row in of.items()})
        shown = ("preference", "reward_margin", "reward_accuracy", "pairs")
        metrics |= {f"{category}_{name}": own[name] for name in shown if name in own}
    return metrics


def _preference_means(of: Mapping[str, float]) -> dict[str, float]:
    """Return the means of sums by metric; none with divisor 0."""
    ratios = {"preference": ("pair_loss", "weight")}
    if "chosen_drop" in of:  # the loss has a reference, so that it is known which answers became less likely
        ratios["chosen_drop"] = ("chosen_drop", "chosen_weight")
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
