"""What a run minimizes: how its steps are collated, added up and divided."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from typing_extensions import override
from verl.utils.device import get_device_id

from verl_ext.data import CategoryTable, PackDataset
from verl_ext.data.preference import PreferenceDataSet
from verl_ext.losses import PREFERENCE_MODES, LossOptions, LossSpec, PreferenceOptions, kto_baseline
from verl_ext.metrics import PreferenceSums, StepSums
from verl_ext.trainer.batch import StepBatch, StepCollator
from verl_ext.trainer.loss import ProbabilityLoss, StepLoss
from verl_ext.trainer.preference import PreferenceBatch, PreferenceCollator, PreferenceLoss, mismatched_sums

if TYPE_CHECKING:
    from verl_ext.engines.step import StepEngine


AllReduce = Callable[[torch.Tensor], None]


class Objective:
    """A mean of token losses.

    terms: the number of its normalisers. has_dropout: whether it keeps the model's dropout. has_reference: whether
    answers are compared with those of a reference. has_baseline: whether a step measures mismatched answers first.
    """

    terms: ClassVar[int] = 1
    has_dropout: ClassVar[bool] = True
    has_reference = has_baseline = False

    def __init__(self, options: LossOptions) -> None:
        self.options = options

    def learns(self, normalisers: Sequence[float]) -> bool:
        """Tell whether a step with these normalisers has anything to learn."""
        return normalisers[0] > 0

    def data_problem(self, dataset: PackDataset) -> str | None:
        """Return a line if the objective cannot use a dataset's documents."""
        return None

    def data_notices(self, dataset: PackDataset) -> Iterator[str]:
        """Warn about documents that are allowed but may be unintended."""
        yield from ()

    def collator(self, dataset: PackDataset, idle_tokens: int = 1) -> StepCollator:
        """Return the collator of a dataset's packs; an idle rank runs `idle_tokens`."""
        return StepCollator(*self._of_dataset(dataset, idle_tokens))

    def _of_dataset(self, dataset: PackDataset, idle_tokens: int) -> tuple[LossSpec, CategoryTable, int, bool, bool]:
        facts, categories = dataset.facts(), dataset.categories
        spec = self.options.spec(categories.names)
        return spec, categories, idle_tokens, facts.last_is_label, facts.shared is not None

    def sums(self, categories: int, device: torch.device | str) -> StepSums:
        """Return sums that are all zero."""
        return StepSums.zeros(categories, device)

    def loss(
        self,
        normalisers: Sequence[float],
        data_parallel_size: int,
        sums: StepSums | None = None,
        kept: list[torch.Tensor] | None = None,
    ) -> StepLoss:
        """Return the loss of a step with these normalisers."""
        of_step = ProbabilityLoss if self.options.by_probability else StepLoss
        return of_step(normalisers[0], data_parallel_size, sums, kept)

    def measure(self, batches: Iterable[StepBatch], engine: "StepEngine", all_reduce: AllReduce, size: int) -> None:
        """Measure what the loss of the whole of these batches depends on; collective.

        all_reduce: adds up over the data-parallel ranks, in place. size: the packs of a micro-batch.
        """

    def loss_of_parts(self, sums: StepSums | None = None) -> StepLoss:
        """Return the loss of a part of a whole that only its sums will divide.

        It is that of validation, which no probabilities weigh.
        """
        return StepLoss(1.0, 1, sums)


