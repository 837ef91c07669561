"""One rank's part of LongAlign's table: epochs of every method, in turn, timed between barriers of all ranks.

The learning rate moves no weight, so all methods, in whatever order they visit the documents, must reach the same sum
of negative log-likelihoods over an epoch if they trained on the same targets. torchrun starts this file with the
folder that longalign.py wrote; ``measure`` also runs inside any open process group.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # lets the script run by its path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.longalign import METHODS, ON_ONE_RANK, epoch_documents
from benchmarks.quiet import no_progress_bars
from verl_ext.packing import CostModel, cost_over_ideal
from verl_ext.trainer.distributed import process_group

if TYPE_CHECKING:
    from benchmarks.methods import Method  # imports verl, whose output is silenced by now

NLL_TOLERANCE = 1e-4  # relative
NO_LEARNING = "optim.lr=1e-30"  # far below the last digit of any fp32 weight; 0 is refused


@dataclass(frozen=True)
class Epoch:
    """One rank's pass through its share of the documents.

    Attributes:
        wall: seconds between two barriers of all ranks.
        cpu: processor seconds of this process from each of its forwards to the next one, or to the end.
        losses: the loss of each whole optimizer step.
        costs: the cost of each of this rank's forwards, by the trainer's cost model.
        tokens: tokens through this rank's model, padding included.
    """

    wall: float
    cpu: list[float]
    losses: list[float]
    costs: list[float]
    tokens: int


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure every method's row, the same on every rank of an open process group.

    Raises:
        RuntimeError: If methods did not train on the same targets, or ranks ran different numbers of forwards.
    """
    from transformers import AutoModelForCausalLM

    from benchmarks.contestants import Setting
    from benchmarks.methods import build_methods
    from verl_ext.engines.cost import balancing_cost

    no_progress_bars()
    torch.set_num_threads(options.threads)
    ranks, documents = dist.get_world_size(), epoch_documents(options)
    names = options.methods or (METHODS if ranks > 1 else ON_ONE_RANK)
    setting = Setting(
        folder / "model",
        folder / "documents",
        folder / f"on_{ranks}",
        options.budget,
        steps=options.steps * (options.repeats + 1),
        overrides=(NO_LEARNING,),
    )
    methods = build_methods(names, setting, documents, options.steps, options.micro_batch_size, options.seed)
    whole = AutoModelForCausalLM.from_pretrained(setting.model)
    model = balancing_cost(whole, whole.config, ulysses=1)
    rows = {name: _row(methods[name], passes) for name, passes in _compete(methods, options.repeats, model).items()}
    _check_targets(rows)
    tokens = sum(len(document["input_ids"]) for document in documents)
    for row in rows.values():
        row["padding_share"] = 1 - tokens / row["tokens"]
    return {"documents": len(documents), "tokens": tokens, "methods": rows}


def _compete(methods: "dict[str, Method]", repeats: int, model: CostModel) -> dict[str, list[Epoch]]:
    """Run ``repeats`` epochs of each method; the first one rotates, so that a drift of the machine favours nobody."""
    names = list(methods)
    passes: dict[str, list[Epoch]] = {name: [] for name in names}
    for method in methods.values():
        method.contestant.train(method.warm_up)  # the set-up of a first call is not timed
    with tqdm(total=repeats * len(names), unit="epoch", disable=dist.get_rank() != 0) as bar:
        for turn in range(repeats):
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                bar.set_postfix_str(f"{name}, ranks: {dist.get_world_size()}")
                passes[name].append(_epoch(methods[name], model))
                bar.update()
    return passes


def _epoch(method: "Method", model: CostModel) -> Epoch:
    forwards = method.contestant.forwards
    forwards.clear()
    gc.collect()
    _meet()
    started = time.perf_counter()
    losses = [method.contestant.train(batch) for batch in method.batches]
    work = np.diff([*forwards.clocks, time.process_time()]).tolist()
    _meet()
    wall = time.perf_counter() - started
    costs = [float(model.documents(spans).sum()) for spans in forwards.spans(method.by_document)]
    return Epoch(wall, work, losses, costs, forwards.tokens)


def _meet() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def _row(method: "Method", passes: Sequence[Epoch]) -> dict[str, Any]:
    """Summarize over all ranks the data trained on and the time taken."""
    walls, work = (_gathered([getattr(one, key) for one in passes]) for key in ("wall", "cpu"))
    costs, targets = _gathered(passes[0].costs), np.sum(_gathered(method.targets), axis=0)
    forwards = [len(rank) for rank in costs]
    if len(set(forwards)) > 1:
        raise RuntimeError(f"ranks ran unequally many forwards: {forwards}")
    together = np.max(work, axis=0).sum(axis=1)  # [repeats]: the busiest rank of each micro-step
    idle = 1 - np.mean(work, axis=0).sum(axis=1) / together
    on_cpu = not torch.cuda.is_available()  # with a GPU, the processor only launches kernels
    return {
        "engine": method.engine,
        "documents": sum(_gathered(method.documents)),
        "targets": int(targets.sum()),
        "nll": float(np.dot(passes[-1].losses, targets)),
        "steps": len(method.batches),
        "forwards": forwards,
        "tokens": sum(_gathered(passes[0].tokens)),
        "wall": np.max(walls, axis=0).tolist(),
        "cpu": together.tolist() if on_cpu else None,
        "cost_over_ideal": cost_over_ideal(np.array(costs).T.ravel(), ranks=len(costs)),
        "idle_share": median(idle.tolist()) if on_cpu else None,
    }


def _gathered(value: Any) -> list[Any]:
    """Gather ``value`` from every rank, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _check_targets(rows: dict[str, dict[str, Any]]) -> None:
    for key in ("documents", "targets", "nll"):
        seen = {name: row[key] for name, row in rows.items()}
        low, high = min(seen.values()), max(seen.values())
        if high - low > (NLL_TOLERANCE * high if key == "nll" else 0):
            raise RuntimeError(f"methods disagree on the {key} of an epoch: {seen}")


def main() -> None:
    """Measure and write result.json; torchrun starts this on every rank."""
    folder = Path(sys.argv[1])
    options = argparse.Namespace(**json.loads((folder / "settings.json").read_text()))
    with process_group():
        result = measure(options, folder)
        if dist.get_rank() == 0:
            (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
