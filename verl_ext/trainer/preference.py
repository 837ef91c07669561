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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from typing_extensions import override

from verl_ext.losses import (
    PreferenceOptions,
    Units,
    pack_coefficients,
    preference_slopes,
    preference_terms,
    preference_values,
    target_coefficients,
    target_scales,
    total_weight,
)
from verl_ext.metrics import PreferenceSums, StepSums
from verl_ext.trainer.batch import LaidOut, Pack, PackTexts, StepBatch, StepCollator
from verl_ext.trainer.loss import LossOfLosses
from verl_ext.trainer.mismatched import mismatched_pack

if TYPE_CHECKING:
    from verl_ext.engines.step import StepEngine

Answers = Mapping[str, NDArray[Any]]  # the columns of one pack's documents, [D] each; `scales` is Σ s_t
_OF_DOCUMENTS = ("unit", "answer", "pair_weight", "targets", "reference", "slot")
_NO_DOCUMENTS: Answers = {name: np.zeros(0, np.int64) for name in _OF_DOCUMENTS}
_NO_LABEL_WEIGHTS: Any = {"desirable_weight": 1.0, "undesirable_weight": 1.0}  # options of kto alone
_NO_SCALES = {name: np.zeros(0) for name in ("scale", "likelihood")}


@dataclass
class PreferenceBatch(StepBatch):
    """A rank's share of a step of preferences.

    Attributes:
        normalisers: float64[3], this rank's terms of Z, Z_n and Z_s.
        answers: the documents of each pack slot.
        several: `loss.answers`.
        mismatched: the answers of kto's baseline; None for other modes.
        mismatched_reference: the sum of their reference's sums.
    """

    answers: Sequence[Answers] = ()
    several: str = "sum"
    mismatched: "PreferenceBatch | None" = None
    mismatched_reference: float = 0.0

    @override
    def count(self, sums: StepSums) -> None:
        super().count(sums)
        assert isinstance(sums, PreferenceSums)
        sums.likelihood[:, 1] += self.normalisers[1:].to(sums.values.device, non_blocking=True)

    @override
    def pin_memory(self) -> "PreferenceBatch":
        pinned = super().pin_memory()
        assert isinstance(pinned, PreferenceBatch)
        return pinned if self.mismatched is None else replace(pinned, mismatched=self.mismatched.pin_memory())

    @override
    def flags_of(self, first: int, last: int) -> dict[str, Any]:
        return {"units": units_of(self.answers[first:last], self.several)}


def units_of(packs: Sequence[Answers], several: str) -> Units:
    """Return the units of packs, one after the other."""
    joined = {name: np.concatenate([pack[name] for pack in packs]) for name in _OF_DOCUMENTS}
    return Units.of_rows(**joined, answers=several)


@dataclass(frozen=True)
class PreferenceCollator(StepCollator):
    """A collator of packs of units; `loss` is the mean of the likelihoods."""

    options: PreferenceOptions = field(default_factory=PreferenceOptions)

    def __call__(self, packs: Sequence[Pack | None]) -> PreferenceBatch:
        """Collate packs from a `PreferenceDataSet`; None stands for an idle rank."""
        idle = self.idle()
        nothing = idle._replace(targets=idle.targets | _NO_SCALES, normalisers=np.zeros(3)), _NO_DOCUMENTS
        pairs = [nothing if pack is None else self._with_answers(pack) for pack in packs]
        laid_out, answers = zip(*pairs, strict=True)
        batch = PreferenceBatch(**self.joined(laid_out), answers=answers, several=self.options.answers)
        if self.options.formula is not None:
            return batch
        others = [None if pack is None else mismatched_pack(pack, self.shares_prefixes) for pack in packs]
        known = [float(pack["mismatched_reference"]) for pack in packs if pack and "mismatched_reference" in pack]
        of_others = replace(self, options=replace(self.options, mode="apo_zero", **_NO_LABEL_WEIGHTS))(others)
        return replace(batch, mismatched=of_others, mismatched_reference=sum(known))

    @property
    @override
    def lists_targets(self) -> bool:
        return True

    def _with_answers(self, pack: Pack) -> tuple[LaidOut, Answers]:
        """Lay out a pack; return its documents too."""
        texts = PackTexts.read(pack, self.categories, self.shares_prefixes)
        answers = self._answers(texts)
        of_token = np.repeat(np.arange(len(answers["unit"])), np.diff(texts.offsets))
        side, given = answers["answer"][of_token], texts.columns.get("loss_weight", np.ones(len(of_token)))
        # Scales of the sums of log-probabilities, by the answers' lengths.
        scale, is_target = np.zeros(len(of_token)), texts.is_target == 1
        how = self.options.chosen_length, self.options.tail_weight
        scale[is_target] = target_scales(answers["targets"], answers["unit"], *how)
        # The likelihoods of preferred answers and of documents have means of their own.
        weight = given * texts.columns["pair_weight"][of_token]
        parts = [texts.is_target * (side > 0), texts.is_target * (side == 0)]
        shares = [
            pack_coefficients(self.loss, part, texts.category * part, texts.offsets, of_part, texts.real)
            for part, of_part in zip(parts, (weight, given), strict=True)
        ]
        answers = {**answers, "scales": np.add.reduceat(scale * given, texts.offsets[:-1])}
        units = units_of([answers], self.options.answers)
        normalisers = [float(total_weight(units, self.options)), *(share.normaliser for share in shares)]
        likelihood = shares[0].coefficients + shares[1].coefficients
        of_tokens = {"coefficients": np.zeros(len(of_token)), "scale": scale * given, "likelihood": likelihood}
        return self.of_texts(texts, of_tokens, normalisers, parts[0] + parts[1]), answers

    def _answers(self, texts: PackTexts) -> Answers:
        """Read the columns of a pack's documents."""
        columns, starts = texts.columns, texts.offsets[:-1]
        unit, answer = columns["unit"], columns["answer"]
        # A unit has the category of its first answer's first target.
        first = np.zeros(len(starts), np.int64)
        places = np.flatnonzero(texts.is_target)
        document, at = np.unique(np.searchsorted(texts.offsets, places, side="right") - 1, return_index=True)
        first[document] = texts.category[places[at]]
        slot = first[np.repeat(np.flatnonzero(unit), np.diff(np.flatnonzero(unit), append=len(unit)))]
        weight = columns["pair_weight"] * self.loss.category_weights[slot]
        reference = columns.get("reference", np.zeros(len(unit)))
        targets = np.add.reduceat(texts.is_target, starts)
        return dict(zip(_OF_DOCUMENTS, (unit, answer, weight, targets, reference, slot), strict=True))


