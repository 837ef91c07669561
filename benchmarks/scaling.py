"""The time of a step on 8 to 512 data-parallel ranks, simulated from document lengths, and checked on two real ranks.

    micro-step   the most expensive pack of a group of packs, one a rank, times each rank's jitter
                 + FSDP's traffic that this computation does not hide
    step         its micro-steps, the optimizer, small collectives, and a share of a checkpoint

Costs, orders and the wait for the slowest rank are those of `verl_ext.packing`; what computation hides is that of
`verl-ext plan`. docs/scaling.md explains the assumptions.

The check gives the simulation two measured numbers, a rank's operations per second (two one-rank runs side by side) and
the speed of a link (an all-gather of two ranks), and compares its prediction with the trainer's own steps on two ranks.
There nothing is hidden, and small models have no gradient checkpointing.
"""

import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.cells import on_ranks
from benchmarks.documents import DISTRIBUTIONS, make_documents, write_documents
from benchmarks.harness import Row, Turns, table
from benchmarks.meters import seconds
from verl_ext import options
from verl_ext.engines.cost import balancing_cost
from verl_ext.options import option
from verl_ext.packing import balanced_order, epoch_order, micro_step_costs, plan_packs
from verl_ext.tools.plan.time import not_hidden

RANKS = (8, 16, 32, 64, 128, 256, 512)
ACCUMULATION = 4  # a rank's packs in a step
FORWARDS = 4  # in a training step with gradient checkpointing: forward, recomputation, and backward as two
GATHERS = 2  # of a layer's parameters in a micro-step: one for the forward, one for recomputation and backward
SAVE_EVERY = 200  # steps between two checkpoints
STATE_BYTES = 12  # a parameter's bytes in a checkpoint: itself and Adam's two moments in fp32
OPTIMIZER_BYTES = 28  # bytes that an Adam step reads and writes for a parameter
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151_936,
}  # fmt: skip
PACKS = 4  # of a step of the check
HIDDEN, LAYERS, BUDGET = 256, 4, 2048
GATHERED = 1 << 24  # bytes of the all-gather that measures the link
QUICK = ["documents=20000", "turns=1", "steps=1"]


@dataclass(frozen=True)
class Options(options.Options):
    """The data, and the assumptions about the machines."""

    model: str | None = option(None, "folder with a config.json; null: Qwen3-8B's")
    data: str | None = option(None, "tokenized folder, whose lengths are used; null: drawn, LongAlign's mixture")
    documents: int = option(2_000_000, "documents that are drawn", least=1)
    max_tokens: int = option(65_536, "tokens of a pack", least=1)
    flops: float = option(400e12, "operations a second of a rank in matrix products and attention", above=0)
    node_ranks: int = option(8, "data-parallel ranks of a node", least=1)
    node_link: float = option(300e9, "bytes a second that a rank sends inside a node", above=0)
    network: float = option(45e9, "bytes a second that it sends to other nodes, and any collective over nodes", above=0)
    latency: float = option(30e-6, "seconds of a small collective for each doubling of the nodes", least=0)
    jitter: float = option(0.02, "standard deviation of the logarithm of a rank's time for a micro-step", least=0)
    slow: float = option(1.0, "factor by which one rank, always the same, takes longer for everything", above=0)
    memory: float = option(2.5e12, "bytes a second of a rank's memory, for the optimizer", above=0)
    storage: float = option(40e9, "bytes a second that all nodes together write", above=0)
    node_storage: float = option(4e9, "bytes a second that one node writes", above=0)
    turns: int = option(5, "turns of the check", least=1)
    steps: int = option(8, "timed steps of a turn", least=1)


@dataclass(frozen=True)
class Work:
    """The work that a run gives its ranks.

    Attributes:
        costs: float64[P], costs of the packs in the order of their visits; unit: operations of a forward pass for one
            unit of cost.
        parameters: the model's number of parameters, of `bytes_gathered` bytes each in FSDP's all-gathers and 4 in its
            reduce-scatter; layers: the equal parts in which they travel, 1 if no computation hides them.
        accumulation: micro-steps of a step.
    """

    costs: NDArray[np.float64]
    unit: float
    parameters: float
    layers: int
    accumulation: int = ACCUMULATION
    bytes_gathered: int = 2
    forwards: int = FORWARDS


