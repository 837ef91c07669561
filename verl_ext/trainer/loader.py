"""The loader of a rank's packs, by step, from any step on."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import signal_handling

from verl_ext.data import PackDataset
from verl_ext.data.tokenized.files_in_use import DataFiles
from verl_ext.launch.protocol import Ending
from verl_ext.metrics import ONE_BIN, LengthBins
from verl_ext.options import first_line
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.hang import watch
from verl_ext.trainer.rank import DataParallelRank
from verl_ext.trainer.run import Run
from verl_ext.trainer.signals import end_for_parent_alone
from verl_ext.trainer.step_plan import StepPlan


@contextlib.contextmanager
def loader_deaths_reported(files: DataFiles | None = None) -> Iterator[None]:
    """Raise an Ending of this rank if a loader process dies anywhere in the block.

    files: of these, a truncated one, which causes a bus error, is named.
    """
    try:
        yield
    except Exception as error:
        line = str(error) if isinstance(error, Ending) and error.scope == "rank" else _death(error)
        if line is None or os.environ.get("VERL_EXT_FULL_ERROR"):
            raise
        changed = files and files.changed()
        raise Ending(f"{line}; {changed}" if changed and changed not in line else line, scope="rank") from error


@contextlib.contextmanager
def _deaths_raised() -> Iterator[None]:
    """Let torch raise a worker's death in this block alone.

    Its handler of SIGCHLD raises wherever the process is. Where that is an operator on DTensors, whose shapes torch
    computes under FakeTensorMode, the process aborts. So the handler of any loader, once installed, goes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGCHLD, lambda *_: torch._C._error_if_any_worker_fails())
    try:
        torch._C._error_if_any_worker_fails()  # of a death since the last block
        yield
    except (ConnectionError, EOFError) as error:  # a process died after it had said where its batch is
        torch._C._error_if_any_worker_fails()
        raise RuntimeError("DataLoader worker (pid unknown) exited") from error  # it was waited for already
    finally:
        is_torchs = getattr(previous, "__module__", "") == signal_handling.__name__
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if previous is None or is_torchs else previous)


def _death(error: BaseException | None) -> str | None:
    """Describe a dead loader process from torch's notice; else None."""
    while error is not None:
        if match := re.match(r"DataLoader worker \((pid.*?)\) (is killed by signal: [^.]*|exited)", str(error)):
            advice = "if the host ran out of memory, give the job more of it"
            if "Bus error" in match[2]:
                advice = "shared memory (/dev/shm) that is too small, or a data file that was cut short, does that"
            fate = match[2].replace("is killed", "was killed")
            return f"a loader process ({match[1]}) {fate}; {advice}, or lower data.num_workers or data.prefetch_factor"
        error = error.__cause__ or error.__context__
    return None


class _Batches(Dataset):
    """A dataset of a :class:`StepBatch` per list of packs (None: idle).

    If a batch cannot be made, an ``Ending`` is returned as a value; raised in a worker, it would arrive as that
    worker's traceback.
    """

    def __init__(self, packs: PackDataset, collate: StepCollator) -> None:
        self.packs = packs
        self.collate = collate
        self.files: DataFiles | None = None  # in their state at the first batch

    def __getitems__(self, indices: Sequence[int | None]) -> StepBatch | Ending:
        try:
            if get_worker_info() is None:  # not in a worker, which a bus error would end
                self.files = self.files or DataFiles(self.packs.data_files, self.packs.key)
                if changed := self.files.changed(sizes_alone=True):
                    raise ValueError(f"a file was cut short: {changed}")
            batch = self.collate([None if index is None else self.packs[index] for index in indices])
            if get_worker_info() is not None:
                # Copy to shared memory here, so that a full /dev/shm raises. torch's feeder thread would only print the
                # error, and the trainer would wait forever.
                for tensor in _tensors(batch):
                    tensor.share_memory_()
            return batch
        except Exception as error:
            if os.environ.get("VERL_EXT_FULL_ERROR"):
                raise
            numbers = ", ".join(str(index) for index in indices if index is not None)
            line = f"{self.packs.key}: pack {numbers} cannot be loaded; {type(error).__name__}: {first_line(error)}"
            return Ending(line, scope="rank")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch and of the objects and mappings in it."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict) or is_dataclass(value):
        for each in (value if isinstance(value, dict) else vars(value)).values():
            yield from _tensors(each)


@dataclass(frozen=True)
class _RankSteps:
    """A list of pack indices per step, drawn on demand."""

    plan: StepPlan
    steps: range
    rank: int
    ranks: int

    def __iter__(self) -> Iterator[list[int | None]]:
        return (self.plan.rank_packs(step, self.rank, self.ranks) for step in self.steps)

    def __len__(self) -> int:
        return len(self.steps)


class PackLoader:
    """An iterable of a :class:`StepBatch` per step; it may raise an Ending."""

    def __init__(self, batches: DataLoader) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[StepBatch]:
        with loader_deaths_reported(), _deaths_raised():  # a worker may die before the others have started
            batches = iter(self._batches)
        while True:
            with loader_deaths_reported(), _deaths_raised():
                batch = next(batches, None)
            watch.mark()
            if batch is None:
                return
            if isinstance(batch, Ending):
                raise replace(batch)  # a named exception would keep this frame and its workers alive
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
    """Load a data-parallel rank's batches from ``first_step`` to ``last_step - 1``.

    The order is a function of the step alone, so a resumed run starts here without drawing batches to skip. Each of
    ``num_workers`` workers prepares ``prefetch_factor`` steps ahead (torch's default: 2); with 0 workers this process
    makes each batch on demand. ``pin_memory``: whether batches are pinned; None: if there is a GPU.
    """
    batches = DataLoader(
        _Batches(dataset, collate),
        batch_sampler=_RankSteps(plan, range(first_step, last_step), rank, ranks),  # type: ignore[arg-type]
        collate_fn=_unchanged,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        worker_init_fn=end_for_parent_alone if num_workers else None,
        generator=torch.Generator(),  # its own, because a loader seeds its workers, also in validation
    )
    return PackLoader(batches)


def _unchanged(batch: Any) -> Any:
    return batch  # the worker that read it made it complete


def run_batches(
    run: Run,
    rank: DataParallelRank,
    dataset: PackDataset,
    plan: StepPlan,
    first_step: int,
    last_step: int,
    bins: LengthBins = ONE_BIN,
) -> PackLoader:
    """Load a rank's batches of a run from ``first_step`` to ``last_step - 1``."""
    data, idle_tokens = run.config.data, rank.engine.idle_tokens(dataset.max_tokens)
    return pack_loader(
        dataset,
        plan,
        first_step,
        last_step,
        rank.rank,
        rank.size,
        StepCollator.of_dataset(run.objective, dataset, idle_tokens=idle_tokens, bins=bins),
        num_workers=data.num_workers,
        prefetch_factor=data.prefetch_factor,
        pin_memory=data.pin_memory,
    )
