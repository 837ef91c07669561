"""PreferenceOptions: the options of a loss of preferences, and a formula of the user's own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from typing_extensions import override

from verl_ext.losses.modes import MODES
from verl_ext.losses.options import CustomLoss, LossOptions
from verl_ext.losses.preference_modes import PREFERENCE_MODES, Formula, PreferenceMode, Sides
from verl_ext.losses.preference_units import LENGTHS
from verl_ext.options import first_line, must, option

_SMOOTHED = ("dpo", "dpo_norm", "robust", "simpo", "cpo", "dpop")
# The options that only some modes use.
_USED_BY = {
    "label_smoothing": _SMOOTHED,
    "margin": ("simpo",),
    "penalty": ("dpop",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


@dataclass(frozen=True)
class CustomFormula(CustomLoss):
    """A formula of the user's own, by file and name."""

    path: str | None = option(
        None, "Python file, or pkg://module, with your own formula; see docs/guides/preferences/losses.md"
    )
    name: str | None = option(None, "its function: (sides, options) -> float64[pairs], the loss of each")

    @override
    def load(self) -> Any:
        function = self.function()
        return function and checked_formula(function, f"{self.prefix}.name={self.name}")


@dataclass(frozen=True)
class PreferenceOptions(LossOptions):
    """The options of a loss of preferences."""

    modes: ClassVar[Iterable[str]] = tuple(PREFERENCE_MODES)

    mode: str = option("dpo", "the loss of a pair of answers", choices=PREFERENCE_MODES, resume="same")
    beta: float | None = option(None, "scale of the margin; null: by the mode", above=0, resume="same")
    label_smoothing: float = option(
        0.0,
        f"share of pairs taken to be the wrong way round, below 0.5; {', '.join(_SMOOTHED)}",
        least=0,
        resume="same",
    )
    margin: float = option(1.0, "simpo: least margin, γ", least=0, resume="same")
    penalty: float = option(5.0, "dpop: factor of the preferred answer's drop, κ", least=0, resume="same")
    length: str | None = option(
        None,
        "what an answer counts with: sum: of its log-probabilities | mean: theirs | common: the sum, with tail_weight "
        "beyond the length of the shortest answer; null: by the mode",
        choices=LENGTHS,
        resume="same",
    )
    tail_weight: float = option(1.0, "length=common: weight of the targets beyond it", least=0, most=1, resume="same")
    nll_weight: float | None = option(
        None, "weight of the preferred answers' likelihood; null: 1 for cpo and orpo, 0 else", least=0, resume="same"
    )
    nll_mode: str = option("token", "the mean of the likelihood terms", choices=MODES, resume="same")
    sft_weight: float = option(1.0, "weight of the likelihood of rows that are not answers", least=0, resume="same")
    answers: str = option(
        "sum",
        "several rejected answers: sum: each pair has the weight of its unit | mean: they share it",
        choices=("sum", "mean"),
        resume="same",
    )
    desirable_weight: float = option(1.0, "kto: weight of desirable answers", least=0, resume="same")
    undesirable_weight: float = option(1.0, "kto: weight of undesirable answers", least=0, resume="same")
    custom_cls: CustomFormula = option(CustomFormula, "your own formula, in place of the mode's")

    @override
    def problems(self) -> Iterable[str | None]:
        yield from self.category_problems()
        if self.by_probability:
            yield must("loss.by_probability", f"be false with loss.mode={self.mode}, which weighs answers", True)
        if self.label_smoothing >= 0.5:
            yield must("loss.label_smoothing", "be below 0.5", self.label_smoothing)
        for name in self.changed().keys() & _USED_BY.keys():
            if self.mode not in _USED_BY[name]:
                got = f"got {getattr(self, name)} with loss.mode={self.mode}"
                yield f"loss.{name} is an option of {', '.join(_USED_BY[name])}; {got}"
        of_pairs = [name for name, mode in PREFERENCE_MODES.items() if not mode.takes_labels]
        if self.custom_cls.is_named and self.mode not in of_pairs:
            yield must("loss.mode", f"be one of {', '.join(of_pairs)} with loss.custom_cls", self.mode)
        own = PREFERENCE_MODES[self.mode]
        if own.formula is None and self.answers != "sum":
            yield must("loss.answers", f"be sum with loss.mode={self.mode}, which compares no answers", self.answers)
        if own.formula is None and self.chosen_length == "common":
            yield must("loss.length", f"be sum or mean with loss.mode={self.mode}, which compares no answers", "common")
        if own.fixed_length and self.length not in (None, own.length):
            yield must("loss.length", f"be {own.length} with loss.mode={self.mode}", self.length)
        if not self.desirable_weight and not self.undesirable_weight:
            yield must("loss.desirable_weight or loss.undesirable_weight", "be above 0", "0 and 0")
        if self.tail_weight != 1 and self.chosen_length != "common":
            got = f"got {self.tail_weight} with {self.chosen_length}"
            yield f"loss.tail_weight is an option of loss.length=common; {got}"

    @property
    def of_mode(self) -> PreferenceMode:
        """The facts of the mode."""
        return PREFERENCE_MODES[self.mode]

    @property
    def scale(self) -> float:
        """The β that is used."""
        return self.of_mode.beta if self.beta is None else self.beta

    @property
    def chosen_length(self) -> str:
        """The length that is used."""
        return self.length or self.of_mode.length

    @property
    def likelihood_weight(self) -> float:
        """The weight of the preferred answers' likelihood that is used."""
        return self.of_mode.nll_weight if self.nll_weight is None else self.nll_weight

    @cached_property
    def formula(self) -> Formula | None:
        """The loss of a pair: the user's own or the mode's; None for answers alone."""
        return self.custom_cls.load() or self.of_mode.formula

    @property
    @override
    def fingerprint(self) -> dict[str, Any]:
        used: dict[str, Any] = {"beta": self.scale, "length": self.chosen_length, "nll_weight": self.likelihood_weight}
        if self.custom_cls.is_named:
            used["mode"] = f"{self.mode} by {self.custom_cls.fingerprint}"
        return {**self.stated, **{f"loss.{name}": value for name, value in used.items()}}

    @property
    @override
    def mean(self) -> str:
        return self.nll_mode


def checked_formula(function: Callable[..., Any], name: str) -> Formula:
    """Return a user's loss after a trial; raise ValueError if wrong."""
    trial = torch.tensor([-1.0, -20.0, -3.5], dtype=torch.float64)
    chosen, rejected = trial.clone().requires_grad_(), (trial * trial.new_tensor([1.5, 0.5, 1.0])).requires_grad_()
    try:
        losses = function(Sides(chosen, rejected, trial, trial), PreferenceOptions())
        gradients = torch.autograd.grad(losses.sum(), (chosen, rejected))
    except Exception as error:
        got = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(must(name, "give losses with gradients for (sides, options)", got)) from error
    if losses.shape != trial.shape or losses.dtype != torch.float64:
        got = f"{losses.dtype} of shape {tuple(losses.shape)} for 3 pairs"
        raise ValueError(must(name, "give float64[pairs]", got))
    if not all(torch.isfinite(values).all() for values in (losses, *gradients)):
        raise ValueError(must(name, "give finite losses and gradients", f"{losses.tolist()} for 3 pairs"))
    return function
