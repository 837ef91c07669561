"""CostModel: what a document costs to run, linear plus quadratic in its length; and how evenly ranks share a step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_ext.packing.plan import PackPlan


@dataclass(frozen=True)
class CostModel:
    """cost(l) = linear·l + quadratic·l² + windowed·a(l), in any one unit.

    a(l) = l² up to `window` tokens and 2·l·window − window² beyond: twice the area under a causal mask of that width.
    The factors are whole numbers, so that sums below 2^53 are exact, and an order by cost the same on every machine.
    """

    linear: int
    quadratic: int
    windowed: int = 0
    window: int | None = None

    def __str__(self) -> str:
        windowed = f" + {self.windowed}·l·min(l, {self.window})" if self.windowed else ""
        return f"{self.linear}·l + {self.quadratic}·l²{windowed}"

    def documents(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """float64[D] of lengths integer[D], in tokens."""
        length = np.asarray(lengths, np.float64)
        cost = self.linear * length + self.quadratic * length**2
        if self.windowed:
            reach = length if self.window is None else np.minimum(length, self.window)
            cost += self.windowed * reach * (2 * length - reach)
        return cost

    def packs(self, plan: PackPlan, lengths: ArrayLike) -> NDArray[np.float64]:
        """float64[P]: the documents' costs summed over each pack of `plan`; lengths integer[D], one a document."""
        if plan.num_packs == 0:
            return np.zeros(0)
        return np.add.reduceat(self.documents(lengths)[plan.document_index], plan.pack_offsets[:-1])


TOKENS = CostModel(linear=1, quadratic=0)


def cost_over_ideal(
    costs: NDArray[np.float64], ranks: int, batch_size: int | None = None, micro_batch_size: int = 1
) -> float:
    """How much longer an epoch takes than with perfectly shared steps, at least 1 (1 for no cost at all).

    costs float64[P] of the packs in the order in which they are visited; steps of `batch_size` packs (null: one step).
    A micro-step deals the next micro_batch_size × ranks packs of its step out and takes as long as its dearest rank.
    """
    total = costs.sum()
    if total == 0:
        return 1.0
    batch = min(batch_size or len(costs), len(costs))
    dealt = ranks * micro_batch_size
    slots = np.zeros((-(-len(costs) // batch), -(-batch // dealt) * dealt))
    full = len(costs) // batch
    slots[:full, :batch] = costs[: full * batch].reshape(full, batch)
    slots[full:, : len(costs) - full * batch] = costs[full * batch :]
    by_rank = slots.reshape(-1, micro_batch_size, ranks).sum(axis=1)
    return float(by_rank.max(axis=1).sum() * ranks / total)
