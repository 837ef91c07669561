"""Assign documents to ranks and optimizer steps, for engines that take documents. Pure functions.

Sorted batching cuts the documents, ascending in length, into groups of one micro-step, as LongAlign's sort_and_group.py
does, and shuffles the groups; gradient accumulation mixes several of them in an optimizer step.

```
12 documents by length, 2 ranks, 2 documents a micro-batch     groups   a b c d | e f g h | i j k l
shuffled and dealt out         rank 0   i j | a b | e f
                               rank 1   k l | c d | g h
```
"""

import numpy as np

from verl_ext.packing import epoch_order


def sorted_batching(lengths: np.ndarray, group: int, seed: int) -> np.ndarray:
    """Return int64[D]: the documents by ascending ``lengths`` (int64[D]), cut into groups in a random order."""
    groups = np.argsort(lengths, kind="stable").reshape(-1, group)
    return groups[epoch_order(len(groups), seed, epoch=0)].ravel()


def dealt_out(order: np.ndarray, steps: int, micro_batch_size: int, ranks: int) -> np.ndarray:
    """Deal ``order`` (int64[D]) out by micro-batches to the ranks in turn: int64[ranks, steps, D / (ranks · steps)]."""
    dealt = order.reshape(steps, -1, ranks, micro_batch_size)  # [steps, micro-steps, ranks, micro-batch]
    return np.moveaxis(dealt, 2, 0).reshape(ranks, steps, -1)
