"""The loader of a rank's packs, step after step, from any step on, and what is told when it fails."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from verl_ext.data import PackDataset
from verl_ext.trainer.step_batch import StepBatch, StepCollator
from verl_ext.trainer.step_plan import StepPlan
from verl_ext.trainer.worker_deaths import LoadingFailed, WorkerDeaths

_deaths = WorkerDeaths()


class _Batches(Dataset):
    """One :class:`StepBatch` for a list of packs, None among them where the rank idles.

    A batch that cannot be made is a ``LoadingFailed``, given back as a value: raised in a loader's process, it would
    arrive as that process's traceback.
    """

    def __init__(self, packs: PackDataset, collate: StepCollator) -> None:
        self.packs = packs
        self.collate = collate

    def __getitems__(self, indices: Sequence[int | None]) -> StepBatch | LoadingFailed:
        try:
            batch = self.collate([None if index is None else self.packs[index] for index in indices])
            if get_worker_info() is not None:
                _share_memory(batch)
            return batch
        except Exception as error:
            if os.environ.get("VERL_EXT_FULL_ERROR"):
                raise
            reason = str(error).splitlines() or [""]
            numbers = ", ".join(str(index) for index in indices if index is not None)
            return LoadingFailed(
                f"{self.packs.key}: pack {numbers} cannot be loaded; {type(error).__name__}: {reason[0]}"
            )


def _share_memory(batch: StepBatch) -> None:
    """Move a batch to shared memory here, where there not being enough of it is an error; torch would do it in a
    thread that prints the error and leaves the trainer waiting."""
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            value.share_memory_()


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


class PackLoader:
    """One :class:`StepBatch` per step. ``LoadingFailed`` when one cannot be made, or a loader's process is dead."""

    def __init__(self, batches: DataLoader) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[StepBatch]:
        with _deaths.told():  # a process may die before the others have started
            batches = iter(self._batches)
            if self._batches.num_workers:
                _deaths.listen()
        while True:
            with _deaths.told():
                batch = next(batches, None)
            if batch is None:
                return
            if isinstance(batch, LoadingFailed):
                raise LoadingFailed(*batch.args)  # a name for what is raised would keep this frame, and its processes
            yield batch

    def __len__(self) -> int:
        return len(self._batches)


def pack_loader(
    dataset: PackDataset,
    plan: StepPlan,
    first_step: int,
    last_step: int,
    rank: int,
    ranks: int,
    collate: StepCollator,
    num_workers: int,
    prefetch_factor: int | None = None,
    pin_memory: bool | None = None,
) -> PackLoader:
    """One :class:`StepBatch` per step from ``first_step`` to ``last_step - 1``, for one data-parallel rank.

    The order is a function of the step alone, so a resumed run starts here and no batch is drawn to be skipped.
    Each of ``num_workers`` processes makes ``prefetch_factor`` steps ahead (torch's default: 2); with 0 of them this
    process makes each batch when it is asked for. ``pin_memory``: page-locked batches; None: where there is a GPU.
    """
    batches = DataLoader(
        _Batches(dataset, collate),
        batch_sampler=_RankSteps(plan, first_step, last_step, rank, ranks),  # type: ignore[arg-type]
        collate_fn=_as_it_is,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        generator=torch.Generator(),  # of its own: a loader seeds its processes, also in validation and on a resume
    )
    return PackLoader(batches)


def _as_it_is(batch: Any) -> Any:
    return batch  # made whole where it was read
