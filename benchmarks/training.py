"""Training beside stock verl, step by step and epoch by epoch.

**contest.** Four ways to train the same small Qwen3 on the same documents take turns step by step in one process:

| contestant | engine | micro-batches |
|---|---|---|
| `padded` | verl 0.9.1, untouched | 4 documents (verl's default) in shuffled order, padded to the longest of them |
| `dynamic` | verl 0.9.1, untouched | verl's `use_dynamic_bsz` under a limit of `budget` tokens, no padding |
| `next_fit` | ours | next-fit packs in the documents' order, padded to `budget`, as TokenAwareBatchPack makes them |
| `ours` | ours | best-fit packs, no padding, category loss reported at every step |

All have the same documents in a step, the same weights, optimizer, precision (fp32 on a CPU) and gradient checkpointing
(off). Losses are compared at every step; a difference above 1e-4 ends the run. Lengths are LongAlign's mixture, scaled
to the budget (documents.py); a hidden size of 256 keeps tokens per hidden unit, and thus attention's share of the work,
as with 4,096 at 65,536 tokens. Seconds are those of the optimizer step; batches are made before the clock starts. A
ratio is taken step by step. On a CPU processor time is shown too, because other work affects it less.

Without flash-attn stock verl runs `sdpa` with a dense mask (of padding in `padded`, of document blocks in `dynamic`),
which separates documents and computes all of T², and `logprobs_from_logits` processes the logits row by row in Python.
Ours calls SDPA document by document. With flash-attn neither computes masked positions.

**longalign.** The wall time in which each method trains once on all of 256 long-tailed documents, on one rank and on
two real data-parallel ranks (gloo and one thread each; nccl and one GPU each if there are GPUs):

| method | engine | micro-batches of a rank |
|---|---|---|
| `naive` | verl's | 4 documents (verl's default) in random order, padded to the longest of them |
| `sorted` | verl's | sorted batching: the same 4, of similar length |
| `naive_1` | verl's | one document in random order |
| `sorted_1` | verl's | one document, the ranks' documents of similar length: LongAlign's script |
| `dynamic` | verl's | verl's `use_dynamic_bsz` on the rank's random share of the step |
| `packing` | ours | one best-fit pack, `data.balance=none` |
| `balanced` | ours | one best-fit pack, `data.balance=sorted`: the ranks' packs of similar cost (GLM-Long's) |

On one rank no rank waits for another, so only LongAlign's own three run there. Every method uses every document once,
in the same number of optimizer steps (packs that do not divide evenly may make fewer). Sorted batching puts other
documents into a step, so the losses of steps cannot be compared. Their sum is: the learning rate (1e-30) moves no
weight, and documents, target tokens and Σ nll of the epoch must be equal for all, to 1e-4 relative.

A micro-step is the work of all ranks before they meet in the next forward's collectives. `cost/ideal` is Σ over
micro-steps of the most expensive rank over the ranks' mean, by the trainer's cost model (verl's rows count whole, as
its dense attention computes them); `idle` is the same from measured processor time, as a share of all ranks' time.
`wall` is the time between two barriers of all ranks; `cpu` adds up the busiest rank's processor time micro-step by
micro-step: the wall time of undisturbed ranks whose collectives cost nothing. Ratios are taken turn by turn.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.cells import on_ranks
from benchmarks.documents import Document, make_documents, write_documents
from benchmarks.harness import Row, Turns, equal, table, take_turns
from benchmarks.meters import wait_for_gpu
from benchmarks.small_run import VOCABULARY, no_progress_bars, quiet, write_model
from verl_ext import options
from verl_ext.options import option
from verl_ext.packing import cost_over_ideal, epoch_order, plan_packs

SEED = 0
ON_ONE_RANK = ("naive", "sorted", "packing")
NO_LEARNING = "optim.lr=1e-30"  # far below the last digit of any fp32 weight; 0 is refused
QUICK = ["documents=8", "budget=256", "epoch_documents=32", "epoch_budget=256", "steps=2", "ranks=[1]"]
QUICK += ["hidden=128", "layers=1", "repeats=1", "epochs=1"]


@dataclass(frozen=True)
class Options(options.Options):
    """Sizes of the model and of both tables."""

    hidden: int = option(256, "hidden size, a multiple of 128", least=128)
    layers: int = option(2, "layers", least=1)
    micro_batch: int = option(4, "documents of a padded micro-batch", least=1)
    threads: int = option(1, "threads of torch on a CPU, in each rank", least=1)
    documents: int = option(40, "contest: documents of a step", least=1)
    budget: int = option(4096, "contest: tokens of a pack, and limit of a dynamic batch", least=256)
    repeats: int = option(5, "contest: measured steps, each on new documents", least=1)
    epoch_documents: int = option(256, "longalign: documents of an epoch", least=1)
    epoch_budget: int = option(2048, "longalign: tokens of a pack, and limit of a dynamic batch", least=256)
    steps: int = option(4, "longalign: optimizer steps of an epoch", least=1)
    epochs: int = option(3, "longalign: measured epochs of each method", least=1)
    ranks: list[int] = option([1, 2], "longalign: data-parallel ranks, a row of each method for each")

    def problems(self) -> Iterable[str]:
        """Yield a line for documents that leave a micro-batch or a rank short."""
        if self.documents % self.micro_batch:
            yield f"documents must be a multiple of micro_batch={self.micro_batch}; got {self.documents}"
        for group in (self.steps * self.micro_batch * ranks for ranks in self.ranks):
            if self.epoch_documents % group:
                yield f"epoch_documents must be a multiple of steps × micro_batch × ranks = {group}"
                yield f"got epoch_documents={self.epoch_documents}"


@table(
    "{name} | calls {calls:.0f} | tokens {ran:,.0f} | padding {padding:.0%} | fill {fill:.0%} | "
    "s/step {wall.median:.2f} | targets/s {speed:,.0f} | cpu s/step {cpu.median:.2f} | "
    "× padded, wall {to[padded][wall]:.2f} | × padded, cpu {to[padded][cpu]:.2f} | "
    "× dynamic, wall {to[dynamic][wall]:.2f} | × dynamic, cpu {to[dynamic][cpu]:.2f}"
)
def contest(options: Options, folder: Path) -> Iterable[Row]:
    """Four ways to train, step by step on one rank."""
    folder = folder / "contest"
    write_model(folder / "model", options.hidden, options.layers, options.budget)
    ((found, *_),) = on_ranks(1, compete, options, folder, OMP_NUM_THREADS=str(options.threads))
    tokens, targets = np.array(found["tokens"]), np.array(found["targets"])
    records = {name: {key: Turns(kept) for key, kept in record.items()} for name, record in found["records"].items()}
    clocks = ("wall",) if torch.cuda.is_available() else ("wall", "cpu")
    for name, record in records.items():
        row = {"name": name, **{clock: record[clock] for clock in clocks}, "loss": record["loss"]}
        row |= {"calls": record["calls"].median, "ran": record["ran"].median, "load": record["load"]}
        row |= {"padding": float(1 - tokens.sum() / sum(record["ran"]))}
        row |= {} if name == "padded" else {"fill": float(tokens.sum() / (sum(record["calls"]) * options.budget))}
        row["speed"] = median((targets / np.array(record["wall"])).tolist())
        row["to"] = {
            to: {clock: records[to][clock] / record[clock] for clock in clocks} for to in ("padded", "dynamic")
        }
        yield row


def compete(options: Options, folder: Path) -> Row:
    """Return the documents' tokens and targets by step, and each contestant's steps."""
    no_progress_bars()
    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(SEED)
    warm_up = max(options.documents // 4 // options.micro_batch, 1) * options.micro_batch
    steps = []
    for count in (warm_up, *[options.documents] * options.repeats):
        steps.append((make_documents(count, options.budget, VOCABULARY, rng), folder / f"step_{len(steps)}"))
        write_documents(*steps[-1])
    contestants = build_contestants(options, steps[0][1], folder, len(steps))
    losses: list[set[float]] = [set() for _ in steps]
    ways = {name: partial(next, _steps(contestant, steps, losses)) for name, contestant in contestants.items()}
    turns = take_turns(ways, options.repeats, warm_up=1)
    measured = [documents for documents, _ in steps[1:]]
    return {
        "tokens": [sum(len(document["input_ids"]) for document in documents) for documents in measured],
        "targets": [sum(int(document["loss_mask"].sum()) for document in documents) for documents in measured],
        "records": {name: {key: [step[key] for step in of] for key in of[0]} for name, of in turns.items()},
    }


def build_contestants(options: Options, data: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Build the contestants by name, each with its own copy of the model's weights."""
    from benchmarks.contestants import Setting
    from verl_ext.plugin import register_engine

    register_engine()
    setting = Setting(folder / "model", data, folder, options.budget, steps)
    with quiet():
        return {
            "padded": setting.stock("padded", options.micro_batch),
            "dynamic": setting.stock("dynamic", None),
            "next_fit": setting.packed("next_fit", "next_fit", "data.pad_mode=right"),
            "ours": setting.packed("ours", "best_fit"),
        }


