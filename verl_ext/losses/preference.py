"""Losses of preferences, as functions of the answers' sums of log-probabilities.

    x_d = Σ_t s_t·log π(t)     L = Σ_i w_i·f_i / Z      a_t = −s_t·∂L/∂x_d, so that Σ_t a_t·ℓ_t has L's gradient

f is the formula of the mode, of :mod:`verl_ext.losses.preference_modes`.

Sums and f are float64: a sum of 10⁴ log-probabilities loses 10⁻³ in fp32, and the margin is a difference of two.
"""

from typing import NamedTuple

import torch

from verl_ext.losses.preference_modes import PREFERENCE_MODES, Sides
from verl_ext.losses.preference_options import PreferenceOptions
from verl_ext.losses.preference_units import Units
from verl_ext.options import must


class Terms(NamedTuple):
    """The documents int64[n], weights and losses float64[n] of a sum's terms.

    A pair's document is its preferred answer.
    """

    documents: torch.Tensor
    weights: torch.Tensor
    losses: torch.Tensor

    @property
    def weighted_sum(self) -> torch.Tensor:
        """Σ w·f, float64[]."""
        return (self.weights * self.losses).sum()


def preference_terms(
    sums: torch.Tensor,
    units: Units,
    options: PreferenceOptions,
    baseline: torch.Tensor | float = 0.0,
) -> Terms:
    """Return the terms of the loss for the documents' sums x, float64[A].

    baseline: z of kto. Raises ValueError for answers with a label alone, if the mode compares answers.
    """
    formula = options.formula
    ratios = sums - units.reference
    # Answers alone: each is a term, and none is compared with another.
    if formula is None:
        documents = units.answers  # known on the host: a search on the device would make it wait
        side, scaled = units.side[documents], options.scale * ratios[documents]
        desirable = (side > 0).double()  # a truth value times a number would be float32
        factor = options.desirable_weight * desirable + options.undesirable_weight * (1 - desirable)
        return Terms(documents, units.weight[documents], factor * (1 - torch.sigmoid(side * (scaled - baseline))))
    # Pairs; answers that have a label follow them, if the loss is a sum over sides.
    pairs = [each[place] for each in (sums, units.reference) for place in (units.chosen, units.rejected)]
    losses = formula(Sides(*pairs), options) if len(units.chosen) else ratios.new_zeros(0)
    if not len(units.alone):
        return Terms(units.chosen, units.pair_weight, losses)
    if not options.of_mode.takes_labels:
        labels = ", ".join(name for name, mode in PREFERENCE_MODES.items() if mode.takes_labels)
        raise ValueError(must("loss.mode", f"be one of {labels} for answers with a label alone", options.mode))
    alone = torch.sigmoid(-units.side[units.alone] * options.scale * ratios[units.alone])
    documents, weights = (
        torch.cat(parts) for parts in ((units.chosen, units.alone), (units.pair_weight, units.weight[units.alone]))
    )
    return Terms(documents, weights, torch.cat([losses, alone]))


def total_weight(units: Units, options: PreferenceOptions) -> torch.Tensor:
    """Return the units' part of Z, float64[], from data alone."""
    if options.formula is None:
        return units.weight[units.side != 0].sum()
    return units.pair_weight.sum() + units.weight[units.alone].sum()


def preference_slopes(
    sums: torch.Tensor,
    units: Units,
    options: PreferenceOptions,
    normaliser: torch.Tensor | float,
    baseline: torch.Tensor | float = 0.0,
) -> tuple[Terms, torch.Tensor]:
    """Return the terms, and ∂(Σ w·f / Z)/∂x of each document, float64[A].

    The slopes come by autograd over these A numbers. normaliser: Z of the step, over all packs and ranks.
    """
    sums = sums.detach().double().requires_grad_()
    with torch.enable_grad():
        terms = preference_terms(sums, units, options, baseline)
        if not len(terms.losses):
            return terms, torch.zeros_like(sums)
        (slopes,) = torch.autograd.grad(terms.weighted_sum / normaliser, sums)
    return terms._replace(losses=terms.losses.detach()), slopes


def kto_baseline(log_ratio: torch.Tensor | float, answers: torch.Tensor | float, beta: float) -> torch.Tensor:
    """Return z of kto: mean log-ratio of mismatched answers, at least 0.

    log_ratio, answers: the sum over the step and its number of answers, reduced over ranks. It is 0 without answers.
    """
    total, number = (torch.as_tensor(value, dtype=torch.float64) for value in (log_ratio, answers))
    return (beta * total / number.clamp(min=1)).clamp(min=0)
