"""Training beside stock verl 0.9.1, step by step and epoch by epoch; README.md has the contestants and the figures.

Tokens, targets and loss of a turn are the same for all, or the run ends: contest's loss to 1.4e-5 (1e-4 of 6.9),
longalign's to 1e-4, over an epoch, as its steps differ, at a learning rate (1e-30) that moves no weight.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.cells import on_ranks
from benchmarks.documents import Document, make_documents, write_documents
from benchmarks.harness import Row, Sizes, Turns, equal, option, table, take_turns
from benchmarks.models import VOCABULARY, write_qwen3
from verl_ext.options import UsageError
from verl_ext.packing import cost_over_ideal, epoch_order, plan_packs

SEED = 0
ON_ONE_RANK = ("naive", "sorted", "packing")
NO_LEARNING = "optim.lr=1e-30"  # far below the last digit of any fp32 weight; 0 is refused
QUICK = ["documents=8", "budget=256", "epoch_documents=32", "epoch_budget=256", "steps=2", "ranks=[1]"]
QUICK += ["hidden=128", "layers=1", "repeats=1", "epochs=1"]

Way = tuple[Any, list[list[Any]]]  # a contestant, and for each turn the batches of its optimizer steps


class ModelSizes(Sizes):
    hidden: int = option(256, "hidden size of the model, a multiple of 128", least=128)
    layers: int = option(2, "layers of the model")
    threads: int = option(1, "threads of torch on a CPU, in each rank")


class Options(ModelSizes):
    micro_batch: int = option(4, "documents of a padded micro-batch")
    documents: int = option(40, "contest: documents of a step")
    budget: int = option(4096, "contest: tokens of a pack, and limit of a dynamic batch", least=256)
    repeats: int = option(5, "contest: measured steps, each on new documents")
    epoch_documents: int = option(256, "longalign: documents of an epoch")
    epoch_budget: int = option(2048, "longalign: tokens of a pack, and limit of a dynamic batch", least=256)
    steps: int = option(4, "longalign: optimizer steps of an epoch")
    epochs: int = option(3, "longalign: measured epochs of each method")
    ranks: list[int] = option([1, 2], "longalign: data-parallel ranks, a row of each method for each")

    def problems(self) -> Iterable[str]:
        if self.documents % self.micro_batch:
            yield f"documents must be a multiple of micro_batch={self.micro_batch}; got {self.documents}"
        for group in (self.steps * self.micro_batch * ranks for ranks in self.ranks):
            if self.epoch_documents % group:
                line = f"epoch_documents must be a multiple of steps × micro_batch × ranks = {group}"
                yield f"{line}; got {self.epoch_documents}"


@table(
    "{name} | forwards {forwards[0]} | targets {targets[0]:,} | padding {padding:.0%} | "
    "s/step {wall.median:.2f} | cpu s/step {cpu.median:.2f} | "
    "× padded, wall {× padded, wall:.2f} | × padded, cpu {× padded, cpu:.2f} | "
    "× dynamic, wall {× dynamic, wall:.2f} | × dynamic, cpu {× dynamic, cpu:.2f}"
)
def contest(options: Options, folder: Path) -> Iterable[Row]:
    """Three ways to train, step by step on one rank."""
    write_qwen3(folder / "contest/model", options.hidden, options.layers, options.budget)
    rows = on_ranks(1, compete, options, folder / "contest", threads=options.threads)[0]["rows"]
    yield from ratios(rows, "padded", "dynamic")


@table(
    "ranks {ranks} | method {name} | padding {padding:.0%} | wall s {wall.median:.1f} | "
    "× naive, wall {× naive, wall:.2f} | cpu s {cpu.median:.1f} | × naive, cpu {× naive, cpu:.2f} | "
    "cost/ideal {cost_over_ideal[0]:.3f} | idle {idle.median:.0%}"
)
def longalign(options: Options, folder: Path) -> Iterable[Row]:
    """Time for the same documents, by method and number of ranks."""
    if (gpus := torch.cuda.device_count()) and max(options.ranks) > gpus:
        raise UsageError(f"ranks must be at most {gpus}, a GPU each; got {max(options.ranks)}")
    write_qwen3(folder / "model", options.hidden, options.layers, options.epoch_budget)
    write_documents(documents_of(options), folder / "documents")
    for ranks in options.ranks:
        rows = on_ranks(ranks, measure_epochs, options, folder, threads=options.threads)[0]["rows"]
        yield from ({"ranks": ranks, **row} for row in ratios(rows, "naive"))


def ratios(rows: Sequence[Row], *bases: str) -> Iterable[Row]:
    """Yield the rows with each base's times over theirs, turn by turn."""
    rows = [row | {figure: Turns(row[figure]) for figure in ("wall", "cpu", "idle") if figure in row} for row in rows]
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        clocks = [clock for clock in ("wall", "cpu") if clock in row]
        times = {f"× {base}, {clock}": by_name[base][clock] / row[clock] for base in bases for clock in clocks}
        ran, tokens = sum(row["ran"]), sum(row["tokens"])
        yield {**row, **times, "padding": 1 - tokens / ran, "computed": ran / tokens}