def _steps(contestant: Any, steps: Sequence[tuple[list[Document], Path]], losses: list[set[float]]) -> Iterator[Row]:
    """Train step by step, and yield the figures of each.

    Raises:
        RuntimeError: If the contestants' losses differ, so that they did not train on the same targets.
    """
    for (documents, folder), seen in zip(steps, losses, strict=True):
        contestant.forwards.clear()
        gc.collect()
        loading = time.perf_counter()
        batch = contestant.load(documents, folder)
        wait_for_gpu()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = contestant.train(batch)
        wait_for_gpu()
        taken = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "load": wall - loading}
        seen.add(loss)
        if not np.ptp(list(seen)) <= 1e-4:  # also if one is not a number
            raise RuntimeError(f"contestants disagree on the loss of {folder.name}: {sorted(seen)}")
        yield {**taken, "loss": loss, "ran": contestant.forwards.tokens, "calls": len(contestant.forwards.positions)}


@table(
    "ranks {ranks} | method {method} | engine {engine} | documents {documents} | targets {targets:,} | steps {steps} | "
    "forwards {forwards} | padding {padding:.0%} | wall s {wall.median:.1f} | × naive, wall {× wall:.2f} | "
    "cpu s {cpu.median:.1f} | × naive, cpu {× cpu:.2f} | cost/ideal {cost_over_ideal:.3f} | idle {idle:.0%}"
)
def longalign(options: Options, folder: Path) -> Iterable[Row]:
    """Time for the same documents, by method, on one rank and on several."""
    if (gpus := torch.cuda.device_count()) and max(options.ranks) > gpus:
        raise options.UsageError(f"ranks must be at most {gpus}, a GPU each; got {max(options.ranks)}")
    write_model(folder / "model", options.hidden, options.layers, options.epoch_budget)
    write_documents(documents_of(options), folder / "documents")
    for ranks in options.ranks:
        rows = on_ranks(ranks, measure_epochs, options, folder, OMP_NUM_THREADS=str(options.threads))[0][0]["rows"]
        for row in rows:
            times = {clock: Turns(row[clock]) for clock in ("wall", "cpu") if row[clock]}
            ratios = {f"× {clock}": Turns(rows[0][clock]) / own for clock, own in times.items()}
            yield {"ranks": ranks, **row, **times, **ratios}