class PreferenceObjective(Objective):
    """A loss of preferences, with likelihoods beside it."""

    terms, has_dropout = 3, False
    _baseline: torch.Tensor | float = 0.0
    options: PreferenceOptions

    def __init__(self, options: PreferenceOptions) -> None:
        super().__init__(options)
        self.has_reference, self.has_baseline = options.of_mode.has_reference, options.formula is None

    def learns(self, normalisers: Sequence[float]) -> bool:
        """Tell whether a step with these normalisers has anything to learn."""
        weights = 1.0, self.options.likelihood_weight, self.options.sft_weight
        return any(weight > 0 and z > 0 for weight, z in zip(weights, normalisers, strict=True))

    def data_problem(self, dataset: PackDataset) -> str | None:
        """Return a line for answers with a label alone where the mode compares, and for no answer at all."""
        assert isinstance(dataset, PreferenceDataSet)
        pairs, alone = dataset.num_pairs, dataset.num_alone
        takes = self.options.of_mode.takes_labels
        if alone and not takes:
            modes = ", ".join(name for name, mode in PREFERENCE_MODES.items() if mode.takes_labels)
            got = f"got {self.options.mode}, and {alone:,} in {dataset.key}"
            return f"loss.mode must be one of {modes} for answers with a label alone; {got}"
        if not pairs and not (alone and takes):
            return f"{dataset.key} must have pairs in its packs with loss.mode={self.options.mode}; got none"
        if self.has_baseline and not dataset.packs_of_several:
            must = f"data.max_tokens must hold the answers to two prompts of {dataset.key} with loss.mode=kto, whose"
            return f"{must} baseline is that of each answer after another prompt; got {dataset.max_tokens}"
        return None

    @override
    def data_notices(self, dataset: PackDataset) -> Iterator[str]:
        assert isinstance(dataset, PreferenceDataSet)
        if self.has_baseline and (alone := len(dataset) - dataset.packs_of_several):
            yield (
                f"{alone:,} of {len(dataset):,} packs of {dataset.key} hold no answers to a second prompt, and add "
                "nothing to the baseline of loss.mode=kto: more data.max_tokens would hold more"
            )

    def collator(self, dataset: PackDataset, idle_tokens: int = 1) -> StepCollator:
        """Return the collator of a dataset's packs of units."""
        return PreferenceCollator(*self._of_dataset(dataset, idle_tokens), options=self.options)

    def sums(self, categories: int, device: torch.device | str) -> PreferenceSums:
        """Return sums that are all zero."""
        sums = PreferenceSums.zeros(categories, device)
        sums.weights = self.options.likelihood_weight, self.options.sft_weight
        sums.has_reference = self.has_reference
        return sums

    def measure(self, batches: Iterable[StepBatch], engine: "StepEngine", all_reduce: AllReduce, size: int) -> None:
        """Measure the baseline of kto, the mean log-ratio of mismatched answers, at least 0."""
        if not self.has_baseline:
            return
        parts: list[torch.Tensor] = []
        device: Any = get_device_id()
        for batch in batches:
            assert isinstance(batch, PreferenceBatch)
            assert batch.mismatched is not None, "the collator of kto makes them"
            sums = self.sums(batch.categories, device)
            x = torch.cat(mismatched_sums(batch.mismatched, engine, sums, self.options, size))
            parts.append(torch.stack([x.sum() - batch.mismatched_reference, x.new_full((), len(x))]))
        total = torch.stack(parts).sum(0)
        all_reduce(total)
        self._baseline = kto_baseline(total[0], total[1], self.options.scale)

    def loss(
        self,
        normalisers: Sequence[float],
        data_parallel_size: int,
        sums: StepSums | None = None,
        kept: list[torch.Tensor] | None = None,
    ) -> PreferenceLoss:
        """Return the loss of a step with these normalisers."""
        assert sums is None or isinstance(sums, PreferenceSums)
        of_step = normalisers, data_parallel_size, sums, kept
        return PreferenceLoss(*of_step, options=self.options, baseline=self._baseline)

    @override
    def loss_of_parts(self, sums: StepSums | None = None) -> StepLoss:
        return self.loss([1.0] * self.terms, 1, sums)


def objective_of(options: LossOptions) -> Objective:
    """Return the objective that `loss` names."""
    return PreferenceObjective(options) if isinstance(options, PreferenceOptions) else Objective(options)
