"""The order in which an epoch visits packs: balanced, unbiased steps.

    12 packs by cost       a b c | d e f | g h i | j k l       groups of 3, one pack for each of 3 ranks
    shuffled into steps    step 0:  g h i | a b c    step 1:  j k l | d e f

Ranks wait for the most expensive pack of a micro-step, but hardly if packs have similar costs (GLM-Long's sorted
packing). The groups are shuffled by seed and epoch, so costs follow one another as in any shuffle. With gradient
accumulation, a step has several groups, which removes the bias of steps of similar packs (LongAlign's sorted batching).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_ext.options import whole_number
from verl_ext.packing.plan import PackPlan

# One step in this many comes out of a shuffle on a single cost level and is changed. That is rare, so the order of
# groups stays as uncorrelated as a shuffle's.
_RARE = 64
_TRIES = 64


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

    def documents(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Return float64[D] of lengths integer[D], in tokens."""
        length = np.asarray(lengths, np.int64)
        return self._whole(length, int(length.max(initial=0))).astype(np.float64)

    def packs(self, plan: PackPlan, lengths: ArrayLike) -> NDArray[np.float64]:
        """Return float64[P], the cost of each pack; lengths integer[D]."""
        if plan.num_packs == 0:
            return np.zeros(0)
        length = np.asarray(lengths, np.int64)
        # A document of all of a pack's tokens costs at least as much as the pack.
        cost = self._whole(length, int(plan.pack_sums(length).max()))
        return np.add.reduceat(cost[plan.document_index], plan.pack_offsets[:-1]).astype(np.float64)

    def _whole(self, length: NDArray[np.int64], longest: int) -> NDArray[Any]:
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


def micro_step_costs(
    costs: NDArray[np.float64], ranks: int, batch_size: int | None = None, micro_batch_size: int = 1
) -> NDArray[np.float64]:
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
    by_rank = slots.reshape(len(slots), -1, micro_batch_size, ranks).sum(axis=2)
    return by_rank.max(axis=2)


def cost_over_ideal(
    costs: NDArray[np.float64], ranks: int, batch_size: int | None = None, micro_batch_size: int = 1
) -> float:
    """Return an epoch's time over a perfect one's, at least 1.

    The arguments are those of :func:`micro_step_costs`.
    """
    total = costs.sum()
    if total == 0:
        return 1.0
    return float(micro_step_costs(costs, ranks, batch_size, micro_batch_size).sum() * ranks / total)


def epoch_order(num_packs: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return int64[P], a permutation of packs by seed and epoch alone."""
    whole_number("num_packs", num_packs, least=0)
    whole_number("data.seed", seed, least=0)
    whole_number("epoch", epoch, least=0)
    return np.random.default_rng([seed, epoch]).permutation(num_packs)


def balanced_order(
    costs: NDArray[np.float64], batch_size: int, group_size: int, seed: int, epoch: int, drop_last: bool = False
) -> NDArray[np.int64]:
    """Return int64[P], an epoch's order of packs, `batch_size` a step.

    Every step consists of groups of `group_size` packs (and a smaller group if that does not divide it) whose costs are
    neighbours among the costs (float64[P]) of the epoch. So does the last step, of the packs that do not fill a step.
    `drop_last` leaves these packs out: the same ones for every group size.
    """
    assert 1 <= group_size <= batch_size, "a group lies within a step"
    order = epoch_order(len(costs), seed, epoch)
    if drop_last:
        order = order[: len(order) // batch_size * batch_size]
    by_cost = order[np.argsort(costs[order], kind="stable")]  # equal costs stay shuffled
    steps, rest = divmod(len(order), batch_size)
    groups, smaller = divmod(batch_size, group_size)
    rest_groups, rest_smaller = divmod(rest, group_size)
    rng = np.random.default_rng([seed, epoch, group_size])

    # Groups are cut from the packs by cost, then shuffled whole, so that ranks stay even and steps stay unbiased.
    kinds = np.repeat([0, 1, 2], [steps * groups + rest_groups, steps * bool(smaller), bool(rest_smaller)])
    if smaller or rest_smaller:
        rng.shuffle(kinds)  # smaller groups lie anywhere among the costs
    sizes = np.asarray([group_size, smaller, rest_smaller])[kinds]
    starts = np.cumsum(sizes) - sizes
    number = rng.permutation(steps * groups + rest_groups)
    number[: steps * groups] = _mixed(number[: steps * groups].reshape(steps, groups), len(number), rng).ravel()
    full = starts[kinds == 0][number]
    table = _packs(full[: steps * groups], group_size).reshape(steps, groups * group_size)
    table = np.hstack([table, _packs(rng.permutation(starts[kinds == 1]), smaller).reshape(steps, smaller)])
    last = [_packs(full[steps * groups :], group_size), _packs(starts[kinds == 2], rest_smaller)]
    return by_cost[np.concatenate([table, *last], axis=None)]


def _packs(starts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return int64[n, size]: the positions of the groups that begin at `starts`."""
    return starts[:, None] + np.arange(size)


def _mixed(table: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return int64[steps, groups] with steps of mixed costs.

    `table` has group numbers below `count`, in ascending cost. A step on one cost level, a run of neighbouring numbers,
    exchanges a group with another; these are at most 1 of 64.
    """
    steps, groups = table.shape
    if groups == 1 or steps == 1:
        return table
    table = table.copy()
    levels = min(int(np.ceil(_RARE ** (1 / (groups - 1)))), count)
    level = table * levels // count
    for step in np.flatnonzero((level == level[:, :1]).all(axis=1)):
        if (level[step] != level[step, 0]).any():
            continue  # an earlier step has exchanged a group with it
        for other, slot in zip(rng.integers(steps, size=_TRIES), rng.integers(groups, size=_TRIES), strict=True):
            kept = np.delete(level[other], slot)
            if level[other, slot] != level[step, 0] and (kept != level[step, 0]).any():
                table[step, 0], table[other, slot] = table[other, slot], table[step, 0]
                level[step, 0], level[other, slot] = level[other, slot], level[step, 0]
                break
    return table
