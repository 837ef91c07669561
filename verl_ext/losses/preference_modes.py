"""The losses of pairs of answers, by their sums of log-probabilities.

With c = x_c − x_c(ref), r = x_r − x_r(ref), m = β(c − r), ε = label_smoothing, σ the logistic function:

| `loss.mode` | f of a pair                                        | reference | length | β   |
|-------------|----------------------------------------------------|-----------|--------|-----|
| `dpo`       | −(1 − ε)·log σ(m) − ε·log σ(−m)                     | yes       | sum    | 0.1 |
| `dpo_norm`  | the same of means (Tulu 3)                         | yes       | mean   | 5   |
| `robust`    | (−(1 − ε)·log σ(m) + ε·log σ(−m)) / (1 − 2ε)        | yes       | sum    | 0.1 |
| `ipo`       | (c − r − 1/(2β))²                                  | yes       | mean   | 0.1 |
| `hinge`     | max(0, 1 − m)                                      | yes       | sum    | 0.1 |
| `simpo`     | `dpo` of m = β(x_c − x_r) − γ, γ = margin          | no        | mean   | 2   |
| `cpo`       | `dpo` of m = β(x_c − x_r)                          | no        | sum    | 0.1 |
| `orpo`      | −β·log σ(logit x_c − logit x_r)                    | no        | mean   | 0.1 |
| `apo_zero`  | 1 − σ(βc) + σ(βr)                                  | yes       | sum    | 0.1 |
| `apo_down`  | σ(βc) + 1 − σ(m)                                   | yes       | sum    | 0.1 |
| `dpop`      | `dpo` of m = β(c − r − κ·max(0, −c)), κ = penalty  | yes       | sum    | 0.1 |
| `kto`       | of an answer: λ·(1 − σ(±(βr_d − z)))               | yes       | sum    | 0.1 |

logit x = x − log(1 − eˣ). `apo_zero` also takes answers with a label alone, each with its own term of the sum. z of
`kto` is the `baseline` of the whole step, which is not differentiated; λ is desirable_weight or undesirable_weight.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

_LEAST_GAP = -1e-12  # the largest mean log-probability, for log(1 − eˣ)


class FormulaOptions(Protocol):
    """The options that formulas read."""

    @property
    def scale(self) -> float:
        """The β that is used."""

    @property
    def label_smoothing(self) -> float:
        """The share ε of pairs taken to be the wrong way round."""

    @property
    def margin(self) -> float:
        """The least margin γ of simpo."""

    @property
    def penalty(self) -> float:
        """The factor κ of dpop."""


class Sides(NamedTuple):
    """The sums of P pairs, float64[P] each."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    reference_chosen: torch.Tensor
    reference_rejected: torch.Tensor

    @property
    def ratios(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-ratios c and r to the reference."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def gap(self) -> torch.Tensor:
        """The difference c − r."""
        chosen, rejected = self.ratios
        return chosen - rejected


Formula = Callable[[Sides, Any], torch.Tensor]  # (the sums, PreferenceOptions) → float64[P]


def _smoothed(margin: torch.Tensor, smoothing: float) -> torch.Tensor:
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def dpo(sides: Sides, o: FormulaOptions) -> torch.Tensor:
    """Return DPO's loss (arXiv 2305.18290), with label smoothing that of cDPO."""
    return _smoothed(o.scale * sides.gap, o.label_smoothing)


def robust(sides: Sides, o: FormulaOptions) -> torch.Tensor:
    """Return robust DPO's loss (arXiv 2403.00409), unbiased under flipped labels."""
    margin, smoothing = o.scale * sides.gap, o.label_smoothing
    return (-(1 - smoothing) * F.logsigmoid(margin) + smoothing * F.logsigmoid(-margin)) / (1 - 2 * smoothing)


def ipo(sides: Sides, o: FormulaOptions) -> torch.Tensor:
    """Return IPO's loss (arXiv 2310.12036)."""
    return (sides.gap - 1 / (2 * o.scale)) ** 2


def hinge(sides: Sides, o: FormulaOptions) -> torch.Tensor:
    """Return SLiC's hinge loss (arXiv 2305.10425)."""
    return torch.relu(1 - o.scale * sides.gap)


def simpo(sides: Sides, o: FormulaOptions) -> torch.Tensor:
    """Return SimPO's loss (arXiv 2405.14734), which has no reference."""
    return _smoothed(o.scale * (sides.chosen - sides.rejected) - o.margin, o.label_smoothing)


def cpo(sides: Sides, o: FormulaOptions) -> torch.Tensor:
    """Return CPO's loss (arXiv 2401.08417), without its likelihood term."""
    return _smoothed(o.scale * (sides.chosen - sides.rejected), o.label_smoothing)


def orpo(sides: Sides, o: FormulaOptions) -> torch.Tensor:
    """Return ORPO's odds-ratio loss (arXiv 2403.07691), without its likelihood term."""
    logit = [x - _log1mexp(x) for x in (sides.chosen, sides.rejected)]
    return -o.scale * F.logsigmoid(logit[0] - logit[1])


def apo_zero(sides: Sides, o: FormulaOptions) -> torch.Tensor:
    """Return APO-zero's loss (arXiv 2408.06266): preferred answers up, rejected ones down."""
    chosen, rejected = sides.ratios
    return 1 - torch.sigmoid(o.scale * chosen) + torch.sigmoid(o.scale * rejected)


def apo_down(sides: Sides, o: FormulaOptions) -> torch.Tensor:
    """Return APO-down's loss (arXiv 2408.06266): both answers down, rejected ones more."""
    return torch.sigmoid(o.scale * sides.ratios[0]) + 1 - torch.sigmoid(o.scale * sides.gap)


def dpop(sides: Sides, o: FormulaOptions) -> torch.Tensor:
    """Return DPO-Positive's loss (arXiv 2402.13228), which keeps preferred answers likely."""
    drop = torch.relu(-sides.ratios[0])
    return _smoothed(o.scale * (sides.gap - o.penalty * drop), o.label_smoothing)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 − eˣ) for x < 0, exact near 0 too."""
    x = x.clamp(max=_LEAST_GAP)
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


class PreferenceMode(NamedTuple):
    """A loss mode: its formula (None for answers alone), defaults and needs."""

    formula: Formula | None
    beta: float = 0.1
    length: str = "sum"
    fixed_length: bool = False
    has_reference: bool = True
    takes_labels: bool = False
    nll_weight: float = 0.0


PREFERENCE_MODES: dict[str, PreferenceMode] = {
    "dpo": PreferenceMode(dpo),
    "dpo_norm": PreferenceMode(dpo, beta=5.0, length="mean", fixed_length=True),
    "robust": PreferenceMode(robust),
    "ipo": PreferenceMode(ipo, length="mean"),
    "hinge": PreferenceMode(hinge),
    "simpo": PreferenceMode(simpo, beta=2.0, length="mean", fixed_length=True, has_reference=False),
    "cpo": PreferenceMode(cpo, has_reference=False, nll_weight=1.0),
    "orpo": PreferenceMode(orpo, length="mean", fixed_length=True, has_reference=False, nll_weight=1.0),
    "apo_zero": PreferenceMode(apo_zero, takes_labels=True),
    "apo_down": PreferenceMode(apo_down),
    "dpop": PreferenceMode(dpop),
    "kto": PreferenceMode(None, takes_labels=True),
}
