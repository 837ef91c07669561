"""What collecting and reporting category losses adds to a step of our trainer.

Two measurements. *Whole steps*, collection on and off in turn, show the effect as a user would meet it, but a
difference of a percent drowns in a shared machine's noise. *In place* times only what collection adds, on a step's own
tensors: the sums of every micro-batch, one reduction, one report; set against the step on the same documents.
"""

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contestants import PackedContestant
from verl_ext.metrics import StepSums
from verl_ext.trainer.batch import StepBatch, StepLoss

ROUNDS = 30


def whole_steps(contestant: PackedContestant, batch: StepBatch, pairs: int) -> dict[str, Any]:
    """Median over ``pairs`` of a step with collection over the step without it, minus 1, in percent."""
    percent, seconds = [], []
    for pair in range(pairs):
        taken = {}
        for logged in (True, False) if pair % 2 else (False, True):
            started = time.process_time()
            contestant.train(batch, logged=logged)
            taken[logged] = time.process_time() - started
        percent.append(100 * (taken[True] / taken[False] - 1))
        seconds.append(taken[False])
    return {"percent": median(percent), "range": [min(percent), max(percent)], "step_seconds": median(seconds)}


def in_place(contestant: PackedContestant, batch: StepBatch, step_seconds: float) -> dict[str, float]:
    """Seconds that a step spends on collection, measured alone, and their share of ``step_seconds`` in percent."""
    with_sums, without = [], []
    for _ in range(ROUNDS):
        without.append(_losses(contestant, batch, collect=False))
        with_sums.append(_losses(contestant, batch, collect=True))
    seconds = max(median(with_sums) - median(without), 0.0)
    return {"seconds": seconds, "percent": 100 * seconds / step_seconds}


def _losses(contestant: PackedContestant, batch: StepBatch, collect: bool) -> float:
    """Seconds of the loss function over a step's micro-batches, and of the report when collecting."""
    names = contestant.run.train_set.categories.names
    group = contestant.trainer.engine.get_data_parallel_group()
    micro_batches = list(batch.micro_batches(1))
    outputs = [{"log_probs": -torch.rand_like(data["loss_coefficients"])} for data in micro_batches]
    started = time.process_time()
    sums = None
    if collect:
        sums = StepSums.zeros(len(names), "cpu")
        sums.add_counts(batch.counts)
    loss = StepLoss(batch.normaliser.item(), 1, sums)
    for output, data in zip(outputs, micro_batches, strict=True):
        loss(output, data)
    if sums is not None:
        sums.reduced(lambda values: dist.all_reduce(values, group=group)).report("train", names)
    return time.process_time() - started