class PreferenceLoss(LossOfLosses):
    """The loss of a step of preferences, by micro-batches.

    Args:
        normalisers: Z, Z_n and Z_s of the global step; a term whose normaliser is 0 is left out.
        data_parallel_size: the number of ranks whose shares add up to the loss.
        sums: collects what the metrics need; None for steps that are not logged.
        kept: as in :class:`StepLoss`.
        options: those of the loss.
        baseline: z of kto.

    Where sums are collected, `answer_sums` has each micro-batch's x, float64[A] on the device.
    """

    sums: PreferenceSums | None

    def __init__(
        self,
        normalisers: Sequence[float],
        data_parallel_size: int,
        sums: PreferenceSums | None,
        kept: list[torch.Tensor] | None = None,
        *,
        options: PreferenceOptions,
        baseline: torch.Tensor | float = 0.0,
    ) -> None:
        super().__init__(1.0, data_parallel_size, sums, kept)  # the coefficients are divided by Z
        self.options, self.baseline = options, baseline
        self.answer_sums: list[torch.Tensor] = []
        self._normaliser = normalisers[0] or 1.0
        weights = options.likelihood_weight, options.sft_weight
        self._factors = [weight / z if z else 0.0 for weight, z in zip(weights, normalisers[1:], strict=True)]

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
        _, slopes = preference_slopes(sums, units, self.options, self._normaliser, self.baseline)
        is_other = (units.side == 0).double()  # a choice between two numbers would be float32
        factor = self._factors[0] * (1 - is_other) + self._factors[1] * is_other
        likelihood = data["target_likelihood"].values() * factor[document]
        of_targets = target_coefficients(slopes, data["target_scale"].values(), document, likelihood)
        return of_targets.new_zeros(len(nll)).index_add_(0, data["target_rows"].values(), of_targets).float()

    @override
    def add_up(
        self, sums: StepSums, data: TensorDict, terms: torch.Tensor, nll: torch.Tensor, stats: Sequence[torch.Tensor]
    ) -> None:
        assert isinstance(sums, PreferenceSums)
        units, rows, document = data["units"], data["target_rows"].values(), data["target_document"].values()
        scale, of_target = data["target_scale"].values(), nll[rows].double()
        x, log_probs = _sums(data, units, nll, scale), _sums(data, units, nll, torch.ones_like(scale))
        self.answer_sums.append(x)
        pairs = preference_terms(x, units, self.options, self.baseline)
        sums.add_terms(preference_values(pairs, x, log_probs, units, self.options), units.slot[pairs.documents])
        # The likelihoods, and the means over the targets of categories, have no rejected answers.
        likelihood, side = data["target_likelihood"].values(), units.side[document]
        weighted = torch.where(likelihood != 0, likelihood * of_target, 0.0)
        for row, part in enumerate((side > 0, side == 0)):
            sums.likelihood[row, 0] += torch.where(part, weighted, 0.0).sum()
        category = torch.where(side < 0, -1, data["target_category"].values())
        sums.add_targets(category, nll[rows], *(column[rows] for column in stats))


def _sums(data: TensorDict, units: Units, nll: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return Σ s_t·log π of each document, float64[A], in the order of its targets."""
    of_target = torch.where(scale != 0, scale * nll[data["target_rows"].values()].double(), 0.0)
    # index_add_ would add in any order on a GPU, and the rewards of the first step would not be 0 to the bit.
    return -torch.segment_reduce(of_target, "sum", lengths=units.targets.long(), axis=0, unsafe=True)


def mismatched_sums(
    others: PreferenceBatch, engine: "StepEngine", sums: StepSums, options: PreferenceOptions, size: int
) -> list[torch.Tensor]:
    """Return x of mismatched answers by pack slot, float64 each on the device.

    A sequence-parallel group has the same on each of its ranks. sums: for their metrics. size: the packs of a
    micro-batch.
    """
    assert isinstance(sums, PreferenceSums)
    loss = PreferenceLoss([1.0] * 3, 1, sums, options=replace(options, mode="apo_zero", **_NO_LABEL_WEIGHTS))
    engine.evaluate(list(others.micro_batches(size, **options.head_flags, **loss.flags)), loss)
    return list(torch.cat(loss.answer_sums).split([len(of_pack["unit"]) for of_pack in others.answers]))
