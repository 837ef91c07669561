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
target has no token mean, so it is no term of the mean over packs. With every weight 1, `sequence` is LongAlign's (1/M)
Σ_i L_i / N_i (https://arxiv.org/abs/2401.18058) and `longwriter` is LongWriter's weight of pack losses
(https://arxiv.org/abs/2408.07055).

Everything here comes from data alone, so Z is known before the first forward pass. Pure numpy.
A mode is a function of one pack and its line in MODES; `loss.custom_cls` names one of the user's own.
"""

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from verl_ext.custom import custom_object
from verl_ext.options import Options, check_choice, first_line, option, options_of, show

HEADS = ("fused", "targets", "plain")  # from the least memory to the most


class PackCoefficients(NamedTuple):
    """One pack's a_t *at* each token, float64[T], and term of Z."""

    coefficients: NDArray[np.float64]
    normaliser: float


# (mask, weights, lengths) of a pack without its padding: mask float64[T], 1 where the token at t is a target; weights
# float64[T], loss_mask · loss_weight · c; lengths int64[D], tokens of each document, T in total. It returns float64[T],
# 0 where mask is 0, and the pack's term of Z.
Mode = Callable[..., tuple[NDArray[np.float64], float]]


def token(mask: NDArray[Any], weights: NDArray[Any], lengths: NDArray[Any]) -> PackCoefficients:
    """Weigh all target tokens alike."""
    return PackCoefficients(weights, weights.sum())


def sequence(mask: NDArray[Any], weights: NDArray[Any], lengths: NDArray[Any], power: float = 1.0) -> PackCoefficients:
    """Divide each document's weights by its number of targets to a power."""
    of_document = np.add.reduceat(mask, np.cumsum(lengths) - lengths)
    weights = weights * np.repeat(np.maximum(of_document, 1.0) ** -power, lengths)
    return PackCoefficients(weights, weights.sum())


def pack(mask: NDArray[Any], weights: NDArray[Any], lengths: NDArray[Any]) -> PackCoefficients:
    """Divide weights by the pack's targets; Z counts packs with any."""
    return PackCoefficients(weights / max(mask.sum(), 1.0), float(mask.any()))


def longwriter(
    mask: NDArray[Any], weights: NDArray[Any], lengths: NDArray[Any], documents_per_pack: int = 30
) -> PackCoefficients:
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
class CustomLoss(Options):
    """A loss mode of the user's own, by file and name."""

    prefix: ClassVar[str] = "loss.custom_cls"

    path: str | None = option(None, "Python file, or pkg://module, with your own loss mode; see docs/loss.md")
    name: str | None = option(None, "its function: (mask, weights, lengths) -> (coefficients, its term of Z)")

    def problems(self) -> Iterable[str | None]:
        """Yield the problem of a function that cannot be used."""
        try:
            self.checked()
        except ValueError as error:
            yield str(error)

    @property
    def is_given(self) -> bool:
        """Whether the user names a function."""
        return bool(self.path or self.name)

    def checked(self) -> Mode | None:
        """Return the function with checks of its results, or None.

        Raises ValueError if there is no function of that name, or if it fails for a trial pack.
        """
        if not self.is_given:
            return None
        function = custom_object(self.prefix, self.path, self.name)
        if not callable(function):
            raise ValueError(f"{self.prefix}.name must name a function; got {self.name} of {self.path}")
        mode = functools.partial(_checked, function, f"{self.prefix}.name={self.name}")
        lengths = np.array([4, 3, 1, 2])
        for mask in (np.array([0, 1, 1, 0, 0, 0, 1, 0, 0, 1.0]), np.zeros(10)):
            mode(mask, 2.0 * mask, lengths)
        return mode

    @property
    def fingerprint(self) -> str:
        """The name of the function and a digest of its module's source."""
        module = inspect.getmodule(custom_object(self.prefix, self.path, self.name))
        source = inspect.getsource(module) if module else ""
        return f"{self.name} ({hashlib.sha256(source.encode()).hexdigest()[:8]})"


def _checked(
    function: Mode, name: str, mask: NDArray[Any], weights: NDArray[Any], lengths: NDArray[Any]
) -> PackCoefficients:
    """Return a user function's result; raise ValueError if no loss."""

    def refuse(requirement: str, got: object) -> NoReturn:
        listed = ", ".join(map(str, lengths[:8].tolist())) + ", …" * (len(lengths) > 8)
        raise ValueError(f"{name} must {requirement}; got {got} for documents of {listed} tokens")

    try:
        coefficients, normaliser = function(mask.copy(), weights.copy(), lengths.copy())
        values, term = np.asarray(coefficients, np.float64), float(normaliser)
    except Exception as error:
        got = f"{type(error).__name__}: {first_line(error)}"
        refuse("give (coefficients, its term of Z) for (mask, weights, lengths)", got)
    if values.shape != mask.shape:
        refuse(f"give a coefficient for each of the {len(mask)} tokens", f"shape {values.shape}")
    wrong = ~(np.isfinite(values) & (values >= 0)) | ((mask == 0) & (values != 0))
    if wrong.any():
        at = int(wrong.argmax())
        refuse("give coefficients that are finite, at least 0, and 0 where mask is 0", f"{values[at]} at token {at}")
    if not (math.isfinite(term) and term >= 0 and (term > 0 or not values.any())):
        refuse("give a term of Z that is finite, and above 0 where a coefficient is", f"{term}")
    return PackCoefficients(values, term)


@dataclass(frozen=True)
class LossOptions(Options):
    """The options of the loss.

    Category names are texts; the name of an unnamed category is its number.
    """

    prefix: ClassVar[str] = "loss"

    mode: str = option("token", "the mean that is minimized", choices=MODES, resume="same")
    category_weights: dict[str, float] | None = option(
        None, "{category: weight ≥ 0}; categories that are not named have weight 1", resume="same"
    )
    documents_per_pack: int = option(30, "LongWriter's constant; only mode longwriter uses it", least=1, resume="same")
    head: str = option(
        "fused",
        "logits held in memory; fused: those of a block of targets; targets: of all targets; plain: of all tokens",
        choices=HEADS,
    )
    head_block_mib: int | None = option(
        None, "MiB of logits that head=fused holds at a time; null: 256, or 1024 on GPUs", least=1
    )
    custom_cls: CustomLoss = option(CustomLoss, "your own loss mode")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.category_weights is not None:
            named = {str(name): float(weight) for name, weight in self.category_weights.items()}
            object.__setattr__(self, "category_weights", named)

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each invalid combination or category weight."""
        if self.custom_cls.is_given and self.mode != "token":
            yield f"loss.mode must be token, its default, with loss.custom_cls; got {self.mode}"
        weights = self.category_weights
        if weights is None:
            return
        for name, weight in weights.items():
            key = f"loss.category_weights.{name}"
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                yield f"{key} must be a number; got {show(weight)}"
            elif not math.isfinite(weight) or weight < 0:
                yield f"{key} must be finite and at least 0; got {weight}"

    @property
    def head_flags(self) -> dict[str, Any]:
        """The fields of a batch that tell the engine about its head."""
        return {"head": self.head, "head_block_bytes": (self.head_block_mib or 256) * 2**20}

    def spec(self, names: Sequence[str]) -> "LossSpec":
        """Return the loss over data whose categories have these names."""
        mode = self.custom_cls.checked() or self.mode
        return LossSpec(mode, category_weight_table(self.category_weights, names), self.documents_per_pack)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The options, or a code's digest, that a resumed run must share."""
        shared = {name: getattr(self, name) for name, of in options_of(type(self)).items() if of.resume == "same"}
        if self.custom_cls.is_given:
            shared["mode"] = self.custom_cls.fingerprint
        return {f"loss.{name}": value for name, value in shared.items()}


@dataclass(frozen=True)
class LossSpec:
    """The loss with categories as dense indices; 0 is "no category".

    category_weights: float64[C + 1]. mode: a name of MODES or a function like them.
    """

    mode: str | Mode = "token"
    category_weights: np.ndarray = field(default_factory=lambda: np.ones(1))
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


def category_weight_table(weights: Mapping[str, float] | None, names: Sequence[str]) -> np.ndarray:
    """Return float64[C + 1] by dense category index, 1 if unnamed.

    A weight for a category that a dataset lacks has no effect there: a validation set may hold fewer categories.
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
    found, normaliser = spec.function(targets[: real[-1]], weights[: real[-1]], np.diff(real))
    if padding := len(targets) - real[-1]:
        found = np.pad(found, (0, padding))
    return PackCoefficients(found, normaliser)


def shift_left(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
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