def compete(options: Options, folder: Path) -> Row:
    """Return the contestants' rows; a turn is a step on new documents."""
    from benchmarks.contestants import Setting

    rng, steps = np.random.default_rng(SEED), []
    for step in range(options.repeats + 1):
        steps.append((make_documents(options.documents, options.budget, VOCABULARY, rng), folder / f"step_{step}"))
        write_documents(*steps[-1])
    setting = Setting(folder / "model", steps[0][1], folder, options.budget, len(steps))
    contestants = {
        "padded": setting.stock("padded", options.micro_batch),
        "dynamic": setting.stock("dynamic", None),
        "ours": setting.packed("ours"),
    }
    ways = {name: (one, [[one.load(*step)] for step in steps]) for name, one in contestants.items()}
    return {"rows": measured_rows(ways, options.repeats, setting.model, 1.4e-5)}


def documents_of(options: Options) -> list[Document]:
    return make_documents(options.epoch_documents, options.epoch_budget, VOCABULARY, np.random.default_rng(SEED))


def measure_epochs(options: Options, folder: Path) -> Row:
    """Return the methods' rows; a turn is an epoch."""
    from benchmarks.contestants import Setting

    files = folder / "model", folder / "documents", folder / f"on_{dist.get_world_size()}"
    setting = Setting(*files, options.epoch_budget, options.steps * (options.epochs + 1), (NO_LEARNING,))
    rows = measured_rows(build_methods(setting, options), options.epochs, setting.model, 1e-4)
    equal(rows, ("documents",), 0)
    return {"rows": rows}


def measured_rows(ways: dict[str, Way], turns: int, model: Path, tolerance: float) -> list[Row]:
    """Let the ways take turns after a warm-up; return their rows.

    Raises RuntimeError if they did not train on the same targets, or ranks ran different numbers of forwards.
    """
    from transformers import AutoModelForCausalLM

    from verl_ext.engines.cost import balancing_cost

    whole = AutoModelForCausalLM.from_pretrained(model)
    cost = balancing_cost(whole, whole.config, ulysses=1)
    steps = {name: partial(next, map(partial(one.turn, cost), batches)) for name, (one, batches) in ways.items()}
    rows = []
    for name, measured in take_turns(steps, turns, warm_up=1).items():
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, measured)
        of_turns = [over_ranks(of_turn) for of_turn in zip(*ranks, strict=True)]
        figures = {figure: [of_turn[figure] for of_turn in of_turns] for figure in of_turns[0]}
        rows.append({"name": name, **figures})
    equal(rows, ("tokens", "targets"), 0)
    equal(rows, ("loss",), tolerance)
    return rows


def rows_of_a_step(built: Mapping[str, tuple[Any, Any]], turns: int, model: Path, tolerance: float) -> Row:
    """Return the rows of contestants whose turn is a step on the same batch."""
    ways = {name: (one, [[batch]] * (turns + 1)) for name, (one, batch) in built.items()}
    return {"rows": measured_rows(ways, turns, model, tolerance)}


