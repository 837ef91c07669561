"""The time that collecting and reporting category losses adds to a step of our trainer.

There are three measurements. *Whole steps*, with collection on and off in turn, show the effect that a user sees, but
a difference of a percent drowns in a shared machine's noise. *In place* times the added work alone, on a step's own
tensors: the sums of every micro-batch, one reduction and one report, relative to the step on the same documents.
*Head measures* compares steps with token accuracy and entropy against steps that collect the losses alone.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contestants import PackedContestant
from verl_ext.metrics import StepSums
from verl_ext.trainer.batch import StepBatch, StepLoss

ROUNDS = 30


def whole_steps(contestant: PackedContestant, batch: StepBatch, pairs: int) -> dict[str, Any]:
    """Compare steps with collection to steps without."""
    return _paired(lambda: contestant.train(batch), lambda: contestant.train(batch, logged=False), pairs)


def head_measures(contestant: PackedContestant, batch: StepBatch, pairs: int) -> dict[str, Any]:
    """Compare steps with token accuracy and entropy to steps that collect the losses alone."""
    unmeasured = _Unmeasured(**vars(batch))
    return _paired(lambda: contestant.train(batch), lambda: contestant.train(unmeasured), pairs)


class _Unmeasured(StepBatch):
    def micro_batches(self, *arguments: Any, **flags: Any) -> Iterator[Any]:
        return super().micro_batches(*arguments, **{**flags, "head_measures": False})


def _paired(full: Callable[[], Any], bare: Callable[[], Any], pairs: int) -> dict[str, Any]:
    """Return the extra CPU time of ``full`` over ``bare`` in percent: median, range and quartiles of ``pairs``."""
    percent, seconds = [], []
    for pair in range(pairs):
        taken = {}
        for step in (full, bare) if pair % 2 else (bare, full):
            started = time.process_time()
            step()
            taken[step] = time.process_time() - started
        percent.append(100 * (taken[full] / taken[bare] - 1))
        seconds.append(taken[bare])
    quartiles = quantiles(percent, n=4, method="inclusive") if pairs > 1 else percent * 3
    spread = {"range": [min(percent), max(percent)], "quartiles": [quartiles[0], quartiles[2]]}
    return {"percent": median(percent), **spread, "step_seconds": median(seconds)}


def in_place(contestant: PackedContestant, batch: StepBatch, step_seconds: float) -> dict[str, float]:
    """Return the seconds that a step spends on collection, measured alone, and their percentage of ``step_seconds``."""
    with_sums, without = [], []
    for _ in range(ROUNDS):
        without.append(_losses(contestant, batch, collect=False))
        with_sums.append(_losses(contestant, batch, collect=True))
    seconds = max(median(with_sums) - median(without), 0.0)
    return {"seconds": seconds, "percent": 100 * seconds / step_seconds}


def _losses(contestant: PackedContestant, batch: StepBatch, collect: bool) -> float:
    """Return the seconds of the loss function over a step's micro-batches, with the report if ``collect``."""
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
