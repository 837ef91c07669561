"""Packers beside each other, and how evenly ranks share steps.

| packer | takes | gives |
|---|---|---|
| `best_fit`, ours | lengths int64[D] | `document_index` and `pack_offsets`, the CSR index that a dataset reads |
| `lightbinpack.obfd` | a list, or int32[D] | lists of lists |
| NeMo Automodel's `greedy_knapsack` | a list | lists of lists |
| axolotl's `pack_parallel` | int32[D] | lists of lists |

Packers take turns in one process on one core; a figure is the best of its turns. Lengths are made in a packer's form
outside the clock. Every plan is checked for lost documents and packs over budget. Peers are optional; a missing one has
a row with the reason. Objects left by imports are frozen before the clock starts: without this, packers that return
many lists took up to three times as long.

The balance is the cost of the most expensive pack of each group of packs (one a rank) over the mean, with a cost of
24,576·l + l²: attention costs as much as the rest at 24,576 tokens. An epoch takes that many times as long as with
perfectly shared work. Full steps leave out the packs that do not fill a step; with the tail, the last step is smaller
and ranks idle in its last group. Order is the correlation of a group's cost with the next one's over shuffles.
"""

import gc
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.cells import in_own_process
from benchmarks.documents import DISTRIBUTIONS
from benchmarks.harness import Row, Sizes, option, relative, table, take_turns
from benchmarks.meters import measured
from verl_ext.options import first_line
from verl_ext.packing import CostModel, PackPlan, balanced_order, cost_over_ideal, epoch_order, plan_packs

SLOW = 3.0  # seconds: a slower packer runs once
FIRST_CALL = 1000  # documents of a call that pays for imports and compilation
COST = CostModel(linear=24_576, quadratic=1)  # of a hidden size of 4,096
ACCUMULATION = 4  # groups of an optimizer step
PAIRS = 60_000  # at least, of consecutive groups: a standard error of the correlation of 1/sqrt(PAIRS)
SHUFFLES = 5  # over which step costs are averaged
QUICK = ["documents=5000", "large=20000", "repeats=2", "balance_documents=20000"]

Lengths = NDArray[np.int64]


class Options(Sizes):
    documents: int = option(1_000_000, "documents of the comparison")
    large: int = option(10_000_000, "documents for ours alone")
    balance_documents: int = option(100_000, "documents whose packs ranks share")
    repeats: int = option(5, "turns, of which the best counts")


class Packer(NamedTuple):
    """pack(prepare(lengths), max_tokens) is a packer; documents(result) gives its packs."""

    pack: Callable[[Any, int], Any]
    prepare: Callable[[Lengths], Any]
    documents: Callable[[Any], Sequence[Any]] = lambda packs: packs


def plan_documents(plan: PackPlan) -> Sequence[Any]:
    return np.split(plan.document_index, plan.pack_offsets[1:-1])


def as_int32(lengths: Lengths) -> NDArray[np.int32]:
    return lengths.astype(np.int32)


