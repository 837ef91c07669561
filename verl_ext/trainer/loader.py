"""The loader of a rank's packs, step after step, from any step on."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset

from verl_ext.data import SFTDataSet
from verl_ext.trainer.step_batch import Pack, StepCollator
from verl_ext.trainer.step_plan import StepPlan


class _PacksOrIdle(Dataset):
    """A dataset whose index None means that the rank idles."""

    def __init__(self, packs: SFTDataSet) -> None:
        self.packs = packs

    def __getitem__(self, index: int | None) -> Pack | None:
        return None if index is None else self.packs[index]


@dataclass(frozen=True)
class _RankSteps:
    """One list of pack indices per step, drawn when it is needed."""

    plan: StepPlan
    first_step: int
    last_step: int
    rank: int
    ranks: int

    def __iter__(self) -> Iterator[list[int | None]]:
        for step in range(self.first_step, self.last_step):
            yield self.plan.rank_packs(step, self.rank, self.ranks)

    def __len__(self) -> int:
        return max(self.last_step - self.first_step, 0)


def pack_loader(
    dataset: SFTDataSet,
    plan: StepPlan,
    first_step: int,
    last_step: int,
    rank: int,
    ranks: int,
    collate: StepCollator,
    num_workers: int,
) -> DataLoader:
    """One :class:`StepBatch` per step from ``first_step`` to ``last_step - 1``, for one data-parallel rank.

    The order is a function of the step alone, so a resumed run starts here and no batch is drawn to be skipped.
    """
    return DataLoader(
        _PacksOrIdle(dataset),
        batch_sampler=_RankSteps(plan, first_step, last_step, rank, ranks),  # type: ignore[arg-type]
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
    )