def documents_of(options: Options) -> list[Document]:
    """Make the documents of an epoch, the same on every rank."""
    return make_documents(options.epoch_documents, options.epoch_budget, VOCABULARY, np.random.default_rng(SEED))


def measure_epochs(options: Options, folder: Path) -> Row:
    """Measure every method's row, the same on every rank of an open process group.

    Raises:
        RuntimeError: If methods did not train on the same targets, or ranks ran different numbers of forwards.
    """
    from transformers import AutoModelForCausalLM

    from benchmarks.contestants import Setting
    from verl_ext.engines.cost import balancing_cost

    no_progress_bars()
    torch.set_num_threads(options.threads)
    ranks, documents, output = dist.get_world_size(), documents_of(options), folder / f"on_{dist.get_world_size()}"
    steps = options.steps * (options.epochs + 1)
    setting = Setting(
        folder / "model", folder / "documents", output, options.epoch_budget, steps, overrides=(NO_LEARNING,)
    )
    methods = build_methods(setting, documents, options)
    whole = AutoModelForCausalLM.from_pretrained(setting.model)
    model = balancing_cost(whole, whole.config, ulysses=1)
    for method in methods.values():
        method.contestant.train(method.warm_up)  # the set-up of a first call is not timed
    epochs = take_turns({name: partial(method.epoch, model) for name, method in methods.items()}, options.epochs)
    tokens = sum(len(document["input_ids"]) for document in documents)
    rows = [{"method": name, **methods[name].row(of, tokens)} for name, of in epochs.items()]
    equal(rows, ("documents", "targets"), 0)
    equal(rows, ("nll",), 1e-4)
    assert all(row["ranks"] == ranks for row in rows)
    return {"rows": rows}


