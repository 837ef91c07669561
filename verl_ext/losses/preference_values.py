"""Numbers of preferences that add up over packs, ranks and steps.

term        (chosen 0, rejected 1)   (chosen 0, rejected 2)   (chosen 3, none)
reward      β·(x_d − x_d(ref)) of each side; a side that a term lacks adds nothing
"""

import torch

from verl_ext.losses.preference import Terms
from verl_ext.losses.preference_options import PreferenceOptions
from verl_ext.losses.preference_units import Units


def preference_values(
    terms: Terms, sums: torch.Tensor, log_probs: torch.Tensor, units: Units, options: PreferenceOptions
) -> dict[str, torch.Tensor]:
    """Return what `StepSums` adds up, float64[n] each, by name.

    sums: float64[A], as for the terms. log_probs: float64[A], Σ log π(t) of each document without scales. A preferred
    answer counts once for each of its pairs; a tie of rewards is half right.
    """
    none = torch.full_like(terms.documents, -1)
    side = units.side[terms.documents]
    chosen, rejected = torch.where(side > 0, terms.documents, none), torch.where(side < 0, terms.documents, none)
    if options.formula is not None:  # the pairs come first
        rejected[: len(units.chosen)] = units.rejected
    rewards = options.scale * (sums.double() - units.reference)
    weight, paired = terms.weights, ((chosen >= 0) & (rejected >= 0)).double()
    values = {"weight": weight, "pair_loss": weight * terms.losses}
    for name, documents in (("chosen", chosen), ("rejected", rejected)):
        is_there, place = (documents >= 0).double(), documents.clamp(min=0)
        values |= {f"{name}_weight": weight * is_there, f"{name}_reward": weight * is_there * rewards[place]}
        values |= {f"{name}_count": is_there, f"{name}_log_prob": is_there * log_probs[place].double()}
        values[f"{name}_targets"] = is_there * units.targets[place]
    first, second = rewards[chosen.clamp(min=0)], rewards[rejected.clamp(min=0)]
    right = (first > second).double() + 0.5 * (first == second).double()
    values |= {"pairs": paired, "paired_weight": weight * paired, "margin": weight * paired * (first - second)}
    values |= {"right": weight * paired * right, "chosen_drop": values["chosen_weight"] * (first < 0)}
    return values