def step_time(work: Work, machines: Options, ranks: int) -> dict[str, float]:
    """Return the mean seconds of a step over an epoch's full steps, split into parts.

    ideal: evenly shared work. balance: waiting for a micro-step's most expensive pack. jitter: waiting for the slowest
    rank. communication: FSDP's that no computation hides. small: collectives of a few numbers. optimizer, checkpoint.

    Raises:
        ValueError: If there are too few packs for one step.
    """
    batch = ranks * work.accumulation
    steps = len(work.costs) // batch
    if not steps:
        raise ValueError(f"{ranks} ranks need {batch} packs a step; got {len(work.costs)}")
    alone = work.costs[: steps * batch] * (work.unit * work.forwards / machines.flops)
    noise = np.exp(np.random.default_rng([0, ranks]).normal(0, machines.jitter, (len(alone) // ranks, ranks)))
    noise[:, 0] *= machines.slow
    dearest = micro_step_costs(alone, ranks, batch)
    slowest = micro_step_costs(alone * noise.ravel(), ranks, batch)

    # Gradients travel in the last micro-step only.
    link = machines.node_link if ranks <= machines.node_ranks else machines.network
    remote = work.parameters * (ranks - 1) / ranks / link
    traffic = np.full(slowest.shape, GATHERS * work.bytes_gathered * remote)
    traffic[:, -1] += 4 * remote
    nodes = -(-ranks // machines.node_ranks)
    parts = {
        "ideal": alone.sum() / ranks / steps,
        "balance": dearest.sum() / steps - alone.sum() / ranks / steps,
        "jitter": (slowest - dearest).sum() / steps,
        "communication": not_hidden(traffic, slowest, work.layers).sum() / steps,
        "small": 3 * machines.latency * np.log2(nodes + 1),  # Z, gradient norm, sums
        "optimizer": OPTIMIZER_BYTES * work.parameters / ranks / machines.memory,
        "checkpoint": STATE_BYTES * work.parameters / min(machines.storage, nodes * machines.node_storage) / SAVE_EVERY,
    }
    return {name: float(took) for name, took in parts.items()}


@table(
    "ranks {ranks} | order {order} | step, s {step:.1f} | tokens/s of a rank {speed:,.0f} | ideal {share[ideal]:.2%} | "
    "balance {share[balance]:.2%} | jitter {share[jitter]:.2%} | FSDP, not hidden {share[communication]:.2%} | "
    "small {share[small]:.2%} | optimizer {share[optimizer]:.2%} | checkpoint {share[checkpoint]:.2%}"
)
def simulated(options: Options, folder: Path) -> Iterable[Row]:
    """A step by the number of ranks, with packs in shuffled and in balanced order."""
    config = AutoConfig.from_pretrained(options.model) if options.model else AutoConfig.for_model(**QWEN3_8B)
    text, lengths = config.get_text_config(), lengths_of(options)
    plan = plan_packs(lengths, options.max_tokens)
    with torch.device("meta"):
        cost = balancing_cost(AutoModelForCausalLM.from_config(config), config, ulysses=1)
    costs, pack_tokens = cost.packs(plan, lengths), plan.pack_sums(lengths).mean()
    for ranks in (ranks for ranks in RANKS if len(costs) >= ranks * ACCUMULATION):
        orders = {
            "shuffled": epoch_order(len(costs), 0, 0),
            "balanced": balanced_order(costs, ranks * ACCUMULATION, ranks, 0, 0, drop_last=True),
        }
        for name, order in orders.items():
            work = Work(costs[order], unit_of(text), parameters_of(text), text.num_hidden_layers)
            parts = step_time(work, options, ranks)
            step = sum(parts.values())
            share = {part: took / step for part, took in parts.items()}
            speed = pack_tokens * ACCUMULATION / step
            yield {"ranks": ranks, "order": name, "step": step, "speed": speed, "share": share}


def lengths_of(options: Options) -> NDArray[np.integer]:
    """Return the lengths of the documents, cut to a pack."""
    if options.data is None:
        lengths: NDArray[np.integer] = DISTRIBUTIONS["A"].draw(options.documents, np.random.default_rng(0))
    else:
        from verl_ext.data.arrow import TokenizedData

        lengths = TokenizedData([options.data]).lengths
    return lengths[lengths > 0].clip(max=options.max_tokens)


def unit_of(text: Any) -> float:
    """Return the operations of one unit of cost, one layer's attention to one token."""
    return 2.0 * text.num_attention_heads * text.head_dim


def parameters_of(text: Any) -> float:
    """Return the number of parameters in a dense model's matrices."""
    attention = text.hidden_size * text.head_dim * 2 * (text.num_attention_heads + text.num_key_value_heads)
    layer = attention + 3 * text.hidden_size * text.intermediate_size
    return float(layer * text.num_hidden_layers + 2 * text.vocab_size * text.hidden_size)


@table(
    "GFLOP/s of a rank {flops:.1f} | GB/s of the link {link:.2f} | step of one rank, s {alone:.2f} | "
    "of two, predicted, s {predicted:.2f} | of it communication, s {communication:.2f} | "
    "measured, s {measured.median:.2f} | predicted / measured {ratio:.2f}"
)
def check(options: Options, folder: Path) -> Iterable[Row]:
    """A step of two real ranks on this machine, against its prediction."""
    from benchmarks.small_run import VOCABULARY, write_model

    write_model(folder / "model", HIDDEN, LAYERS, BUDGET)
    write_documents(make_documents(400, BUDGET, VOCABULARY, np.random.default_rng(0)), folder / "data")
    alone, together = [], []
    for _ in range(options.turns):
        alone += [run for run, *_ in on_ranks(1, measure, folder, options.steps, copies=2, OMP_NUM_THREADS="1")]
        together += [run for run, *_ in on_ranks(2, measure, folder, options.steps, OMP_NUM_THREADS="1")]
    text, forwards = AutoConfig.from_pretrained(folder / "model"), FORWARDS - 1
    operations = unit_of(text) * forwards
    flops = statistics.median(sum(run["costs"]) * operations / sum(run["seconds"]) for run in alone)
    link = statistics.median(run["link"] for run in together)
    costs = np.array(together[0]["costs"])
    work = Work(costs, unit_of(text), parameters_of(text), 1, PACKS // 2, bytes_gathered=4, forwards=forwards)
    machines = replace(
        options, flops=flops, node_ranks=2, node_link=link, latency=0.0, jitter=0.0, slow=1.0, memory=1e30, storage=1e30
    )
    parts = step_time(work, replace(machines, node_storage=1e30), 2)
    measured = Turns(statistics.mean(run["seconds"]) for run in together)
    yield {
        "flops": flops / 1e9,
        "link": link / 1e9,
        "alone": statistics.median(statistics.mean(run["seconds"]) for run in alone),
        "predicted": sum(parts.values()),
        "communication": parts["communication"],
        "measured": measured,
        "ratio": Turns([sum(parts.values())] * len(measured)) / measured,
    }


def measure(folder: Path, count: int) -> Row:
    """Take the trainer's steps on this rank; return their seconds, the packs' costs and the speed of the link."""
    import torch
    import torch.distributed as dist

    from benchmarks.small_run import build_trainer, no_progress_bars, take_step

    no_progress_bars()
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    trainer = build_trainer(
        folder,
        folder / f"run_{os.environ['MASTER_PORT']}",  # of its own for each group
        *(f"data.max_tokens={BUDGET}", f"data.train_batch_size={PACKS}", "trainer.logger=[file]"),
        *(f"trainer.total_training_steps={count + 1}", "model.enable_gradient_checkpointing=false"),
    )
    run = trainer.run

    def together(function: Any) -> float:
        dist.barrier()
        return seconds(lambda: (function(), dist.barrier()))

    steps = [
        together(lambda batch=batch: take_step(trainer, batch))
        for batch in trainer.rank.batches(run.train_set, run.plan, 0, count + 1)
    ]
    packs = np.concatenate([run.plan.packs(step) for step in range(1, count + 1)])  # the first step warms up
    part, whole = torch.zeros(GATHERED // 4 // ranks), torch.zeros(GATHERED // 4)
    gather = statistics.median(together(lambda: dist.all_gather_into_tensor(whole, part)) for _ in range(8))
    link = GATHERED * (ranks - 1) / ranks / gather
    return {"seconds": steps[1:], "costs": run.packs.costs[packs].tolist(), "link": link}
