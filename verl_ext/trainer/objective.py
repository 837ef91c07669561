"""What a run minimizes: the columns of its packs, and the loss of its steps."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from typing_extensions import override

from verl_ext.data.families.preference import PreferenceDataSet
from verl_ext.losses import (
    PREFERENCE_MODES,
    LossOptions,
    LossSpec,
    PreferenceOptions,
    kto_baseline,
    pack_coefficients,
)
from verl_ext.metrics import PREFERENCE_VALUES, TARGET_SUMS, Measures, StepSums
from verl_ext.options import must
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.loss import ProbabilityLoss, StepLoss
from verl_ext.trainer.preference import NOTHING, PreferenceLoss, preference_columns
from verl_ext.trainer.rank import DataParallelRank
from verl_ext.trainer.texts import LossColumns, PackTexts


class Objective:
    """A mean of token losses.

    has_noise: whether it keeps the model's dropout and other noise. has_reference: whether answers are compared with
    those of a reference. measures: what a step adds up. nothing: the columns of no text. mismatched: the objective of
    the mismatched answers that a step measures first; None without any. answer_facts: the options that decide the sums
    of answers.
    """

    has_noise: ClassVar[bool] = True
    has_reference = False
    measures = Measures()
    nothing = LossColumns({"coefficient": np.zeros(0)}, [0.0])
    mismatched: "PreferenceObjective | None" = None
    answer_facts: Sequence[Any] = ()

    def __init__(self, options: LossOptions) -> None:
        self.options = options

    def learns(self, normalisers: Sequence[float]) -> bool:
        """Tell whether a step with these normalisers has anything to learn."""
        weights = self.measures.terms.values()
        return any(weight > 0 and z > 0 for weight, z in zip(weights, normalisers, strict=True))

    def data_problem(self, dataset: Any) -> str | None:
        """Return a line if the objective cannot use a dataset's documents."""
        return None

    def data_notices(self, dataset: Any) -> Iterator[str]:
        """Warn about documents that are allowed but may be unintended."""
        yield from ()

    def columns(self, texts: PackTexts, spec: LossSpec) -> LossColumns:
        """Return what the loss makes of a pack's texts."""
        weight = texts.columns.get("loss_weight")
        share = pack_coefficients(spec, texts.is_target, texts.category, texts.offsets, weight, texts.real)
        return LossColumns({"coefficient": share.coefficients}, [share.normaliser], texts.is_target)

    def begin(
        self,
        batches: Iterable[StepBatch],
        rank: DataParallelRank,
        normalisers: Sequence[float] | None = None,
        sums: StepSums | None = None,
        losses: list[torch.Tensor] | None = None,
    ) -> StepLoss:
        """Return the loss of batches that form a whole, after measuring what it depends on; collective.

        batches: equally many on every rank; none: nothing is measured.
        normalisers: Z of each term. None: the loss of parts that their sums alone will divide, as in validation, which
        no probabilities weigh. sums, losses: as in :class:`StepLoss`.
        """
        if normalisers is None:
            return StepLoss(1.0, 1, sums, losses)
        of_step = ProbabilityLoss if self.options.by_probability else StepLoss
        return of_step(normalisers[0], rank.size, sums, losses)

    def mismatched_sums(self, batch: StepBatch, rank: DataParallelRank) -> list[torch.Tensor]:
        """Return x of mismatched answers by pack slot, float64 each on the device; none for other losses.

        A sequence-parallel group has the same on each of its ranks.
        """
        if self.mismatched is None or (others := batch.mismatched) is None:
            return []
        loss = self.mismatched.begin((), rank, sums=rank.sums(others))
        rank.engine.evaluate(rank.micro_batches(others, loss), loss)
        return list(torch.cat(loss.answer_sums).split(list(others.document_counts)))


class PreferenceObjective(Objective):
    """A loss of preferences, with likelihoods beside it."""

    has_noise = False
    nothing = NOTHING
    options: PreferenceOptions

    def __init__(self, options: PreferenceOptions) -> None:
        super().__init__(options)
        self.has_reference = options.of_mode.has_reference
        self.answer_facts = options.chosen_length, options.tail_weight
        if options.formula is None:  # a step reads the sums of these answers alone
            labels: Any = {"mode": "apo_zero", "desirable_weight": 1.0, "undesirable_weight": 1.0}
            self.mismatched = PreferenceObjective(replace(options, **labels))
        weights = {"preference": 1.0, "chosen_nll": options.likelihood_weight, "document_nll": options.sft_weight}
        values = [name for name in PREFERENCE_VALUES if self.has_reference or name != "chosen_drop"]
        self.measures = Measures(weights, (*TARGET_SUMS, *values))

    @override
    def data_problem(self, dataset: PreferenceDataSet) -> str | None:
        """Return a line for answers with a label alone where the mode compares, and for no answer at all."""
        pairs, alone = dataset.num_pairs, dataset.num_alone
        takes = self.options.of_mode.takes_labels
        if alone and not takes:
            modes = ", ".join(name for name, mode in PREFERENCE_MODES.items() if mode.takes_labels)
            got = f"{self.options.mode}, and {alone:,} in {dataset.key}"
            return must("loss.mode", f"be one of {modes} for answers with a label alone", got)
        if not pairs and not (alone and takes):
            return must(dataset.key, f"have pairs in its packs with loss.mode={self.options.mode}", "none")
        if self.mismatched and not dataset.packs_of_several:
            why = "whose baseline is that of each answer after another prompt"
            needed = f"hold the answers to two prompts of {dataset.key} with loss.mode=kto, {why}"
            return must("data.max_tokens", needed, dataset.max_tokens)
        return None

    @override
    def data_notices(self, dataset: PreferenceDataSet) -> Iterator[str]:
        if self.mismatched and (alone := len(dataset) - dataset.packs_of_several):
            yield (
                f"{alone:,} of {len(dataset):,} packs of {dataset.key} hold no answers to a second prompt, and add "
                "nothing to the baseline of loss.mode=kto: more data.max_tokens would hold more"
            )

    @override
    def columns(self, texts: PackTexts, spec: LossSpec) -> LossColumns:
        return preference_columns(texts, spec, self.options)

    @override
    def begin(
        self,
        batches: Iterable[StepBatch],
        rank: DataParallelRank,
        normalisers: Sequence[float] | None = None,
        sums: StepSums | None = None,
        losses: list[torch.Tensor] | None = None,
    ) -> PreferenceLoss:
        size = 1 if normalisers is None else rank.size
        return PreferenceLoss(
            data_parallel_size=size,
            sums=sums,
            losses=losses,
            options=self.options,
            normalisers=[1.0] * 3 if normalisers is None else normalisers,
            baseline=self._baseline(batches, rank) if self.mismatched else 0.0,
        )

    def _baseline(self, batches: Iterable[StepBatch], rank: DataParallelRank) -> torch.Tensor | float:
        """Measure z of kto, the mean log-ratio of mismatched answers, at least 0."""
        parts: list[torch.Tensor] = []
        for batch in batches:
            x = torch.cat(self.mismatched_sums(batch, rank))
            parts.append(torch.stack([x.sum() - batch.mismatched_reference, x.new_full((), len(x))]))
        if not parts:
            return 0.0
        total = torch.stack(parts).sum(0)
        rank.all_reduce(total)
        return kto_baseline(total[0], total[1], self.options.scale)


_OBJECTIVES: dict[type[LossOptions], type[Any]] = {LossOptions: Objective, PreferenceOptions: PreferenceObjective}


def objective_of(options: LossOptions) -> Objective:
    """Return the objective that `loss` names."""
    return _OBJECTIVES[type(options)](options)
