"""The loader of a rank's packs, step after step, from any step on, and what is said when it fails."""

import contextlib
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, get_worker_info
from verl.utils.device import get_device_id

from verl_ext.data import PackDataset
from verl_ext.data.content import DataFiles
from verl_ext.engines.step import StepEngine
from verl_ext.metrics import StepSums
from verl_ext.trainer.batch import StepBatch, StepCollator
from verl_ext.trainer.hang import watch
from verl_ext.trainer.setup import Run
from verl_ext.trainer.signals import end_for_parent_alone
from verl_ext.trainer.step_plan import StepPlan
from verl_ext.values import first_line


class LoadingFailed(RuntimeError):
    """A batch cannot be made, in one line. It happens on one rank, and the others do not know."""


@contextlib.contextmanager
def loader_deaths_reported(processes: Sequence[multiprocessing.process.BaseProcess] = ()) -> Iterator[None]:
    """Raises LoadingFailed where a loader process dies, wherever inside torch's signal handler reports it.

    processes: the loader's, whose exit codes say more where torch missed the signal.
    """
    try:
        yield
    except Exception as error:
        death = None if isinstance(error, LoadingFailed) else _death(error, processes)
        if death is None or os.environ.get("VERL_EXT_FULL_ERROR"):
            raise
        raise LoadingFailed(death) from error


def _death(error: BaseException, processes: Sequence[multiprocessing.process.BaseProcess]) -> str | None:
    """One line on the process that died, from torch's notice or a notice behind it; None for any other error."""
    found: list[tuple[str, str]] = []
    behind: BaseException | None = error
    while behind is not None:
        if match := re.match(r"DataLoader worker \((pid.*?)\) (is killed by signal: [^.]*|exited)", str(behind)):
            found.append((f"a loader process ({match[1]})", match[2].replace("is killed", "was killed")))
        behind = behind.__cause__ or behind.__context__
    if not found and processes and isinstance(error, (ConnectionError, EOFError, FileNotFoundError)):
        # Its batch is here, the shared memory of the batch is not: the process hands it over when it is asked for.
        found.append(("a loader process", "exited before its batch was taken"))
    if not found:
        return None
    found += _killed(processes)
    process, fate = min(found, key=lambda entry: "signal" not in entry[1])  # what names the signal says more
    if "Bus error" in fate:
        advice = "shared memory (/dev/shm) that is too small, or a data file that was cut short, does that"
    else:
        advice = "where the host ran out of memory, give the job more of it"
    return f"{process} {fate}; {advice}, or lower data.num_workers or data.prefetch_factor"


def _killed(processes: Sequence[multiprocessing.process.BaseProcess]) -> list[tuple[str, str]]:
    """Deaths that torch does not report, where it sees the closed pipe before the signal."""
    codes = [(process.pid, process.exitcode) for process in processes]
    return [
        (f"a loader process (pid {pid})", f"was killed by signal: {signal.strsignal(-code)}")
        for pid, code in codes
        if code is not None and code < 0
    ]


class _Batches(Dataset):
    """One :class:`StepBatch` for a list of packs, None among them where the rank idles.

    A batch that cannot be made is a ``LoadingFailed``, given back as a value: raised in a loader's process, it would
    arrive as that process's traceback.
    """

    def __init__(self, packs: PackDataset, collate: StepCollator) -> None:
        self.packs = packs
        self.collate = collate
        self.files: DataFiles | None = None  # as the first batch found them

    def __getitems__(self, indices: Sequence[int | None]) -> StepBatch | LoadingFailed:
        try:
            if get_worker_info() is None:  # no process of its own, which a bus error would end
                self.files = self.files or DataFiles(self.packs.data_files, self.packs.key)
                if changed := self.files.changed(sizes_alone=True):
                    raise ValueError(f"a file was cut short: {changed}")
            batch = self.collate([None if index is None else self.packs[index] for index in indices])
            if get_worker_info() is not None:
                _share_memory(batch)
            return batch
        except Exception as error:
            if os.environ.get("VERL_EXT_FULL_ERROR"):
                raise
            numbers = ", ".join(str(index) for index in indices if index is not None)
            return LoadingFailed(
                f"{self.packs.key}: pack {numbers} cannot be loaded; {type(error).__name__}: {first_line(error)}"
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
        with loader_deaths_reported():  # a process may die before the others have started
            batches = iter(self._batches)
        processes = multiprocessing.active_children() if self._batches.num_workers else []
        while True:
            with loader_deaths_reported(processes):
                batch = next(batches, None)
            watch.mark()
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
        collate_fn=_unchanged,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        worker_init_fn=_in_loader_process if num_workers else None,
        generator=torch.Generator(),  # of its own: a loader seeds its processes, also in validation and on a resume
    )
    return PackLoader(batches)


def _in_loader_process(_: int) -> None:
    end_for_parent_alone()


def _unchanged(batch: Any) -> Any:
    return batch  # made whole where it was read


class DataParallelRank:
    """One data-parallel rank's part of a run: its batches, its sums, and the reduction over the others."""

    def __init__(self, run: Run, engine: StepEngine) -> None:
        self.run = run
        self._engine = engine
        self.rank, self.size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()

    def batches(self, dataset: PackDataset, plan: StepPlan, first_step: int, last_step: int) -> PackLoader:
        """This rank's batches of steps ``first_step`` to ``last_step - 1``."""
        data = self.run.config.data
        return pack_loader(
            dataset,
            plan,
            first_step,
            last_step,
            self.rank,
            self.size,
            StepCollator(
                self.run.loss_for(dataset),
                dataset.categories,
                self._engine.idle_tokens(dataset.max_tokens),
                dataset.last_is_label,
            ),
            num_workers=data.num_workers,
            prefetch_factor=data.prefetch_factor,
            pin_memory=data.pin_memory,
        )

    def sums(self, batch: StepBatch) -> StepSums:
        """Sums on the engine's device that hold the batch's counts and no loss yet."""
        device: Any = get_device_id()
        sums = StepSums.zeros(batch.categories, device)
        sums.add_counts(batch.counts)
        return sums

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the data-parallel ranks, in place."""
        dist.all_reduce(tensor, group=self._engine.get_data_parallel_group())

    def gather(self, values: list[Any]) -> list[Any]:
        """The values of all data-parallel ranks, in their order."""
        gathered: list[list[Any]] = [[] for _ in range(self.size)]
        dist.all_gather_object(gathered, values, group=self._engine.get_data_parallel_group())
        return [value for values in gathered for value in values]