@dataclass(frozen=True)
class Method:
    """One method on one rank: its contestant, one batch for each optimizer step, and a small `warm_up` batch."""

    contestant: Any
    batches: list[Any]
    warm_up: Any

    @property
    def is_ours(self) -> bool:
        """Whether attention runs document by document; without flash-attn, verl's engine computes whole rows."""
        return not isinstance(self.warm_up, dict)

    def epoch(self, model: Any) -> Row:
        """Train on this rank's share of the documents; return its times, losses, costs by forward, and tokens."""
        forwards = self.contestant.forwards
        forwards.clear()
        gc.collect()
        _meet()
        started = time.perf_counter()
        losses = [self.contestant.train(batch) for batch in self.batches]
        cpu = np.diff([*forwards.clocks, time.process_time()]).tolist()
        _meet()
        wall = time.perf_counter() - started
        costs = [float(model.documents(spans).sum()) for spans in forwards.spans(self.is_ours)]
        return {"wall": wall, "cpu": cpu, "losses": losses, "costs": costs, "tokens": forwards.tokens}

    def row(self, epochs: Sequence[Row], tokens: int) -> Row:
        """Summarize over all ranks the data trained on and the time taken."""
        walls, work = (_gathered([epoch[key] for epoch in epochs]) for key in ("wall", "cpu"))
        costs, counts = _gathered(epochs[0]["costs"]), _gathered([_counts(batch) for batch in self.batches])
        forwards = {len(rank) for rank in costs}
        if len(forwards) > 1:
            raise RuntimeError(f"ranks ran unequally many forwards: {forwards}")
        documents, targets = np.sum(counts, axis=0).T  # of each step
        together = np.max(work, axis=0).sum(axis=1)  # [epochs]: the busiest rank of each micro-step
        on_cpu = not torch.cuda.is_available()  # with a GPU, the processor only launches kernels
        return {
            "ranks": len(costs),
            "engine": "ours" if self.is_ours else "verl's",
            "documents": int(documents.sum()),
            "targets": int(targets.sum()),
            "nll": float(np.dot(epochs[-1]["losses"], targets)),
            "steps": len(self.batches),
            "forwards": forwards.pop(),
            "padding": 1 - tokens / sum(_gathered(epochs[0]["tokens"])),
            "wall": np.max(walls, axis=0).tolist(),
            "cpu": together.tolist() if on_cpu else None,
            "cost_over_ideal": cost_over_ideal(np.array(costs).T.ravel(), ranks=len(costs)),
            "idle": median((1 - np.mean(work, axis=0).sum(axis=1) / together).tolist()) if on_cpu else None,
        }


def _counts(batch: Any) -> tuple[int, int]:
    """Return the documents and the target tokens of a loaded batch."""
    if isinstance(batch, dict):
        return len(batch["loss_mask"]), int(batch["loss_mask"].values().sum())
    idle = batch.pack_lengths.count(1)  # no document is that short
    return int((batch.position_ids == 0).sum()) - idle, int(batch.counts[2])


