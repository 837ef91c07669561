"""ReferenceOptions: the model whose log-probabilities a loss of preferences compares with."""

from dataclasses import dataclass
from typing import ClassVar

from verl_ext.options import Options, option

# Nats a target by which the model that a run begins with may differ from itself on other packs, by its precision.
_TOLERANCES = {"fp32": 1e-3}
_OF_HALF = 5e-2


@dataclass(frozen=True)
class ReferenceOptions(Options):
    """The reference of a loss of preferences."""

    prefix: ClassVar[str] = "reference"

    path: str | None = option(None, "folder or Hub name of the model; null: the one that the run begins with")
    tolerance: float | None = option(
        None,
        "largest reward a target, without beta, at step 1 of a new run, which begins with its reference; null: by the "
        "precision; 0: to the bit",
        least=0,
    )

    def tolerance_of(self, dtype: str) -> float:
        """Return the tolerance that is used, in nats a target."""
        return _TOLERANCES.get(dtype, _OF_HALF) if self.tolerance is None else self.tolerance
