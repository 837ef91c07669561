"""The order in which an epoch visits packs: balanced, unbiased steps.

    12 packs by cost       a b c | d e f | g h i | j k l       groups of 3, one pack for each of 3 ranks
    shuffled into steps    step 0:  g h i | a b c    step 1:  j k l | d e f

Ranks wait for the most expensive pack of a micro-step, but hardly if packs have similar costs (GLM-Long's sorted
packing). The groups are shuffled by seed and epoch, so costs follow one another as in any shuffle. With gradient
accumulation, a step has several groups, which removes the bias of steps of similar packs (LongAlign's sorted batching).
"""

import numpy as np

from verl_ext.options import whole_number
from verl_ext.packing.plan import Floats, Ints

# One step in this many comes out of a shuffle on a single cost level and is changed. That is rare, so the order of
# groups stays as uncorrelated as a shuffle's.
_RARE = 64
_TRIES = 64


def epoch_order(num_packs: int, seed: int, epoch: int) -> Ints:
    """Return int64[P], a permutation of packs by seed and epoch alone."""
    for key, value in (("num_packs", num_packs), ("data.seed", seed), ("epoch", epoch)):
        whole_number(key, value, least=0)
    return np.random.default_rng([seed, epoch]).permutation(num_packs)


def balanced_order(
    costs: Floats, batch_size: int, group_size: int, seed: int, epoch: int, drop_last: bool = False
) -> Ints:
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
    # Count the groups of full steps and of the last one: full ones, and those that the group size leaves over.
    steps, rest = divmod(len(order), batch_size)
    groups, smaller = divmod(batch_size, group_size)
    rest_groups, rest_smaller = divmod(rest, group_size)
    rng = np.random.default_rng([seed, epoch, group_size])

    # Cut groups from the packs by cost, then shuffle them whole, so that ranks stay even and steps stay unbiased.
    kinds = np.repeat([0, 1, 2], [steps * groups + rest_groups, steps * bool(smaller), bool(rest_smaller)])
    if smaller or rest_smaller:
        rng.shuffle(kinds)  # smaller groups lie anywhere among the costs
    sizes = np.asarray([group_size, smaller, rest_smaller])[kinds]
    starts = np.cumsum(sizes) - sizes
    # Deal full groups to steps, then mix the few steps that a shuffle leaves on a single level of cost.
    number = rng.permutation(steps * groups + rest_groups)
    number[: steps * groups] = _mixed(number[: steps * groups].reshape(steps, groups), len(number), rng).ravel()
    full = starts[kinds == 0][number]
    table = _packs(full[: steps * groups], group_size).reshape(steps, groups * group_size)
    table = np.hstack([table, _packs(rng.permutation(starts[kinds == 1]), smaller).reshape(steps, smaller)])
    last = [_packs(full[steps * groups :], group_size), _packs(starts[kinds == 2], rest_smaller)]
    return by_cost[np.concatenate([table, *last], axis=None)]


def _packs(starts: Ints, size: int) -> Ints:
    """Return int64[n, size]: the positions of the groups that begin at `starts`."""
    return starts[:, None] + np.arange(size)


def _mixed(table: Ints, count: int, rng: np.random.Generator) -> Ints:
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
            others = np.delete(level[other], slot)
            if level[other, slot] != level[step, 0] and (others != level[step, 0]).any():
                table[step, 0], table[other, slot] = table[other, slot], table[step, 0]
                level[step, 0], level[other, slot] = level[other, slot], level[step, 0]
                break
    return table
