"""The options of the loss, and a mode of the user's own."""

import functools
import hashlib
import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np

from verl_ext.custom import custom_object
from verl_ext.losses.modes import MODES, Array, LossSpec, Mode, PackCoefficients, category_weight_table
from verl_ext.losses.preference_modes import PREFERENCE_MODES
from verl_ext.options import Options, first_line, must, option, options_of

HEADS = ("fused", "targets", "plain")  # from the least memory to the most


@dataclass(frozen=True)
class CustomLoss(Options):
    """A loss mode of the user's own, by file and name."""

    prefix: ClassVar[str] = "loss.custom_cls"

    path: str | None = option(
        None, "Python file, or pkg://module, with your own loss mode: docs/guides/training/own_loss.md"
    )
    name: str | None = option(None, "its function: (mask, weights, lengths) -> (coefficients, its term of Z)")

    def problems(self) -> Iterable[str | None]:
        """Yield the problem of a function that cannot be used."""
        try:
            self.load()
        except ValueError as error:
            yield str(error)

    @property
    def is_named(self) -> bool:
        """Whether the user names a function."""
        return bool(self.path or self.name)

    def function(self) -> Any:
        """Return what the name is of, or None; raise ValueError if it cannot be called."""
        if not self.is_named:
            return None
        if not callable(function := custom_object(self.prefix, self.path, self.name)):
            raise ValueError(must(f"{self.prefix}.name", "name a function", f"{self.name} of {self.path}"))
        return function

    def load(self) -> Mode | None:
        """Return the function with checks of its results, or None.

        Raises ValueError if there is no function of that name, or if it fails for a trial pack.
        """
        if (function := self.function()) is None:
            return None
        mode = functools.partial(_call, function, f"{self.prefix}.name={self.name}")
        # Try it before the weights are loaded, also on a pack without a target.
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


def _call(function: Mode, name: str, mask: Array, weights: Array, lengths: Array) -> PackCoefficients:
    """Return a user function's result; raise ValueError if it is not a loss."""

    def refuse(requirement: str, got: object) -> NoReturn:
        listed = ", ".join(map(str, lengths[:8].tolist())) + ", …" * (len(lengths) > 8)
        raise ValueError(must(name, requirement, f"{got} for documents of {listed} tokens"))

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
    modes: ClassVar[Iterable[str]] = tuple(MODES)

    mode: str = option("token", "the mean that is minimized", choices=(*MODES, *PREFERENCE_MODES), resume="same")
    category_weights: dict[str, float] | None = option(
        None, "{category: weight ≥ 0}; categories that are not named have weight 1", resume="same"
    )
    documents_per_pack: int = option(30, "LongWriter's constant; only mode longwriter uses it", least=1, resume="same")
    by_probability: bool = option(
        False,
        "true: each target counts with the probability that the model gives it, which gets no gradient (dynamic "
        "fine-tuning, DFT)",
        resume="same",
    )
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
            weights = {str(name): float(weight) for name, weight in self.category_weights.items()}
            object.__setattr__(self, "category_weights", weights)

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each invalid combination or category weight."""
        if self.custom_cls.is_named and self.mode != "token":
            yield must("loss.mode", "be token, its default, with loss.custom_cls", self.mode)
        yield from self.category_problems()

    def category_problems(self) -> Iterable[str]:
        """Yield a line for each invalid weight of a category."""
        for name, weight in (self.category_weights or {}).items():
            key = f"loss.category_weights.{name}"
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                yield must(key, "be a number", weight)
            elif not math.isfinite(weight) or weight < 0:
                yield must(key, "be finite and at least 0", weight)

    @property
    def head_flags(self) -> dict[str, Any]:
        """The fields of a batch that tell the engine about its head."""
        return {"head": self.head, "head_block_bytes": (self.head_block_mib or 256) * 2**20}

    def spec(self, names: Sequence[str]) -> LossSpec:
        """Return the loss over data whose categories have these names."""
        return LossSpec(self.mean, category_weight_table(self.category_weights, names), self.documents_per_pack)

    @property
    def mean(self) -> str | Mode:
        """The mean of token losses: a name of MODES or a function like them."""
        return self.custom_cls.load() or self.mode

    @property
    def stated(self) -> dict[str, Any]:
        """The options that a resumed run must share."""
        shared = (name for name, of in options_of(type(self)).items() if of.resume == "same")
        return {f"loss.{name}": getattr(self, name) for name in shared}

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The options, or a code's digest, that a resumed run must share."""
        own = {"loss.mode": self.custom_cls.fingerprint} if self.custom_cls.is_named else {}
        return {**self.stated, **own}
