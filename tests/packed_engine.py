"""verl's training worker around the packed engine, ready to train on the ranks that ``run_ranks`` started."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.utils.device import get_device_id
from verl.workers.engine_workers import TrainingWorker

from tests.reference import Document, pack_row
from verl_ext.config.compose import compose
from verl_ext.config.run import worker_config
from verl_ext.data import CategoryTable
from verl_ext.losses import LossOptions, LossSpec
from verl_ext.options import plain
from verl_ext.plugin import select_engine
from verl_ext.trainer.batch import Pack, StepCollator
from verl_ext.trainer.objective import Objective
from verl_ext.trainer.step_plan import StepPlan

_FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"


def build_worker(
    model: str | os.PathLike, sequence_parallel: int = 1, overrides: Sequence[str] = (), parallel: str = "cpu"
) -> TrainingWorker:
    """Build a worker in full fp32 with an initialised engine; its learning rate is 0, so steps move no parameter.

    ``overrides`` are command-line overrides of conf/sft.yaml, ``parallel`` is its config group. Call it on every rank
    of an open process group.
    """
    select_engine()
    config = compose(
        [
            f"model.path={model}",
            "data.train_dir=unused",
            f"parallel={parallel}",
            f"engine.ulysses_sequence_parallel_size={sequence_parallel}",
            f"engine.mixed_precision={_FP32}",
            "optim.lr=0",
            *overrides,
        ]
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        worker = TrainingWorker(worker_config(plain(config), total_steps=1000))
        worker.reset()
    return worker


@dataclass(frozen=True)
class Measured:
    """The result of a step: its metrics, the norm of its gradients, and on rank 0 the gradients, then clipped."""

    report: dict[str, float]
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    clipped: dict[str, torch.Tensor]


def train_step(
    engine: Any,
    packs: Sequence[Pack],
    collate: StepCollator,
    accumulation: int,
    head: str,
    objective: Objective | None = None,
) -> Measured:
    """Take a step over the packs on the trainer's own path: collator, micro-batches, loss, engine, reduction."""
    objective = objective or Objective(LossOptions())

    def all_reduce(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=engine.get_data_parallel_group())

    rank, ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    mine = StepPlan(len(packs), len(packs), seed=0, shuffle=False).rank_packs(0, rank, ranks)
    batch = collate([None if index is None else packs[index] for index in mine])
    normalisers = batch.normalisers.clone()
    all_reduce(normalisers)
    device: Any = get_device_id()
    sums = objective.sums(batch.categories, device)
    batch.count(sums)
    size = ceil(len(mine) / accumulation)
    with engine.train_mode():
        objective.measure([batch], engine, all_reduce, size)
    loss = objective.loss(normalisers.tolist(), ranks, sums)
    # 3000 bytes are a few rows of the tiny vocabulary at a time
    flags = {"head": head, "head_block_bytes": 3000, "token_stats": True, **loss.flags}
    micro_batches = list(batch.micro_batches(size, **flags))
    assert len(micro_batches) == accumulation
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.accumulate(micro_batches, loss)
        gradients = _gradients(engine)
        grad_norm = engine.optimizer_step()
        clipped = _gradients(engine)
    report = sums.reduced(all_reduce).report("train", collate.categories.names)
    return Measured(report, grad_norm, *((gradients, clipped) if dist.get_rank() == 0 else ({}, {})))


def token_step(engine: Any, packs: Sequence[Sequence[Document]], head: str = "fused") -> Measured:
    """Take a step of mode token over packs of documents, which the data-parallel ranks take one by one."""
    collate = StepCollator(LossSpec("token", np.ones(1)), CategoryTable((), ()))
    each = ceil(len(packs) / engine.get_data_parallel_size())
    return train_step(engine, [pack_row(pack) for pack in packs], collate, each, head)


def _gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Return copies of whole, unscaled gradients on the host by Hugging Face's names; the step clips in place."""
    module, scale = engine.module, engine.scaler.get_scale() if engine.scaler is not None else 1.0
    if isinstance(module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
            found = {name: p.grad / scale for name, p in module.named_parameters() if p.grad is not None}
        return {name.replace("_fsdp_wrapped_module.", ""): gradient.cpu() for name, gradient in found.items()}
    return {name: p.grad.full_tensor().cpu() / scale for name, p in module.named_parameters() if p.grad is not None}
