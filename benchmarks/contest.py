"""The contest: the contestants take turns to train each step's documents, and their times are recorded."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.contestants import Contestant, Step
from benchmarks.lengths import make_documents, write_dataset

LOSS_TOLERANCE = 1e-4


@dataclass
class Record:
    """One contestant's steps: ``wall`` and ``cpu`` are seconds of a step, ``load`` those of making its batch ahead."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # through the model, with padding
    micro_batches: list[int] = field(default_factory=list)


def make_steps(sizes: Sequence[int], budget: int, vocabulary: int, folder: Path, seed: int) -> list[Step]:
    """Make a step for each number of documents in ``sizes``, drawn one after the other from one stream."""
    rng = np.random.default_rng(seed)
    steps = []
    for number, count in enumerate(sizes):
        documents = make_documents(count, budget, vocabulary, rng)
        write_dataset(documents, folder / f"step_{number}")
        steps.append(Step(documents, folder / f"step_{number}"))
    return steps


def compete(contestants: dict[str, Contestant], steps: Sequence[Step], warm_up: int, bar: tqdm) -> dict[str, Record]:
    """Return records of ``steps[warm_up:]``; the first contestant rotates, so that drift of the machine favours nobody.

    Raises:
        RuntimeError: If contestants disagree on a step's loss, so they did not train on the same targets.
    """
    records = {name: Record() for name in contestants}
    names = list(contestants)
    for number, step in enumerate(steps):
        losses = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            bar.set_postfix_str(name)
            record = records[name] if number >= warm_up else Record()
            _train(contestants[name], step, record)
            losses[name] = record.losses[-1]
            bar.update()
        if max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE:
            raise RuntimeError(f"contestants disagree on the loss of step {number}: {losses}")
    return records


def _train(contestant: Contestant, step: Step, record: Record) -> None:
    forwards = contestant.forwards
    forwards.clear()
    gc.collect()
    loading = time.perf_counter()
    batch = contestant.load(step)
    _wait()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = contestant.train(batch)
    _wait()
    record.wall.append(time.perf_counter() - wall)
    record.cpu.append(time.process_time() - cpu)
    record.load.append(wall - loading)
    record.losses.append(loss)
    record.tokens.append(forwards.tokens)
    record.micro_batches.append(forwards.calls)


def summary(record: Record, steps: Sequence[Step], budget: int, others: dict[str, Record]) -> dict[str, Any]:
    """Return medians over the steps, and stepwise ratios of target tokens per second to ``others`` with [min, max]."""
    real, targets = (np.array([getattr(step, name) for step in steps]) for name in ("tokens", "target_tokens"))
    result: dict[str, Any] = {
        "micro_batches": median(record.micro_batches),
        "tokens_through_model": median(record.tokens),
        "padding_share": float(1 - real.sum() / sum(record.tokens)),
        "fill": float(real.sum() / (sum(record.micro_batches) * budget)),
        "load_seconds": median(record.load),
    }
    for clock in clocks():
        seconds = np.array(getattr(record, clock))
        result[clock] = {"seconds": median(seconds.tolist()), "target_tokens_per_second": median(targets / seconds)}
        for name, other in others.items():
            ratios = np.array(getattr(other, clock)) / seconds
            result[clock][f"ratio_to_{name}"] = {"median": median(ratios), "range": [ratios.min(), ratios.max()]}
    return result


def clocks() -> tuple[str, ...]:
    """Return the clocks: wall time, and on a CPU also processor time, which other work disturbs less."""
    return ("wall",) if torch.cuda.is_available() else ("wall", "cpu")


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
