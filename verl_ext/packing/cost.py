"""The cost of documents, packs, and the steps that visit them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_ext.packing.plan import Floats, Ints, PackPlan


@dataclass(frozen=True)
class CostModel:
    """The cost of a document: linear·l + quadratic·l² + windowed·a(l).

    a(l) = l² up to `window` tokens and 2·l·window − window² beyond: twice the area under a causal mask of that width.
    The factors are whole numbers, which are summed as such and rounded once, so that an order by cost is the same on
    every machine.
    """

    linear: int
    quadratic: int
    windowed: int = 0
    window: int | None = None

    def __str__(self) -> str:
        windowed = f" + {self.windowed}·l·min(l, {self.window})" if self.windowed else ""
        return f"{self.linear}·l + {self.quadratic}·l²{windowed}"

    def documents(self, lengths: ArrayLike) -> Floats:
        """Return float64[D] of lengths integer[D], in tokens."""
        length = np.asarray(lengths, np.int64)
        return self._whole(length, int(length.max(initial=0))).astype(np.float64)

    def packs(self, plan: PackPlan, lengths: ArrayLike) -> Floats:
        """Return float64[P], the cost of each pack; lengths integer[D].

        Tokens that a document shares with the one before it cost nothing.
        """
        if plan.num_packs == 0:
            return np.zeros(0)
        length = np.asarray(lengths, np.int64)
        # A document of all of a pack's tokens costs at least as much as the pack.
        longest = int(plan.pack_sums(length).max())
        cost = self._whole(length, longest)[plan.document_index]
        if plan.begins is not None:
            cost = cost - self._whole(plan.begins.astype(np.int64), longest)
        return np.add.reduceat(cost, plan.pack_offsets[:-1]).astype(np.float64)

    def _whole(self, length: Ints, longest: int) -> NDArray[Any]:
        """Return documents' whole costs, as Python's integers if beyond int64."""
        linear, quadratic, windowed = (round(factor) for factor in (self.linear, self.quadratic, self.windowed))
        if linear * longest + (quadratic + windowed) * longest**2 >= 1 << 63:
            length = length.astype(object)
        cost = linear * length + quadratic * length**2
        if windowed:
            reach = length if self.window is None else np.minimum(length, self.window)
            cost += windowed * reach * (2 * length - reach)
        return cost


TOKENS = CostModel(linear=1, quadratic=0)


def micro_step_costs(costs: Floats, ranks: int, batch_size: int | None = None, micro_batch_size: int = 1) -> Floats:
    """Return float64[steps, M], micro-steps' costs to the slowest rank, 0 if empty.

    costs float64[P] of the packs in the order in which they are visited; steps of `batch_size` packs (None: one step).
    A micro-step deals the next micro_batch_size × ranks packs of its step out and takes as long as its slowest rank.
    """
    batch = max(min(batch_size or len(costs), len(costs)), 1)
    dealt = ranks * micro_batch_size
    slots = np.zeros((-(-len(costs) // batch), -(-batch // dealt) * dealt))
    full = len(costs) // batch
    slots[:full, :batch] = costs[: full * batch].reshape(full, batch)
    slots[full:, : len(costs) - full * batch] = costs[full * batch :]
    by_rank = slots.reshape(len(slots), -1, micro_batch_size, ranks).sum(axis=2)  # [steps, M, ranks]
    return by_rank.max(axis=2)


def cost_over_ideal(costs: Floats, ranks: int, batch_size: int | None = None, micro_batch_size: int = 1) -> float:
    """Return an epoch's time over a perfect one's, at least 1.

    The arguments are those of :func:`micro_step_costs`.
    """
    total = costs.sum()
    if total == 0:
        return 1.0
    return float(micro_step_costs(costs, ranks, batch_size, micro_batch_size).sum() * ranks / total)
