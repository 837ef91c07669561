"""A lower bound on the number of packs: where a plan reaches it, no plan is smaller."""

import numpy as np

from verl_ext.packing.decreasing import Runs


def fewest_packs(runs: Runs, max_tokens: int) -> int:
    """Martello and Toth's L2 over every threshold t (Knapsack Problems, 1990, chapter 8), in time linear in the runs.

    Documents over max_tokens / 2 need a pack each. Beside one of more than max_tokens - t no document of t or more
    finds room, so documents of t .. max_tokens / 2 share the room that the other large ones leave, and new packs:

        L2 = large + max over t of ceil((tokens of t .. max_tokens/2 - room beside large ones up to max_tokens - t) / max_tokens)
    """  # noqa: E501  the formula is one line
    large = int(np.searchsorted(-runs.lengths, -(max_tokens // 2), side="left"))
    packs_before, room_before = (
        np.concatenate([[0], np.cumsum(values[:large])])
        for values in (runs.counts, runs.counts * (max_tokens - runs.lengths))
    )
    thresholds = runs.lengths[large:]
    if len(thresholds) == 0:
        return int(packs_before[-1])
    tokens = np.cumsum(runs.counts[large:] * thresholds)
    too_large = np.searchsorted(-runs.lengths[:large], -(max_tokens - thresholds), side="left")
    beyond = tokens - (room_before[-1] - room_before[too_large])
    return int(packs_before[-1] + max(-(-beyond.max() // max_tokens), 0))
