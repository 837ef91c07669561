"""A step on 8 to 512 ranks, simulated, and checked on two.

    micro-step   the most expensive pack of a group of packs, one a rank, times each rank's jitter
                 + FSDP's traffic that this computation does not hide
    step         its micro-steps, the optimizer, small collectives, and a share of a checkpoint

Costs, orders and the wait for the slowest rank are those of `verl_ext.packing`; what computation hides is that of
`verl-ext plan`. docs/why/scaling.md explains the assumptions and the check, whose small models have no recomputation.
"""

import os
import statistics
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.cells import ROOT, on_ranks
from benchmarks.documents import DISTRIBUTIONS, make_documents, write_documents
from benchmarks.harness import Row, Sizes, Turns, option, table
from benchmarks.models import VOCABULARY, write_qwen3
from verl_ext.data.tokenized.arrow import TokenizedData
from verl_ext.engines.cost import balancing_cost
from verl_ext.flops import head_width
from verl_ext.packing import balanced_order, epoch_order, micro_step_costs, plan_packs
from verl_ext.tools.plan.time import not_hidden

RANKS = (8, 16, 32, 64, 128, 256, 512)
ACCUMULATION = 4  # a rank's packs in a step
FORWARDS = 4  # in a training step with gradient checkpointing: forward, recomputation, and backward as two
GATHERS = 2  # of a layer's parameters in a micro-step: one for the forward, one for recomputation and backward
SAVE_EVERY = 200  # steps between two checkpoints
STATE_BYTES = 12  # a parameter's bytes in a checkpoint: itself and Adam's two moments in fp32
OPTIMIZER_BYTES = 28  # bytes that an Adam step reads and writes for a parameter
PACKS = 4  # of a step of the check
HIDDEN, LAYERS, BUDGET = 256, 4, 2048
GATHERED = 1 << 24  # bytes of the all-gather that measures the link
QUICK = ["documents=20000", "turns=1", "steps=1"]


class Options(Sizes):
    model: str | None = option(None, "folder with a config.json; null: Qwen3-8B's")
    data: str | None = option(None, "tokenized folder, whose lengths are used; null: drawn, LongAlign's mixture")
    documents: int = option(2_000_000, "documents that are drawn")
    max_tokens: int = option(65_536, "tokens of a pack")
    flops: float = option(400e12, "operations a second of a rank in matrix products and attention", above=0)
    node_ranks: int = option(8, "data-parallel ranks of a node")
    node_link: float = option(300e9, "bytes a second that a rank sends inside a node", above=0)
    network: float = option(45e9, "bytes a second that it sends to other nodes, and any collective over nodes", above=0)
    latency: float = option(30e-6, "seconds of a small collective for each doubling of the nodes", least=0)
    jitter: float = option(0.02, "standard deviation of the logarithm of a rank's time for a micro-step", least=0)
    slow: float = option(1.0, "factor by which one rank, always the same, takes longer for everything", above=0)
    memory: float = option(2.5e12, "bytes a second of a rank's memory, for the optimizer", above=0)
    storage: float = option(40e9, "bytes a second that all nodes together write", above=0)
    node_storage: float = option(4e9, "bytes a second that one node writes", above=0)
    turns: int = option(5, "turns of the check")
    steps: int = option(8, "timed steps of a turn")


