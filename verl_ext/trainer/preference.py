"""A step of preferences: the answers of its packs, and their loss.

```
documents      chosen      rejected    a document       A of a micro-batch
side             1            -1           0
targets        t t t        t t          t t t t        one after the other, with scale s_t and likelihood a_t
x              Σ s·log π    Σ s·log π    -              summed over sequence-parallel ranks before the loss of pairs
```

    L = Σ w·f / Z  +  nll_weight · (Σ a·ℓ of preferred answers) / Z_n  +  sft_weight · (Σ a·ℓ of documents) / Z_s

Z, Z_n and Z_s belong to the global step and come from data alone. A unit's weight w is `pair_weight` times its
category's; the likelihood of a preferred answer is weighted by its pair_weight, so that a pair of weight 0 teaches
nothing. Rejected answers count in no mean of token losses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from typing_extensions import override

from verl_ext.losses import (
    LossSpec,
    PreferenceOptions,
    Units,
    pack_coefficients,
    preference_slopes,
    preference_terms,
    preference_values,
    row_coefficients,
    target_coefficients,
    target_scales,
    total_weight,
)
from verl_ext.metrics import StepSums
from verl_ext.trainer.loss import LossOfLosses
from verl_ext.trainer.texts import Columns, LossColumns, PackTexts

_OF_DOCUMENTS = ("unit", "answer", "pair_weight", "targets", "reference", "slot")  # those of :meth:`Units.of_rows`
NOTHING = LossColumns(
    {name: np.zeros(0) for name in ("scale", "likelihood")},
    [0.0] * 3,
    documents={name: np.zeros(0, np.int64) for name in (*_OF_DOCUMENTS, "scales")},
)


def preference_columns(texts: PackTexts, spec: LossSpec, options: PreferenceOptions) -> LossColumns:
    """Return the scales and likelihoods of a pack's targets, and its answers; `spec` is the mean of the likelihoods."""
    answers = _answers(texts, spec)
    of_token = np.repeat(np.arange(len(answers["unit"])), np.diff(texts.offsets))
    side, weight = answers["answer"][of_token], texts.columns.get("loss_weight", np.ones(len(of_token)))
    # Scales of the sums of log-probabilities, by the answers' lengths.
    scale, is_target = np.zeros(len(of_token)), texts.is_target == 1
    how = options.chosen_length, options.tail_weight
    scale[is_target] = target_scales(answers["targets"], answers["unit"], *how)
    # The likelihoods of preferred answers and of documents have means of their own.
    parts = [texts.is_target * (side > 0), texts.is_target * (side == 0)]
    weights = weight * texts.columns["pair_weight"][of_token], weight
    shares = [
        pack_coefficients(spec, part, texts.category * part, texts.offsets, of_part, texts.real)
        for part, of_part in zip(parts, weights, strict=True)
    ]
    normalisers = [float(total_weight(Units.of_rows(**answers, answers=options.answers), options))]
    return LossColumns(
        {"scale": scale * weight, "likelihood": shares[0].coefficients + shares[1].coefficients},
        [*normalisers, *(share.normaliser for share in shares)],
        parts[0] + parts[1],
        {**answers, "scales": np.add.reduceat(scale * weight, texts.offsets[:-1])},
    )


def _answers(texts: PackTexts, spec: LossSpec) -> Columns:
    """Read the columns of a pack's documents."""
    columns, starts = texts.columns, texts.offsets[:-1]
    unit, answer = columns["unit"], columns["answer"]
    # A unit has the category of its first answer's first target.
    first = np.zeros(len(starts), np.int64)
    places = np.flatnonzero(texts.is_target)
    document, at = np.unique(np.searchsorted(texts.offsets, places, side="right") - 1, return_index=True)
    first[document] = texts.category[places[at]]
    slot = first[np.repeat(np.flatnonzero(unit), np.diff(np.flatnonzero(unit), append=len(unit)))]
    weight = columns["pair_weight"] * spec.category_weights[slot]
    reference = columns.get("reference", np.zeros(len(unit)))
    targets = np.add.reduceat(texts.is_target, starts)
    return dict(zip(_OF_DOCUMENTS, (unit, answer, weight, targets, reference, slot), strict=True))


