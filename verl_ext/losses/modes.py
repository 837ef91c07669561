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
A new mode is its name in MODES and its branch in `pack_coefficients`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from verl_ext.values import Options, check_choice, option, show

HEADS = ("fused", "targets", "plain")  # from the least memory to the most
MODES = ("token", "sequence", "sqrt", "pack", "longwriter")


@dataclass(frozen=True)
class LossOptions(Options):
    """Which mean is minimised. Category names are texts: one without a name is named by its number."""

    prefix: ClassVar[str] = "loss"

    mode: str = option("token", "the mean that is minimised", choices=MODES)
    category_weights: dict[str, float] | None = option(
        None, "{category: weight ≥ 0}; a category not named has weight 1"
    )
    documents_per_pack: int = option(30, "LongWriter's constant; only mode longwriter uses it", least=1)
    head: str = option(
        "fused",
        "logits in memory: fused: a block of the targets'; targets: those of all targets; plain: those of all tokens",
        choices=HEADS,
    )
    head_block_mib: int | None = option(
        None, "MiB of logits that head=fused holds at a time; null: 256, on GPUs 1024", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.category_weights is not None:
            named = {str(name): float(weight) for name, weight in self.category_weights.items()}
            object.__setattr__(self, "category_weights", named)

    def problems(self) -> Iterable[str | None]:
        weights = self.category_weights
        if weights is None:
            return
        if not isinstance(weights, Mapping):
            yield f"loss.category_weights must map categories to weights; got {show(weights)}"
            return
        for name, weight in weights.items():
            key = f"loss.category_weights.{name}"
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                yield f"{key} must be a number; got {show(weight)}"
            elif not math.isfinite(weight) or weight < 0:
                yield f"{key} must be finite and at least 0; got {weight}"

    @property
    def head_flags(self) -> dict[str, Any]:
        """What a batch says to the engine about its head."""
        return {"head": self.head, "head_block_bytes": (self.head_block_mib or 256) * 2**20}

    def spec(self, names: Sequence[str]) -> "LossSpec":
        """The loss over data whose categories have these names."""
        return LossSpec(self.mode, category_weight_table(self.category_weights, names), self.documents_per_pack)


@dataclass(frozen=True)
class LossSpec:
    """The loss with categories as dense indices: category_weights float64[C + 1], index 0 is "no category"."""

    mode: str = "token"
    category_weights: np.ndarray = field(default_factory=lambda: np.ones(1))
    documents_per_pack: int = 30

    def __post_init__(self) -> None:
        check_choice("loss.mode", self.mode, MODES)


class PackCoefficients(NamedTuple):
    """One pack's share of the loss: float64[T], a_t of the token *at* t before normalising, and its term of Z."""

    coefficients: np.ndarray
    normaliser: float


def category_weight_table(weights: Mapping[str, float] | None, names: Sequence[str]) -> np.ndarray:
    """float64[C + 1] by dense category index from `loss.category_weights`; 1 for no category and for names not in it.

    A weight for a category that a dataset lacks has no effect there: a validation set may hold fewer.
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

    loss_mask [T], 1 where the token at t is a target; category_index int[T], dense, 0 where it has none; offsets
    int[D + 1], document d is ``[offsets[d], offsets[d + 1])``; loss_weight [T] or None for 1; documents: those of the
    pack without padding, which D may count; D when None.
    """
    targets = loss_mask.astype(np.float64)
    assert not targets[offsets[:-1]].any(), "a document's first token is never a target"
    weights = targets * spec.category_weights[category_index]
    if loss_weight is not None:
        weights = weights * loss_weight
    if spec.mode == "token":
        return PackCoefficients(weights, weights.sum())
    if spec.mode in ("sequence", "sqrt"):
        in_document = np.add.reduceat(targets, offsets[:-1])
        share = np.maximum(in_document, 1.0) ** (-1.0 if spec.mode == "sequence" else -0.5)
        weights = weights * np.repeat(share, np.diff(offsets))
        return PackCoefficients(weights, weights.sum())
    in_pack = targets.sum()
    weights = weights / max(in_pack, 1.0)
    if spec.mode == "longwriter":
        count = len(offsets) - 1 if documents is None else documents
        weights = weights * (count / spec.documents_per_pack)
    return PackCoefficients(weights, float(in_pack > 0))


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