def step_time(
    costs: NDArray[np.float64],
    machines: Options,
    ranks: int,
    parameters: float,
    layers: int,
    accumulation: int = ACCUMULATION,
    bytes_gathered: int = 2,
) -> dict[str, float]:
    """Return the mean seconds of an epoch's full steps, split into parts.

    costs: float64[P], the operations of each pack, in the order of their visits. parameters: of a model, of
    `bytes_gathered` bytes each in FSDP's all-gathers and 4 in its reduce-scatter, which travel in `layers` equal parts
    (1 if no computation hides them). accumulation: micro-steps of a step. Raises ValueError for too few packs.

    ideal: evenly shared work. balance: waiting for a micro-step's most expensive pack. jitter: waiting for the slowest
    rank. communication: FSDP's that no computation hides. small: collectives of a few numbers. optimizer, checkpoint.
    """
    batch = ranks * accumulation
    steps = len(costs) // batch
    if not steps:
        raise ValueError(f"{ranks} ranks need {batch} packs a step; got {len(costs)}")
    alone = costs[: steps * batch] / machines.flops
    noise = np.exp(np.random.default_rng([0, ranks]).normal(0, machines.jitter, (len(alone) // ranks, ranks)))
    noise[:, 0] *= machines.slow
    dearest = micro_step_costs(alone, ranks, batch)
    slowest = micro_step_costs(alone * noise.ravel(), ranks, batch)

    # Gradients travel in the last micro-step only.
    link = machines.node_link if ranks <= machines.node_ranks else machines.network
    remote = parameters * (ranks - 1) / ranks / link
    traffic = np.full(slowest.shape, GATHERS * bytes_gathered * remote)
    traffic[:, -1] += 4 * remote
    nodes = -(-ranks // machines.node_ranks)
    parts = {
        "ideal": alone.sum() / ranks / steps,
        "balance": dearest.sum() / steps - alone.sum() / ranks / steps,
        "jitter": (slowest - dearest).sum() / steps,
        "communication": not_hidden(traffic, slowest, layers).sum() / steps,
        "small": 3 * machines.latency * np.log2(nodes + 1),  # Z, gradient norm, sums
        "optimizer": OPTIMIZER_BYTES * parameters / ranks / machines.memory,
        "checkpoint": STATE_BYTES * parameters / min(machines.storage, nodes * machines.node_storage) / SAVE_EVERY,
    }
    return {name: float(took) for name, took in parts.items()}


@table(
    "ranks {ranks} | order {order} | step, s {step:.1f} | tokens/s of a rank {speed:,.0f} | ideal {share[ideal]:.2%} | "
    "balance {share[balance]:.2%} | jitter {share[jitter]:.2%} | FSDP, not hidden {share[communication]:.2%} | "
    "small {share[small]:.2%} | optimizer {share[optimizer]:.2%} | checkpoint {share[checkpoint]:.2%}"
)
def simulated(options: Options, folder: Path) -> Iterable[Row]:
    """A step by the number of ranks, in shuffled and balanced order."""
    config = AutoConfig.from_pretrained(options.model or ROOT / "recipes/papers/glm_long/qwen3_8b")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if options.data is None:
        lengths = DISTRIBUTIONS["A"].draw(options.documents, np.random.default_rng(0))
    else:
        lengths = TokenizedData([options.data]).lengths
    lengths = lengths[lengths > 0].clip(max=options.max_tokens)
    plan = plan_packs(lengths, options.max_tokens)
    costs = balancing_cost(model, config, ulysses=1).packs(plan, lengths) * FORWARDS * unit_of(config)
    pack_tokens, layers = plan.pack_sums(lengths).mean(), config.get_text_config().num_hidden_layers
    for ranks in (ranks for ranks in RANKS if len(costs) >= ranks * ACCUMULATION):
        orders = {
            "shuffled": epoch_order(len(costs), 0, 0),
            "balanced": balanced_order(costs, ranks * ACCUMULATION, ranks, 0, 0, drop_last=True),
        }
        for name, order in orders.items():
            parts = step_time(costs[order], options, ranks, model.num_parameters(), layers)
            step = sum(parts.values())
            share = {part: took / step for part, took in parts.items()}
            speed = pack_tokens * ACCUMULATION / step
            yield {"ranks": ranks, "order": name, "step": step, "speed": speed, "share": share}


def unit_of(config: Any) -> float:
    """Return a unit of cost: a layer's attention to one token."""
    return float(config.get_text_config().num_attention_heads * head_width(config.get_text_config()))


@table(
    "GFLOP/s of a rank {flops:.1f} | GB/s of the link {link:.2f} | step of one rank, s {alone:.2f} | "
    "of two, predicted, s {predicted:.2f} | of it communication, s {communication:.2f} | "
    "measured, s {measured.median:.2f} | predicted / measured {ratio:.2f}"
)
def check(options: Options, folder: Path) -> Iterable[Row]:
    """A step of two real ranks on this machine, against its prediction."""
    write_qwen3(folder / "model", HIDDEN, LAYERS, BUDGET)
    write_documents(make_documents(400, BUDGET, VOCABULARY, np.random.default_rng(0)), folder / "data")
    alone, together = [], []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(options.turns):
            alone += pool.map(lambda _: on_ranks(1, measure, folder, options.steps)[0], range(2))
            together.append(on_ranks(2, measure, folder, options.steps)[0])
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    unit = unit_of(model.config) * (FORWARDS - 1)
    flops = statistics.median(sum(run["costs"]) * unit / sum(run["seconds"]) for run in alone)
    link = statistics.median(run["link"] for run in together)
    perfect = {"latency": 0.0, "jitter": 0.0, "slow": 1.0, "memory": 1e30, "storage": 1e30, "node_storage": 1e30}
    machines = replace(options, flops=flops, node_ranks=2, node_link=link, **perfect)
    costs = np.array(together[0]["costs"]) * unit
    parts = step_time(costs, machines, 2, model.num_parameters(), 1, PACKS // 2, bytes_gathered=4)
    measured, predicted = Turns(statistics.mean(run["seconds"]) for run in together), sum(parts.values())
    yield {
        **{"flops": flops / 1e9, "link": link / 1e9, "communication": parts["communication"]},
        "alone": statistics.median(statistics.mean(run["seconds"]) for run in alone),
        **{"predicted": predicted, "measured": measured, "ratio": Turns(predicted / took for took in measured)},
    }


def measure(folder: Path, count: int) -> Row:
    """Return the seconds of steps, the packs' costs and the link's speed."""
    import torch.distributed as dist

    from benchmarks.contestants import Setting, take_step, together

    output = folder / f"run_{os.environ['MASTER_PORT']}"  # of its own for each group
    overrides = ("parallel=cpu", f"data.train_batch_size={PACKS}", "trainer.logger=[file]")
    trainer = Setting(folder / "model", folder / "data", output, BUDGET, count + 1, overrides).packed("run").trainer
    run, ranks = trainer.run, dist.get_world_size()
    batches = trainer.batches(0, count + 1)
    took = [together(lambda batch=batch: take_step(trainer, batch))[0] for batch in batches]
    packs = np.concatenate([run.plan.packs(step) for step in range(1, count + 1)])  # the first step warms up
    part, whole = torch.zeros(GATHERED // 4 // ranks), torch.zeros(GATHERED // 4)
    gather = statistics.median(together(lambda: dist.all_gather_into_tensor(whole, part), 8))
    link = GATHERED * (ranks - 1) / ranks / gather
    return {"seconds": took[1:], "costs": run.packs.costs[packs].tolist(), "link": link}
