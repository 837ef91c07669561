"""Which packs each data-parallel rank runs in each optimizer step. Pure.

An epoch visits every pack once, in an order of the seed and the epoch alone; a step takes the next
``train_batch_size`` of them and deals them out to the ranks. A rank that gets fewer packs than another runs an idle
micro-batch in their place, because FSDP's collectives need every rank in every forward pass.

```
step of 5 packs, 2 ranks      rank 0   p0  p2  p4
                              rank 1   p1  p3  idle
```
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from verl_ext.data import epoch_order

_epoch_order = lru_cache(maxsize=2)(epoch_order)  # every step of an epoch asks for it


@dataclass(frozen=True)
class StepPlan:
    """The steps of a run; steps are counted from 0.

    Attributes:
        num_packs: packs of the dataset.
        batch_size: packs per step over all ranks (`data.train_batch_size`).
        seed: of the order of packs (`data.seed`).
        drop_last: leave out the packs of an epoch that do not fill its last step (`data.drop_last`).
        shuffle: False keeps the dataset's order, for validation.
    """

    num_packs: int
    batch_size: int
    seed: int
    drop_last: bool = False
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        full, rest = divmod(self.num_packs, self.batch_size)
        return full if self.drop_last else full + bool(rest)

    def packs(self, step: int) -> np.ndarray:
        """int64[≤ batch_size]: the packs of one step, over all ranks."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = _epoch_order(self.num_packs, self.seed, epoch) if self.shuffle else np.arange(self.num_packs)
        return order[position * self.batch_size : (position + 1) * self.batch_size]

    def rank_packs(self, step: int, rank: int, ranks: int) -> list[int | None]:
        """One data-parallel rank's packs of a step; None where it idles. Equally long on every rank."""
        packs = self.packs(step)
        mine: list[int | None] = packs[rank::ranks].tolist()
        slots = -(-len(packs) // ranks)
        return mine + [None] * (slots - len(mine))

    def steps_without_target(self, pack_targets: np.ndarray, epoch: int) -> list[int]:
        """Steps of an epoch, counted from its first, whose packs hold no target token at all."""
        first = epoch * self.steps_per_epoch
        return [s for s in range(self.steps_per_epoch) if not pack_targets[self.packs(first + s)].any()]