def over_ranks(ranks: Sequence[Row]) -> Row:
    if len(forwards := {len(rank["costs"]) for rank in ranks}) > 1:
        raise RuntimeError(f"ranks ran unequally many forwards: {forwards}")
    work = np.array([rank["cpu"] for rank in ranks])  # [ranks, forwards]
    counts = np.sum([rank["counts"] for rank in ranks], axis=0)  # [steps, 3]
    documents, tokens, targets = counts.sum(axis=0).tolist()
    busiest = work.max(axis=0).sum()
    cpu = {"cpu": float(busiest), "idle": float(1 - work.mean(axis=0).sum() / busiest)}
    return {
        **{"documents": documents, "tokens": tokens, "targets": targets},
        **{"forwards": forwards.pop(), "ran": sum(rank["ran"] for rank in ranks)},
        "loss": float(np.dot(ranks[0]["losses"], counts[:, 2])) / targets,  # the same on every rank
        "wall": max(rank["wall"] for rank in ranks),
        **({} if torch.cuda.is_available() else cpu),  # with a GPU, the processor only launches kernels
        "cost_over_ideal": cost_over_ideal(np.array([rank["costs"] for rank in ranks]).T.ravel(), ranks=len(ranks)),
    }


def build_methods(setting: Any, options: Options) -> dict[str, Way]:
    """Build longalign's methods by name.

    An epoch has `options.steps` optimizer steps, with equally many documents on verl's engine and, as far as they
    divide, equally many packs on ours. The first turn is one step.
    """
    ranks, rank, size, documents = dist.get_world_size(), dist.get_rank(), options.micro_batch, documents_of(options)
    lengths = np.array([len(document["input_ids"]) for document in documents])
    shuffled = epoch_order(len(lengths), SEED, epoch=0)
    stock = {  # name: the order of the documents, and how many a padded micro-batch has
        "naive": (shuffled, size),
        "sorted": (sorted_batching(lengths, size * ranks, SEED), size),
        "naive_1": (shuffled, 1),
        "sorted_1": (sorted_batching(lengths, ranks, SEED), 1),
        "dynamic": (shuffled, None),
    }
    packed = {"packing": "none", "balanced": "sorted"}

    def build(name: str) -> Way:
        if name in stock:
            order, padded = stock[name]
            contestant = setting.stock(name, padded)
            shares = dealt_out(order, options.steps, padded or 1, ranks)[rank]
            epoch = [contestant.load([documents[k] for k in share]) for share in shares]
        else:
            packs = plan_packs(lengths, setting.budget, "best_fit", SEED).num_packs
            per_step = -(-packs // (options.steps * ranks)) * ranks
            overrides = (f"data.balance={packed[name]}", f"data.seed={SEED}", f"data.train_batch_size={per_step}")
            contestant = setting.packed(name, *overrides)
            run = contestant.run
            epoch = [*contestant.trainer.batches(0, run.plan.steps_per_epoch)]
        return contestant, [epoch[:1], *[epoch] * options.epochs]

    return {name: build(name) for name in ((*stock, *packed) if ranks > 1 else ON_ONE_RANK)}


def sorted_batching(lengths: np.ndarray, group: int, seed: int) -> np.ndarray:
    """Return int64[D]: the documents by ascending `lengths`, in shuffled groups.

    LongAlign's sort_and_group.py: a group is what the ranks run at a time, and an optimizer step mixes several groups.

        12 documents by length, 2 ranks, 2 documents a micro-batch     groups   a b c d | e f g h | i j k l
        shuffled and dealt out         rank 0   i j | a b | e f
                                       rank 1   k l | c d | g h
    """
    groups = np.argsort(lengths, kind="stable").reshape(-1, group)
    return groups[epoch_order(len(groups), seed, epoch=0)].ravel()


def dealt_out(order: np.ndarray, steps: int, micro_batch_size: int, ranks: int) -> np.ndarray:
    """Deal out by micro-batches to ranks in turn: int64[ranks, steps, …]."""
    dealt = order.reshape(steps, -1, ranks, micro_batch_size)  # [steps, micro-steps, ranks, micro-batch]
    return np.moveaxis(dealt, 2, 0).reshape(ranks, steps, -1)