@dataclass(kw_only=True)
class PreferenceLoss(LossOfLosses):
    """The loss of a step of preferences, by micro-batches.

    Attributes:
        options: those of the loss.
        normalisers: Z, Z_n and Z_s of the global step, by which the coefficients are divided; a term whose normaliser
            is 0 is left out.
        baseline: z of kto.
    """

    normaliser: float = 1.0
    options: PreferenceOptions
    normalisers: Sequence[float]
    baseline: torch.Tensor | float = 0.0

    @override
    def flags(self, documents: Columns) -> dict[str, Any]:
        columns = {name: documents[name] for name in _OF_DOCUMENTS}
        return {**super().flags(documents), "units": Units.of_rows(**columns, answers=self.options.answers)}

    @override
    def of_rows(
        self, data: TensorDict, nll: torch.Tensor, reduce: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Return a_t, float32[T], from the losses of all tokens or of a rank's.

        nll: float32[T], 0 for the tokens of other ranks. reduce: sums x over those ranks, in place.
        """
        units, document = data["units"], data["target_document"].values()
        sums = _sums(data, units, nll, data["target_scale"].values())
        if reduce is not None:
            reduce(sums)
        total, *others = self.normalisers
        _, slopes = preference_slopes(sums, units, self.options, total or 1.0, self.baseline)
        weights = self.options.likelihood_weight, self.options.sft_weight
        chosen, other = (weight / z if z else 0.0 for weight, z in zip(weights, others, strict=True))
        is_other = (units.side == 0).double()  # a choice between two numbers would be float32
        factor = chosen * (1 - is_other) + other * is_other
        likelihood = data["target_likelihood"].values() * factor[document]
        of_targets = target_coefficients(slopes, data["target_scale"].values(), document, likelihood)
        return row_coefficients(data["target_row"].values(), of_targets, len(nll))

    @override
    def add_up(
        self, sums: StepSums, data: TensorDict, terms: torch.Tensor, nll: torch.Tensor, stats: Sequence[torch.Tensor]
    ) -> None:
        units, rows, document = data["units"], data["target_row"].values(), data["target_document"].values()
        scale, of_target = data["target_scale"].values(), nll[rows].double()
        x, log_probs = _sums(data, units, nll, scale), _sums(data, units, nll, torch.ones_like(scale))
        self.answer_sums.append(x)
        pairs = preference_terms(x, units, self.options, self.baseline)
        values = preference_values(pairs, x, log_probs, units, self.options)
        sums.add_terms(values, units.slot[pairs.documents])
        sums.totals[0] += values["pair_loss"].detach().sum()
        # The likelihoods, and the means over the targets of categories, have no rejected answers.
        likelihood, side = data["target_likelihood"].values(), units.side[document]
        weighted = torch.where(likelihood != 0, likelihood * of_target, 0.0)
        for row, part in enumerate((side > 0, side == 0), start=1):
            sums.totals[row] += torch.where(part, weighted, 0.0).sum()
        category = torch.where(side < 0, -1, data["target_slot"].values())
        sums.add_targets(category, nll[rows], *(column[rows] for column in stats))


def _sums(data: TensorDict, units: Units, nll: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return Σ s_t·log π of each document, float64[A], in the order of its targets."""
    of_target = torch.where(scale != 0, scale * nll[data["target_row"].values()].double(), 0.0)
    # index_add_ would add in any order on a GPU, and the rewards of the first step would not be 0 to the bit.
    return -torch.segment_reduce(of_target, "sum", lengths=units.targets.long(), axis=0, unsafe=True)
