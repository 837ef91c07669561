"""The step plan: each data-parallel rank's packs in each optimizer step.

An epoch visits every pack once, in an order that depends on the seed and the epoch (and, if balanced, on the packs'
costs and the group size). A step takes the next ``train_batch_size`` packs and deals them out to the ranks. A rank with
fewer packs runs an idle micro-batch instead, because FSDP's collectives need every rank in every forward pass.

```
step of 5 packs, 2 ranks      rank 0   p0  p2  p4        a micro-step runs one column,
                              rank 1   p1  p3  idle      if balanced, packs of similar cost
```
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from verl_ext.packing import balanced_order, cost_over_ideal, epoch_order


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The steps of a run; steps are counted from 0.

    Attributes:
        num_packs: P, the number of packs in the dataset.
        batch_size: packs per step over all ranks (`data.train_batch_size`).
        seed: the seed of the pack order (`data.seed`).
        drop_last: whether to leave out the packs of an epoch that do not fill its last step (`data.drop_last`).
        shuffle: False keeps one order in every epoch: the dataset's (`data.shuffle=false`), or for validation by cost.
        costs: float64[P] of the packs; if given, packs of similar cost share a micro-step (`data.balance=sorted`).
        group_size: the packs of similar cost that stay together (`data.balance_group`), at most a step's packs.
    """

    num_packs: int
    batch_size: int
    seed: int
    drop_last: bool = False
    shuffle: bool = True
    costs: NDArray[np.float64] | None = None
    group_size: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """The number of optimizer steps of one epoch."""
        full, rest = divmod(self.num_packs, self.batch_size)
        return full if self.drop_last else full + bool(rest)

    def run_steps(self, epochs: int | None, steps: int | None, span: str, passes: float | None) -> tuple[int, int]:
        """Return the steps of a run, and of its learning rate's schedule.

        Args:
            epochs: `trainer.total_epochs`; None: 1, or as many as `steps` needs.
            steps: `trainer.total_training_steps`; None: those of the epochs. The smaller number ends the run.
            span: `optim.lr_schedule_span`, whose steps the schedule spans.
            passes: how often the packs contain the data, if they are the whole run in its order; else None.
        """
        if passes is None:
            of_epochs = self.steps_per_epoch * (epochs or 1)
        else:  # the dataset has drawn as many samples as `steps` or else `epochs` needs
            of_epochs = round(self.steps_per_epoch * epochs / passes) if epochs and steps else self.steps_per_epoch
        total = steps or of_epochs
        # verl's schedule spans the steps that are asked for, even if the epochs end before.
        return min(total, of_epochs) if epochs else total, of_epochs if span == "epochs" else total

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return int64[≤ P], the packs in the order of an epoch."""
        return _order(self, epoch if self.shuffle else 0)

    def left_out(self, epoch: int) -> NDArray[np.int64]:
        """Return the packs that an epoch drops, empty without `drop_last`."""
        return np.setdiff1d(np.arange(self.num_packs), self.order(epoch), assume_unique=True)

    def packs(self, step: int) -> NDArray[np.int64]:
        """Return int64[≤ batch_size], the packs of one step on all ranks."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return self.order(epoch)[position * self.batch_size : (position + 1) * self.batch_size]

    def rank_packs(self, step: int, rank: int, ranks: int) -> list[int | None]:
        """List a rank's packs of a step; None (idle) makes lengths equal."""
        packs = self.packs(step)
        mine: list[int | None] = packs[rank::ranks].tolist()
        slots = -(-len(packs) // ranks)
        return mine + [None] * (slots - len(mine))

    def cost_over_ideal(self, costs: NDArray[np.float64], ranks: int, micro_batch_size: int = 1) -> float:
        """Return the first epoch's time over that with perfectly shared micro-steps."""
        return cost_over_ideal(costs[self.order(0)], ranks, self.batch_size, micro_batch_size)

    def steps_without_target(self, pack_targets: NDArray[np.int64], epoch: int) -> list[int]:
        """List an epoch's steps, from 0, whose packs have no target token."""
        order = self.order(epoch)
        if len(order) == 0:
            return []
        of_step = np.add.reduceat(pack_targets[order], np.arange(0, len(order), self.batch_size))
        return np.flatnonzero(of_step == 0).tolist()

    def check_targets(self, targets: NDArray[np.int64], total_steps: int) -> None:
        """Raise ValueError if a step has no target token (Z is 0).

        Args:
            targets: int64[P], the target tokens of each pack.
            total_steps: the number of steps of the run.
        """
        if targets.all():
            return
        for epoch in range(-(-total_steps // self.steps_per_epoch)):
            first = epoch * self.steps_per_epoch
            for step in self.steps_without_target(targets, epoch):
                if first + step >= total_steps:
                    break
                packs = ", ".join(map(str, self.packs(first + step)[:4].tolist()))
                raise ValueError(
                    f"data.train_dir: step {step + 1} of epoch {epoch + 1} has no target token in its packs (pack "
                    f"{packs}); raise data.train_batch_size={self.batch_size} or remove documents without a target"
                )


@lru_cache(maxsize=4)  # every step of an epoch uses it, in training and in validation
def _order(plan: StepPlan, epoch: int) -> NDArray[np.int64]:
    costs = plan.costs
    visited = plan.steps_per_epoch * plan.batch_size if plan.drop_last else plan.num_packs
    if not plan.shuffle:
        return (np.arange(plan.num_packs) if costs is None else np.argsort(-costs, kind="stable"))[:visited]
    if costs is None:
        return epoch_order(plan.num_packs, plan.seed, epoch)[:visited]
    group = min(plan.group_size, plan.batch_size)
    return balanced_order(costs, plan.batch_size, group, plan.seed, epoch, plan.drop_last)
