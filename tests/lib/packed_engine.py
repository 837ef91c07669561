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
from verl.workers.engine_workers import TrainingWorker

from tests.lib.reference import Document, pack_row
from verl_ext.config.compose import compose
from verl_ext.config.resolve import worker_config
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.options import plain
from verl_ext.plugin import select_engine
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.rank import DataParallelRank
from verl_ext.trainer.step_plan import StepPlan
from verl_ext.trainer.texts import Pack

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


def train_step(engine: Any, packs: Sequence[Pack], collate: StepCollator, accumulation: int, head: str) -> Measured:
    """Take a step over the packs on the trainer's own path: collator, micro-batches, loss, engine, reduction."""
    ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    mine = StepPlan(len(packs), len(packs), seed=0, shuffle=False).rank_packs(0, *ranks)
    # 3000 bytes are a few rows of the tiny vocabulary at a time
    rank = DataParallelRank(engine, ceil(len(mine) / accumulation), {"head": head, "head_block_bytes": 3000})
    batch = collate([None if index is None else packs[index] for index in mine])
    normalisers, sums = batch.normalisers.clone(), rank.sums(batch)
    rank.all_reduce(normalisers)
    with engine.train_mode():
        loss = collate.objective.begin([batch], rank, normalisers.tolist(), sums)
        micro_batches = rank.micro_batches(batch, loss, token_stats=True)
        assert len(micro_batches) == accumulation
        engine.optimizer_zero_grad()
        engine.accumulate(micro_batches, loss)
        gradients = _gradients(engine)
        grad_norm = engine.optimizer_step()
        clipped = _gradients(engine)
    report = sums.reduced(rank.all_reduce).report("train", collate.categories.names)
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