def peer(package: str, path: str, name: str, prepare: Callable[[Lengths], Any], **settings: Any) -> Packer:
    """Import a packer from one file, else from its package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package}")
    file = Path(spec.submodule_search_locations[0]) / path
    try:
        module_spec = importlib.util.spec_from_file_location(f"_packer_of_{package}", file)
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
    except Exception:
        module = importlib.import_module(f"{package}.{path.removesuffix('.py').replace('/', '.')}")
    return Packer(partial(getattr(module, name), **settings), prepare)


OURS = "verl-ext best_fit"
_OBFD = ("lightbinpack", "__init__.py", "obfd")
_GREEDY_KNAPSACK = ("nemo_automodel", "components/datasets/llm/neat_packing.py", "greedy_knapsack")
_PACK_PARALLEL = ("axolotl", "utils/samplers/multipack.py", "pack_parallel")
PACKERS: dict[str, Callable[[], Packer]] = {
    OURS: lambda: Packer(plan_packs, lambda lengths: lengths, plan_documents),
    "lightbinpack.obfd (list)": lambda: peer(*_OBFD, np.ndarray.tolist),
    "lightbinpack.obfd (int32 array)": lambda: peer(*_OBFD, as_int32),
    "NeMo Automodel greedy_knapsack": lambda: peer(*_GREEDY_KNAPSACK, np.ndarray.tolist),
    "axolotl pack_parallel": lambda: peer(
        *_PACK_PARALLEL,
        as_int32,
        group_size=100_000,
        bin_size=200,
        num_processes=1,  # its sampler's defaults
    ),
}


@table(
    "lengths {lengths} | packer {packer} | documents {documents:,} | packs {packs:,} | fill {fill:.2%} | "
    "seconds {seconds:.3f} | to ours {× seconds:.1f} × | first call, s {first_call:.3f}"
)
def compared(options: Options, folder: Path) -> Iterable[Row]:
    """Packers on the same documents."""
    packers, absent = {}, []
    for name, load in PACKERS.items():
        try:
            packers[name] = load()
        except Exception as error:  # a foreign import may raise anything
            absent.append({"packer": name, "failed": first_line(error)})
    for lengths_name, distribution in DISTRIBUTIONS.items():
        lengths, rows, turns = distribution.draw(options.documents, np.random.default_rng(0)), [], {}
        for name, packer in packers.items():
            whole = partial(timed, packer, lengths, distribution.max_tokens)
            first_call, _ = timed(packer, lengths[:FIRST_CALL], distribution.max_tokens)
            took, packed = whole()
            figures = checked(name, packer.documents(packed), lengths, distribution.max_tokens)
            work = {"lengths": lengths_name, "documents": options.documents, "packer": name}
            rows.append({**work, **figures, "first_call": first_call})
            turns[name] = (lambda took=took: (took, None)) if took > SLOW else whole
        for row, took in zip(rows, take_turns(turns, options.repeats).values(), strict=True):
            row["seconds"] = min(seconds for seconds, _ in took)
        yield from relative(rows, "seconds")
    yield from absent


def timed(packer: Packer, lengths: Lengths, max_tokens: int) -> tuple[float, Any]:
    """Return the seconds of a call and its packs."""
    prepared = packer.prepare(lengths)
    gc.collect()
    gc.freeze()  # keeps objects of the peers' imports out of collections while a packer makes its lists
    started = time.perf_counter()
    packed = packer.pack(prepared, max_tokens)
    return time.perf_counter() - started, packed


def checked(name: str, packs: Sequence[Any], lengths: Lengths, max_tokens: int) -> Row:
    """Return packs and fill, if every document lies in one pack."""
    documents = np.concatenate([np.asarray(pack, np.int64) for pack in packs])
    if not np.array_equal(np.bincount(documents, minlength=len(lengths)), np.ones(len(lengths), np.int64)):
        raise RuntimeError(f"{name} lost or repeated documents")
    starts = np.cumsum([0] + [len(pack) for pack in packs[:-1]])
    if np.add.reduceat(lengths[documents], starts).max() > max_tokens:
        raise RuntimeError(f"{name} went over the budget")
    return {"packs": len(packs), "fill": float(lengths.sum() / len(packs) / max_tokens)}


@table(
    "lengths {lengths} | documents {documents:,} | packs {packs:,} | fill {fill:.3%} | "
    "seconds of one core {seconds:.2f} | peak MiB above the input {peak_mib:.0f}"
)
def large(options: Options, folder: Path) -> Iterable[Row]:
    """Our plan alone, in a process of its own."""
    for name in DISTRIBUTIONS:
        yield {"lengths": name, "documents": options.large, **in_own_process(large_plan, name, options.large)}


def large_plan(name: str, documents: int) -> Row:
    distribution = DISTRIBUTIONS[name]
    lengths = distribution.draw(documents, np.random.default_rng(0))
    gc.collect()
    with measured() as figures:
        plan = plan_packs(lengths, distribution.max_tokens)
    return {**figures, **checked(OURS, plan_documents(plan), lengths, distribution.max_tokens)}


@table(
    "lengths {lengths} | ranks {ranks} | random order {random:.3f} | cost-sorted groups {sorted:.4f} | "
    "with the tail {with_tail:.4f} | order, cost-sorted {order_sorted:+.4f} | order, random {order_random:+.4f} | "
    "± {error:.4f}"
)
def balance(options: Options, folder: Path) -> Iterable[Row]:
    """The cost of steps of four groups over perfectly shared work."""
    for name, distribution in DISTRIBUTIONS.items():
        lengths = distribution.draw(options.balance_documents, np.random.default_rng(0))
        costs = COST.packs(plan_packs(lengths, distribution.max_tokens, seed=0), lengths)
        for ranks in (8, 32, 128):
            if len(costs) >= 2 * ranks * ACCUMULATION:
                yield {"lengths": name, "ranks": ranks, **shared(costs, ranks)}


def shared(costs: NDArray[np.float64], ranks: int) -> Row:
    batch = ranks * ACCUMULATION
    steps = len(costs) // batch
    epochs = max(-(-PAIRS // (steps * ACCUMULATION)), SHUFFLES)
    uneven: dict[str, list[float]] = {"random": [], "sorted": [], "with_tail": []}
    orders: dict[str, list[float]] = {"random": [], "sorted": []}
    for epoch in range(epochs):
        visits = {
            "random": epoch_order(len(costs), 0, epoch)[: steps * batch],
            "sorted": balanced_order(costs, batch, ranks, 0, epoch, drop_last=True),
        }
        for name, order in visits.items():
            groups = costs[order].reshape(-1, ranks).sum(axis=1)
            orders[name].append(float(np.corrcoef(groups[:-1], groups[1:])[0, 1]))
        if epoch < SHUFFLES:
            visits["with_tail"] = balanced_order(costs, batch, ranks, 0, epoch)
            for name, order in visits.items():
                uneven[name].append(cost_over_ideal(costs[order], ranks, batch))
    return {
        **{name: float(np.mean(found)) for name, found in uneven.items()},
        **{f"order_{name}": float(np.mean(found)) for name, found in orders.items()},
        "error": float(max(np.std(found, ddof=1) for found in orders.values()) / np.sqrt(epochs)),
    }
