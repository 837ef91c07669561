"""One data-parallel rank's share of steps: its batches, its sums, and the reduction over the others."""

from typing import Any

import torch
import torch.distributed as dist
from verl.utils.device import get_device_id

from verl_ext.config.titans_options import is_titans
from verl_ext.data import PackDataset
from verl_ext.engines.step import StepEngine
from verl_ext.metrics import StepSums
from verl_ext.trainer.loader import PackLoader, pack_loader
from verl_ext.trainer.preparation import Run
from verl_ext.trainer.step_batch import StepBatch, StepCollator
from verl_ext.trainer.step_plan import StepPlan


class RankShare:
    """What rank `rank` of `ranks` data-parallel ones has of a run."""

    def __init__(self, run: Run, engine: StepEngine) -> None:
        self.run = run
        self._engine = engine
        self.rank, self.ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        # A model that reads chunk by chunk runs collectives for every chunk: an idle row is as long as any other.
        self._idle_tokens = run.config.data.max_tokens if is_titans(run.config) else 1

    def batches(self, dataset: PackDataset, plan: StepPlan, first_step: int, last_step: int) -> PackLoader:
        """This rank's share of steps ``first_step`` to ``last_step - 1``, the loss laid out."""
        data = self.run.config.data
        return pack_loader(
            dataset,
            plan,
            first_step,
            last_step,
            self.rank,
            self.ranks,
            StepCollator(self.run.loss_for(dataset), dataset.categories, self._idle_tokens, dataset.last_is_label),
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

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the data-parallel ranks, in place."""
        dist.all_reduce(tensor, group=self._engine.get_data_parallel_group())
