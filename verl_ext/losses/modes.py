"""The five loss modes: one coefficient a target token, one normaliser a step.

    L = Σ_t a_t·ℓ_t / Z        a_t = loss_mask_t · loss_weight_t · c[category_t] · g

| mode         | g                            | Z                   | the mean it is                                  |
|--------------|------------------------------|---------------------|-------------------------------------------------|
| `token`      | 1                            | Σ a_t               | over target tokens                              |
| `sequence`   | 1 / N_doc                    | Σ a_t               | over documents of their token means (LongAlign) |
| `sqrt`       | 1 / √N_doc                   | Σ a_t               | between the two                                 |
| `pack`       | 1 / N_pack                   | packs with a target | over packs of their token means                 |
| `longwriter` | n_docs / (per_pack · N_pack) | packs with a target | a pack's token mean times its documents         |

N counts the target tokens of a document or pack, n_docs the documents of a pack. A pack without a target has no token
mean, so it is no term of the mean over packs. With every weight 1, `sequence` is LongAlign's (1/M) Σ_i L_i / N_i
(https://arxiv.org/abs/2401.18058) and `longwriter` is LongWriter's weight of pack losses
(https://arxiv.org/abs/2408.07055).

Everything here comes from data alone, so Z is known before the first forward pass. Pure numpy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

MODES = ("token", "sequence", "sqrt", "pack", "longwriter")


@dataclass(frozen=True)
class LossSpec:
    """What `loss` says, with categories as dense indices.

    Attributes:
        mode: one of :data:`MODES`.
        category_weights: float64[C + 1] by dense category index; index 0 is "no category".
        documents_per_pack: LongWriter's constant; read by ``longwriter`` alone.
    """

    mode: str = "token"
    category_weights: np.ndarray = field(default_factory=lambda: np.ones(1))
    documents_per_pack: int = 30

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"loss.mode must be one of {', '.join(MODES)}; got {self.mode}")


@dataclass(frozen=True)
class PackCoefficients:
    """One pack's share of the loss.

    Attributes:
        coefficients: float64[T], a_t of the token *at* t, before normalising.
        normaliser: the pack's term of Z.
    """

    coefficients: np.ndarray
    normaliser: float


def category_weight_table(weights: Mapping[str, float] | None, names: tuple[str, ...]) -> np.ndarray:
    """float64[C + 1] by dense category index from `loss.category_weights`; 1 for no category and for names not in it.

    A weight for a category that a dataset lacks has nothing to weigh there (a validation set may hold fewer).
    """
    return np.array([1.0, *((weights or {}).get(name, 1.0) for name in names)])


def pack_coefficients(
    spec: LossSpec,
    loss_mask: np.ndarray,
    category_index: np.ndarray,
    offsets: np.ndarray,
    loss_weight: np.ndarray | None = None,
    documents: int | None = None,
) -> PackCoefficients:
    """a_t and Z's term of one pack.

    Args:
        loss_mask: [T], 1 where the token at t is a target; a document's first token never is.
        category_index: int[T], dense category index of the token at t, 0 where it has none.
        offsets: int[D + 1], document d is ``[offsets[d], offsets[d + 1])``; D may count padding as a document.
        loss_weight: [T] or None for 1.
        documents: documents of the pack without padding; D when None.
    """
    targets = loss_mask.astype(np.float64)
    assert not targets[offsets[:-1]].any(), "a document's first token is never a target"
    weights = targets * spec.category_weights[category_index]
    if loss_weight is not None:
        weights = weights * loss_weight
    in_pack = targets.sum()
    has_target = float(in_pack > 0)
    if spec.mode == "token":
        return PackCoefficients(weights, weights.sum())
    if spec.mode in ("sequence", "sqrt"):
        in_document = np.add.reduceat(targets, offsets[:-1])
        share = np.maximum(in_document, 1.0) ** (-1.0 if spec.mode == "sequence" else -0.5)
        weights = weights * np.repeat(share, np.diff(offsets))
        return PackCoefficients(weights, weights.sum())
    weights = weights / max(in_pack, 1.0)
    if spec.mode == "longwriter":
        count = len(offsets) - 1 if documents is None else documents
        weights = weights * (count / spec.documents_per_pack)
    return PackCoefficients(weights, has_target)


def shift_left(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[T]: the value of the next token *inside the document*, 0 at each document's last token.

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
