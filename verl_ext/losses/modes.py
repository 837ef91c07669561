"""The loss modes: a coefficient a target, a normaliser a step.

    L = Σ_t a_t·ℓ_t / Z        a_t = loss_mask_t · loss_weight_t · c[category_t] · g

| mode         | g                            | Z                   | the mean it is                                  |
|--------------|------------------------------|---------------------|-------------------------------------------------|
| `token`      | 1                            | Σ a_t               | over target tokens                              |
| `sequence`   | 1 / N_doc                    | Σ a_t               | over documents of their token means (LongAlign) |
| `sqrt`       | 1 / √N_doc                   | Σ a_t               | between the two                                 |
| `pack`       | 1 / N_pack                   | packs with a target | over packs of their token means                 |
| `longwriter` | n_docs / (per_pack · N_pack) | packs with a target | a pack's token mean times its documents         |

N counts the target tokens of a document or pack, n_docs the documents of a pack that have a target. A pack without a
target has no token mean, so the mean over packs leaves it out. With every weight 1, `sequence` is LongAlign's (1/M)
Σ_i L_i / N_i (https://arxiv.org/abs/2401.18058) and `longwriter` is LongWriter's weight of pack losses
(https://arxiv.org/abs/2408.07055).

Everything here comes from data alone, so Z is known before the first forward pass. Pure numpy.
A mode is a function of one pack and its line in MODES; `loss.custom_cls` names one of the user's own.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.options import check_choice

Array = NDArray[Any]


class PackCoefficients(NamedTuple):
    """One pack's a_t *at* each token, float64[T], and term of Z."""

    coefficients: NDArray[np.float64]
    normaliser: float


# (mask, weights, lengths) of a pack without its padding: mask float64[T], 1 where the token at t is a target; weights
# float64[T], loss_mask · loss_weight · c; lengths int64[D], tokens of each document, T in total. It returns float64[T],
# 0 where mask is 0, and the pack's term of Z.
Mode = Callable[..., tuple[NDArray[np.float64], float]]


def token(mask: Array, weights: Array, lengths: Array) -> PackCoefficients:
    """Weigh all target tokens alike."""
    return PackCoefficients(weights, weights.sum())


def sequence(mask: Array, weights: Array, lengths: Array, power: float = 1.0) -> PackCoefficients:
    """Divide each document's weights by its number of targets to a power."""
    of_document = np.add.reduceat(mask, np.cumsum(lengths) - lengths)
    weights = weights * np.repeat(np.maximum(of_document, 1.0) ** -power, lengths)
    return PackCoefficients(weights, weights.sum())


def pack(mask: Array, weights: Array, lengths: Array) -> PackCoefficients:
    """Divide weights by the pack's targets; Z counts packs with any."""
    return PackCoefficients(weights / max(mask.sum(), 1.0), float(mask.any()))


def longwriter(mask: Array, weights: Array, lengths: Array, documents_per_pack: int = 30) -> PackCoefficients:
    """Weigh as `pack`, times documents with a target over `documents_per_pack`.

    LongWriter's code counts documents by the sum of weights that add up to 1 in each document with a target.
    """
    coefficients, normaliser = pack(mask, weights, lengths)
    documents = np.count_nonzero(np.add.reduceat(mask, np.cumsum(lengths) - lengths))
    return PackCoefficients(coefficients * (documents / documents_per_pack), normaliser)


MODES: dict[str, Mode] = {
    "token": token,
    "sequence": sequence,
    "sqrt": functools.partial(sequence, power=0.5),
    "pack": pack,
    "longwriter": longwriter,
}


@dataclass(frozen=True)
class LossSpec:
    """The loss with categories as dense indices; 0 is "no category".

    category_weights: float64[C + 1]. mode: a name of MODES or a function like them.
    """

    mode: str | Mode = "token"
    category_weights: Array = field(default_factory=lambda: np.ones(1))
    documents_per_pack: int = 30

    def __post_init__(self) -> None:
        if not callable(self.mode):
            check_choice("loss.mode", self.mode, MODES)

    @functools.cached_property
    def function(self) -> Mode:
        """The function of the mode, with `documents_per_pack` bound if it takes it."""
        mode = self.mode if callable(self.mode) else MODES[self.mode]
        if "documents_per_pack" not in inspect.signature(mode).parameters:
            return mode
        return functools.partial(mode, documents_per_pack=self.documents_per_pack)


def category_weight_table(weights: Mapping[str, float] | None, names: Sequence[str]) -> Array:
    """Return float64[C + 1] by dense category index, 1 if unnamed.

    A weight for a category that a dataset lacks has no effect there: a validation set may hold fewer categories.
    """
    return np.array([1.0, *((weights or {}).get(name, 1.0) for name in names)])


def pack_coefficients(
    spec: LossSpec,
    loss_mask: Array,
    category_index: Array,
    offsets: Array,
    loss_weight: Array | None = None,
    documents: int | None = None,
) -> PackCoefficients:
    """Return a_t and the term of Z of one pack.

    loss_mask is [T], 1 if the token at t is a target; category_index int[T], dense, 0 for tokens without a category;
    offsets int[D + 1], document d is ``[offsets[d], offsets[d + 1])``; loss_weight [T], or None for 1; documents the
    number without padding, which D may count.
    """
    targets = loss_mask.astype(np.float64)
    assert not targets[offsets[:-1]].any(), "a document's first token is never a target"
    weights = targets * spec.category_weights[category_index]
    if loss_weight is not None:
        weights = weights * loss_weight
    real = offsets if documents is None else offsets[: documents + 1]
    coefficients, normaliser = spec.function(targets[: real[-1]], weights[: real[-1]], np.diff(real))
    return PackCoefficients(np.pad(coefficients, (0, len(targets) - real[-1])), normaliser)


def shift_left(values: Array, offsets: Array) -> Array:
    """Return [T], the next token's value *inside the document*, else 0.

    The model's output at t predicts token t + 1; shifting here, before any split over sequence-parallel ranks, means
    that no token is ever predicted from another document or lost at a rank's edge.

    ```
    offsets 0 3 7     values  0 0 1 | 0 1 1 1     shifted  0 1 0 | 1 1 1 0
    ```
    """
    shifted = np.empty_like(values)
    shifted[:-1] = values[1:]
    shifted[offsets[1:] - 1] = 0
    return shifted
