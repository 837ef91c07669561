"""Simulate the time of a step on 8 to 512 data-parallel ranks from document lengths, and check it on this machine.

    python benchmarks/scaling.py                      # the simulation
    python benchmarks/scaling.py --check              # also measures one rank, predicts two, and measures two

docs/scaling.md explains the assumptions and the parts of a step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # lets the script run by its path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.length_distributions import DISTRIBUTIONS
from verl_ext.engines.cost import balancing_cost
from verl_ext.packing import balanced_order, epoch_order, plan_packs

RANKS = (8, 16, 32, 64, 128, 256, 512)
ACCUMULATION = 4  # a rank's packs in a step
FORWARDS = 4  # in a training step with gradient checkpointing: forward, recomputation, and backward as two
GATHERS = 2  # of a layer's parameters in a micro-step: one for the forward, one for recomputation and backward
STATE_BYTES = 12  # a parameter's bytes in a checkpoint: itself and Adam's two moments in fp32
OPTIMIZER_BYTES = 28  # bytes that an Adam step reads and writes for a parameter
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151_936,
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """The assumptions about the machines.

    Attributes:
        flops: operations per second that a rank sustains in matrix products and attention.
        node_ranks: data-parallel ranks of a node; node_link, network: bytes per second that a rank sends inside a
            node, and to another node. A collective over several nodes is as fast as the network.
        latency: seconds of a small collective for each doubling of the nodes.
        jitter: standard deviation of the logarithm of a rank's time for a micro-step (clocks, memory, other work).
        slow: the factor by which one rank, always the same, takes longer for everything.
        memory: bytes per second of a rank's memory, for the optimizer.
        storage: bytes per second that all nodes together write; node_storage: that one node writes.
    """

    flops: float = 400e12
    node_ranks: int = 8
    node_link: float = 300e9
    network: float = 45e9
    latency: float = 30e-6
    jitter: float = 0.02
    slow: float = 1.0
    memory: float = 2.5e12
    storage: float = 40e9
    node_storage: float = 4e9

    def link(self, ranks: int) -> float:
        """Return the bytes per second of a collective over a number of ranks."""
        return self.node_link if ranks <= self.node_ranks else self.network

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes that a number of ranks fill."""
        return -(-ranks // self.node_ranks)


@dataclass(frozen=True)
class Work:
    """The work that a run gives its ranks.

    Attributes:
        costs: float64[P], costs of the packs in the order of their visits; unit: operations of a forward pass for one
            unit of cost.
        parameters: the model's number of parameters, of `bytes_gathered` bytes each in FSDP's all-gathers and
            `bytes_reduced` in its reduce-scatter; layers: the equal parts in which they travel.
        accumulation: micro-steps of a step; save_every: steps between two checkpoints.
        overlaps: whether gathering a layer's parameters overlaps with the layer before it.
    """

    costs: NDArray[np.float64]
    unit: float
    parameters: float
    layers: int
    accumulation: int = ACCUMULATION
    save_every: int = 200
    bytes_gathered: int = 2
    bytes_reduced: int = 4
    forwards: int = FORWARDS
    overlaps: bool = True


def step_time(work: Work, cluster: Cluster, ranks: int, seed: int = 0) -> dict[str, float]:
    """Return the mean seconds of a step over an epoch's full steps, split into parts.

    ideal: evenly shared work. balance: waiting for a micro-step's most expensive pack. jitter: waiting for the slowest
    rank. communication: FSDP's that no computation hides. small: collectives of a few numbers. optimizer, checkpoint.

    Raises:
        ValueError: If there are too few packs for one step.
    """
    steps = len(work.costs) // (ranks * work.accumulation)
    if not steps:
        raise ValueError(f"{ranks} ranks need {ranks * work.accumulation} packs a step; got {len(work.costs)}")
    costs = work.costs[: steps * ranks * work.accumulation].reshape(-1, ranks)
    alone = costs * (work.unit * work.forwards / cluster.flops)
    speeds = np.ones(ranks)
    speeds[0] = cluster.slow
    noise = speeds * np.exp(np.random.default_rng([seed, ranks]).normal(0, cluster.jitter, alone.shape))
    slowest = (alone * noise).max(axis=1)
    remote = work.parameters * (ranks - 1) / ranks / cluster.link(ranks)
    gather, reduce = remote * work.bytes_gathered, remote * work.bytes_reduced
    last = np.arange(len(costs)) % work.accumulation == work.accumulation - 1
    travels = GATHERS * gather + last * reduce  # gradients travel in the last micro-step only
    hidden = slowest * (1 - 1 / work.layers) if work.overlaps else 0.0  # nothing hides the first layer's transfer
    exposed = np.maximum(travels - hidden, travels / work.layers if work.overlaps else travels) * (ranks > 1)
    speed = min(cluster.storage, cluster.nodes(ranks) * cluster.node_storage)
    parts = {
        "ideal": alone.mean() * work.accumulation,
        "balance": (alone.max(axis=1) - alone.mean(axis=1)).mean() * work.accumulation,
        "jitter": (slowest - alone.max(axis=1)).mean() * work.accumulation,
        "communication": exposed.mean() * work.accumulation,
        "small": 3 * cluster.latency * np.log2(max(cluster.nodes(ranks), 1) + 1),  # Z, gradient norm, sums
        "optimizer": OPTIMIZER_BYTES * work.parameters / ranks / cluster.memory,
        "checkpoint": STATE_BYTES * work.parameters / speed / work.save_every,
    }
    return {name: float(seconds) for name, seconds in parts.items()}


def simulated(lengths: NDArray[np.integer], max_tokens: int, hf_config: Any, cluster: Cluster) -> list[dict[str, Any]]:
    """Simulate a row for each number of ranks and each order of the packs, shuffled and balanced."""
    with torch.device("meta"):
        cost = balancing_cost(AutoModelForCausalLM.from_config(hf_config), hf_config, ulysses=1)
    packs = cost.packs(plan_packs(lengths, max_tokens), lengths)
    text = hf_config.get_text_config()
    unit = 2.0 * text.num_attention_heads * text.head_dim
    rows = []
    for ranks in RANKS:
        batch = ranks * ACCUMULATION
        if len(packs) < batch:
            break
        orders = {
            "shuffled": epoch_order(len(packs), 0, 0),
            "balanced": balanced_order(packs, batch, ranks, 0, 0, drop_last=True),
        }
        for name, order in orders.items():
            work = Work(packs[order], unit, parameters_of(text), text.num_hidden_layers)
            parts = step_time(work, cluster, ranks)
            rows.append({"ranks": ranks, "order": name, "step": sum(parts.values()), **parts})
    return rows


def parameters_of(text: Any) -> float:
    """Return the number of parameters in a dense model's matrices."""
    attention = text.hidden_size * text.head_dim * 2 * (text.num_attention_heads + text.num_key_value_heads)
    layer = attention + 3 * text.hidden_size * text.intermediate_size
    return float(layer * text.num_hidden_layers + 2 * text.vocab_size * text.hidden_size)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as text: seconds of a step, then each part's share in percent."""
    parts = ("ideal", "balance", "jitter", "communication", "small", "optimizer", "checkpoint")
    lines = [f"{'ranks':>5} {'order':>9} {'step s':>7} " + " ".join(f"{part:>13}" for part in parts)]
    for row in rows:
        shares = " ".join(f"{100 * row[part] / row['step']:>12.2f}%" for part in parts)
        lines.append(f"{row['ranks']:>5} {row['order']:>9} {row['step']:>7.2f} {shares}")
    return "\n".join(lines)


# The check trains a small model on two ranks of this machine with the trainer's own steps.

STEPS, PACKS = 8, 4  # timed steps, and packs in a step
HIDDEN, LAYERS, BUDGET = 256, 4, 2048
GATHERED = 1 << 24  # bytes of the all-gather that measures the link


def check(turns: int) -> dict[str, Any]:
    """Predict a step of two ranks, and measure it. Two one-rank runs side by side give the operations per second, an
    all-gather of two ranks gives the speed of the link."""
    from benchmarks.lengths import make_documents, write_dataset
    from benchmarks.model import VOCABULARY, write_model
    from benchmarks.quiet import no_progress_bars

    no_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", HIDDEN, LAYERS, BUDGET, 0)
        write_dataset(make_documents(400, BUDGET, VOCABULARY, np.random.default_rng(0)), folder / "documents")
        alone, together = [], []
        for _ in range(turns):
            alone += _runs(folder, 1, 1)
            together += _runs(folder, 2)
        text = AutoConfig.from_pretrained(folder / "model")
    unit, forwards = 2.0 * text.num_attention_heads * text.head_dim, FORWARDS - 1  # without gradient checkpointing
    work = Work(
        np.array(together[0]["costs"]),
        unit,
        parameters_of(text),
        LAYERS,
        accumulation=PACKS // 2,
        save_every=10**12,
        bytes_gathered=4,
        forwards=forwards,
        overlaps=False,
    )
    flops = statistics.median(sum(run["costs"]) * unit * forwards / sum(run["seconds"]) for run in alone)
    link = statistics.median(run["link"] for run in together)
    cluster = Cluster(flops, 2, node_link=link, latency=0, jitter=0, memory=float("inf"))
    parts = step_time(work, cluster, 2)
    predicted, seen = sum(parts.values()), [statistics.mean(run["seconds"]) for run in together]
    return {
        "GFLOP/s of a rank": flops / 1e9,
        "GB/s between two ranks": link / 1e9,
        "a step of one rank, s": statistics.median(statistics.mean(run["seconds"]) for run in alone),
        "a step of two ranks, s, predicted": predicted,
        "of it communication, s": parts["communication"],
        "a step of two ranks, s, measured": statistics.median(seen),
        "predicted / measured": statistics.median(predicted / seconds for seconds in seen),
        "lowest, highest": [predicted / max(seen), predicted / min(seen)],
    }


def _runs(folder: Path, *ranks: int) -> list[dict[str, Any]]:
    """Start a run for each number of ranks, all at the same time, and return their measurements."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr=127.0.0.1"]
    processes = [
        subprocess.Popen(
            [*torchrun, f"--nproc_per_node={count}", __file__, "--rank-of", str(folder), "--output", str(output)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        for number, count in enumerate(ranks)
        if (output := folder / f"{count}-{number}.json")
    ]
    for process in processes:
        if process.wait():
            raise RuntimeError(f"a run of {ranks} ranks failed")
    return [json.loads((folder / f"{count}-{number}.json").read_text()) for number, count in enumerate(ranks)]


def measure(folder: Path, output: Path) -> None:
    """Take the trainer's steps on this rank, started by torchrun; rank 0 writes their seconds and the packs' costs."""
    from verl_ext.trainer.distributed import process_group

    with process_group():
        import torch
        import torch.distributed as dist

        from benchmarks.quiet import no_progress_bars
        from benchmarks.steps import take_step
        from verl_ext.config import compose
        from verl_ext.trainer.setup import prepare
        from verl_ext.trainer.trainer import SFTTrainer

        no_progress_bars()
        torch.set_num_threads(1)
        run = prepare(
            compose(
                [
                    *(f"data.train_dir={folder / 'documents'}", f"model.path={folder / 'model'}", "parallel=cpu"),
                    *(f"data.max_tokens={BUDGET}", f"data.train_batch_size={PACKS}", "data.num_workers=0"),
                    *(f"trainer.total_training_steps={STEPS + 1}", "trainer.logger=[file]"),
                    *("model.enable_gradient_checkpointing=false", f"trainer.default_local_dir={output}.run"),
                ]
            )
        )
        trainer = SFTTrainer(run)
        seconds = []
        for batch in trainer.rank.batches(run.train_set, run.plan, 0, STEPS + 1):
            dist.barrier()
            began = time.perf_counter()
            take_step(trainer, batch, summed=True)
            dist.barrier()
            seconds.append(time.perf_counter() - began)
        packs = np.concatenate([run.plan.packs(step) for step in range(1, STEPS + 1)])  # the first step warms up
        result = {"seconds": seconds[1:], "costs": run.train_set.pack_costs(run.cost)[packs].tolist(), "link": _link()}
        if dist.get_rank() == 0:
            output.write_text(json.dumps(result))


def _link() -> float:
    """Return the bytes per second that a rank receives in an all-gather."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    part = torch.zeros(GATHERED // 4 // ranks)
    whole = torch.zeros(GATHERED // 4)
    seconds = []
    for _ in range(8):
        dist.barrier()
        began = time.perf_counter()
        dist.all_gather_into_tensor(whole, part)
        seconds.append(time.perf_counter() - began)
    return GATHERED * (ranks - 1) / ranks / statistics.median(seconds)


def main() -> None:
    """Simulate, and run the check if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder with a config.json; Qwen3-8B's by default")
    parser.add_argument("--data", help="a tokenized folder, whose lengths are used; benchmarks/lengths' by default")
    parser.add_argument("--max-tokens", type=int, default=65_536)
    parser.add_argument("--documents", type=int, default=2_000_000, help="drawn where no --data is given")
    for name, value in asdict(Cluster()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--check", type=int, nargs="?", const=5, default=0, metavar="TURNS")
    parser.add_argument("--output", type=Path, help="every figure as JSON")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        measure(options.rank_of, options.output)
        return
    cluster = Cluster(**{name: getattr(options, name) for name in asdict(Cluster())})
    hf_config = AutoConfig.from_pretrained(options.model) if options.model else AutoConfig.for_model(**QWEN3_8B)
    rows = simulated(_lengths(options), options.max_tokens, hf_config, cluster)
    print(table(rows))
    found: dict[str, Any] = {"cluster": asdict(cluster), "rows": rows}
    if options.check:
        found["check"] = check(options.check)
        print(*(f"{name}: {value}" for name, value in found["check"].items()), sep="\n")
    if options.output:
        options.output.write_text(json.dumps(found, indent=1))


def _lengths(options: argparse.Namespace) -> NDArray[np.integer]:
    if options.data is None:
        return DISTRIBUTIONS["A"].draw(options.documents, np.random.default_rng(0)).clip(max=options.max_tokens)
    from verl_ext.data.arrow import TokenizedData

    lengths = TokenizedData([options.data]).lengths
    return lengths[lengths > 0].clip(max=options.max_tokens)


if __name__ == "__main__":
    main()