def _meet() -> None:
    wait_for_gpu()
    dist.barrier()


def _gathered(value: Any) -> list[Any]:
    """Gather `value` from every rank, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def build_methods(setting: Any, documents: Sequence[Document], options: Options) -> dict[str, Method]:
    """Build the methods by name, each with its own copy of the weights; `documents` are those of `setting.data`.

    An epoch has `options.steps` optimizer steps, with equally many documents on verl's engine and, as far as they
    divide, equally many packs on ours.
    """
    from verl_ext.plugin import register_engine

    ranks, rank, size = dist.get_world_size(), dist.get_rank(), options.micro_batch
    lengths = np.array([len(document["input_ids"]) for document in documents])
    shuffled, shortest = epoch_order(len(lengths), SEED, epoch=0), np.argsort(lengths)

    def stock(name: str, order: np.ndarray, padded: int | None) -> Method:
        contestant, group = setting.stock(name, padded), padded or 1
        shares = dealt_out(order, options.steps, group, ranks)[rank]
        batches = [contestant.load([documents[index] for index in share]) for share in (*shares, shortest[:group])]
        return Method(contestant, batches[:-1], warm_up=batches[-1])

    def packed(name: str, balance: str) -> Method:
        packs = plan_packs(lengths, setting.budget, "best_fit", SEED).num_packs
        per_step = -(-packs // (options.steps * ranks)) * ranks
        overrides = (f"data.balance={balance}", f"data.seed={SEED}", f"data.train_batch_size={per_step}")
        return _of_packs(setting.packed(name, "best_fit", *overrides))

    builders: dict[str, Callable[[], Method]] = {
        "naive": lambda: stock("naive", shuffled, size),
        "sorted": lambda: stock("sorted", sorted_batching(lengths, size * ranks, SEED), size),
        "naive_1": lambda: stock("naive_1", shuffled, 1),
        "sorted_1": lambda: stock("sorted_1", sorted_batching(lengths, ranks, SEED), 1),
        "dynamic": lambda: stock("dynamic", shuffled, None),
        "packing": lambda: packed("packing", "none"),
        "balanced": lambda: packed("balanced", "sorted"),
    }
    register_engine()
    with quiet():
        return {name: build() for name, build in builders.items() if ranks > 1 or name in ON_ONE_RANK}


def _of_packs(contestant: Any) -> Method:
    """Return a method on this rank's packs of one epoch, as the trainer's plan deals them out."""
    run, own = contestant.run, contestant.trainer.rank
    shares = [run.plan.rank_packs(step, own.rank, own.size) for step in range(run.plan.steps_per_epoch)]
    packs = [[None if pack is None else run.train_set[pack] for pack in share] for share in shares]
    smallest = run.train_set[int(run.packs.tokens.argmin())]
    return Method(contestant, [contestant.collate(share) for share in packs], contestant.collate([smallest]))


def sorted_batching(lengths: np.ndarray, group: int, seed: int) -> np.ndarray:
    """Return int64[D]: the documents by ascending `lengths` (int64[D]), cut into groups in a random order.

    This is LongAlign's sort_and_group.py: a group is what the ranks run at a time, and gradient accumulation mixes
    several groups in an optimizer step.

        12 documents by length, 2 ranks, 2 documents a micro-batch     groups   a b c d | e f g h | i j k l
        shuffled and dealt out         rank 0   i j | a b | e f
                                       rank 1   k l | c d | g h
    """
    groups = np.argsort(lengths, kind="stable").reshape(-1, group)
    return groups[epoch_order(len(groups), seed, epoch=0)].ravel()


def dealt_out(order: np.ndarray, steps: int, micro_batch_size: int, ranks: int) -> np.ndarray:
    """Deal `order` (int64[D]) out by micro-batches to the ranks in turn: int64[ranks, steps, D / (ranks · steps)]."""
    dealt = order.reshape(steps, -1, ranks, micro_batch_size)  # [steps, micro-steps, ranks, micro-batch]
    return np.moveaxis(dealt, 2, 0).reshape(ranks, steps, -1)
