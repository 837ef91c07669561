"""A data-parallel rank: its passes through the engine, its sums, and reductions over all."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils.device import get_device_id

from verl_ext.metrics import StepSums
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.loss import StepLoss

if TYPE_CHECKING:
    from verl_ext.engines.step import StepEngine


class DataParallelRank:
    """A data-parallel rank of an engine.

    packs: those of a micro-batch. head_flags: what a micro-batch tells of the head.
    """

    def __init__(self, engine: "StepEngine", packs: int, head_flags: Mapping[str, Any]) -> None:
        self.engine, self._packs, self._head_flags = engine, packs, head_flags
        self.rank, self.size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()

    def micro_batches(self, batch: StepBatch, loss: StepLoss, **flags: Any) -> list[TensorDict]:
        """Return a batch's micro-batches for a loss."""
        return list(batch.micro_batches(self._packs, loss, **self._head_flags, **flags))

    def sums(self, batch: StepBatch) -> StepSums:
        """Return sums on the device with the batch's counts, without loss."""
        device: Any = get_device_id()
        return batch.counts.on(device)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the data-parallel ranks, in place."""
        dist.all_reduce(tensor, group=self.engine.get_data_parallel_group())

    def gather(self, values: list[Any]) -> list[Any]:
        """Return the values of all data-parallel ranks, in rank order."""
        gathered: list[list[Any]] = [[] for _ in range(self.size)]
        dist.all_gather_object(gathered, values, group=self.engine.get_data_parallel_group())
        return [value for values in gathered for value in values]
