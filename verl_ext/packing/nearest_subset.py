"""Whole documents that are together nearest to a number of tokens: a random subset, then a few of them chosen anew.

    random order   7  3  9  4  2  6        wanted 20
    taken          7  3  9                 19 tokens; 4, 2 and 6 do not fit the one token that is left
    chosen anew    7  3     4     6        of the subsets of up to 16 documents, one that sums to 20

1. Documents are taken in random order; one that no longer fits is passed over, so that a long document near the end
   does not leave a hole that short ones could fill. This takes about log2(longest) passes of numpy.
2. Of up to 16 documents, half of them taken and half not, with the one that alone comes nearest, all 65,536 subsets are
   compared and the nearest is kept. This is repeated with other documents until the sum is within the tolerance, at
   most 16 times. With 16 documents or fewer it is the best choice there is.
"""

import numpy as np
from numpy.typing import NDArray

WINDOW = 16  # documents whose subsets are all compared: 2^16 sums
TRIES = 16


def nearest_subset(
    lengths: NDArray[np.int64], wanted: int, tolerance: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """bool[n]: a random subset whose sum comes near to `wanted`, above or below; lengths int64[n] ≥ 1, in tokens.

    The search ends within `tolerance` tokens of `wanted`, or with the best that it met. `wanted` is at most the sum.
    """
    chosen = _random_fill(lengths, wanted, rng)
    for _ in range(TRIES):
        gap = wanted - int(lengths[chosen].sum())
        if gap == 0:
            break
        _choose_anew(lengths, chosen, gap, rng)
        if len(lengths) <= WINDOW or abs(wanted - int(lengths[chosen].sum())) <= tolerance:
            break
    return chosen


def hindering(lengths: NDArray[np.int64], chosen: NDArray[np.bool_], gap: int) -> int:
    """The document which, added (gap > 0: tokens are missing) or left out (gap < 0), alone comes nearest to closing
    the gap."""
    others = np.flatnonzero(chosen == (gap < 0))
    return int(others[np.abs(lengths[others] - abs(gap)).argmin()])


def _random_fill(lengths: NDArray[np.int64], wanted: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Documents in random order, each taken if it fits what the earlier ones left of `wanted`."""
    chosen = np.zeros(len(lengths), bool)
    order, room = rng.permutation(len(lengths)), wanted
    in_order = lengths[order]
    while len(order):
        running = np.cumsum(in_order)
        fits = int(np.searchsorted(running, room, side="right"))
        chosen[order[:fits]] = True
        room -= int(running[fits - 1]) if fits else 0
        still = fits + np.flatnonzero(in_order[fits:] <= room)
        order, in_order = order[still], in_order[still]
    return chosen


def _choose_anew(lengths: NDArray[np.int64], chosen: NDArray[np.bool_], gap: int, rng: np.random.Generator) -> None:
    """Replace the choice among up to WINDOW documents by the nearest one, in place; never a worse one."""
    window = _window(lengths, chosen, gap, rng)
    sums = np.zeros(1, np.int64)
    for length in lengths[window].tolist():
        sums = np.concatenate([sums, sums + length])
    room = gap + int(lengths[window][chosen[window]].sum())
    off = np.abs(sums - room)
    best = int(off.argmin())
    if off[best] < abs(gap):
        chosen[window] = (best >> np.arange(len(window))) & 1


def _window(
    lengths: NDArray[np.int64], chosen: NDArray[np.bool_], gap: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Up to WINDOW documents: taken ones, others that could come in their place, and the one that alone is nearest."""
    if len(lengths) <= WINDOW:
        return np.arange(len(lengths))
    taken = np.flatnonzero(chosen)
    not_taken = len(lengths) - len(taken)
    taken = _sample(taken, max(WINDOW // 2, WINDOW - max(not_taken, 1)), rng)
    room = gap + int(lengths[taken].sum())
    others = _sample(np.flatnonzero(~chosen & (lengths < 2 * room)), WINDOW - 1 - len(taken), rng)
    return np.unique(np.concatenate([taken, others, [hindering(lengths, chosen, gap)]]))


def _sample(documents: NDArray[np.int64], size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    return documents[rng.choice(len(documents), min(size, len(documents)), replace=False)]
