"""Packers beside each other, and how evenly ranks share steps.

Lengths are made in a packer's form outside the clock. Every plan is checked for lost documents and packs over budget. A
missing peer has a row with the reason. Full steps leave out the packs that do not fill a step; with the tail, the last
step is smaller and ranks idle in its last group.
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

from benchmarks.documents import DISTRIBUTIONS
from benchmarks.harness import Row, Sizes, option, relative, table, take_turns
from verl_ext.options import first_line
from verl_ext.packing import CostModel, balanced_order, cost_over_ideal, epoch_order, plan_packs

FIRST_CALL = 1000  # documents of a call that pays for imports and compilation
COST = CostModel(linear=24_576, quadratic=1)  # of a hidden size of 4,096
ACCUMULATION = 4  # groups of an optimizer step
SHUFFLES = 5  # over which step costs are averaged
QUICK = ["documents=5000", "repeats=2", "balance_documents=20000"]

Lengths = NDArray[np.int64]


class Options(Sizes):
    documents: int = option(1_000_000, "documents of the comparison")
    balance_documents: int = option(100_000, "documents whose packs ranks share")
    repeats: int = option(5, "turns, of which the best counts")


class Packer(NamedTuple):
    """pack(prepare(lengths), max_tokens) is a packer; documents(result) gives its packs."""

    pack: Callable[[Any, int], Any]
    prepare: Callable[[Lengths], Any]
    documents: Callable[[Any], Iterable[Any]] = lambda packs: packs


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
as_int32 = partial(np.asarray, dtype=np.int32)
_OBFD = ("lightbinpack", "__init__.py", "obfd")
_GREEDY_KNAPSACK = ("nemo_automodel", "components/datasets/llm/neat_packing.py", "greedy_knapsack")
_PACK_PARALLEL = ("axolotl", "utils/samplers/multipack.py", "pack_parallel")
_SAMPLERS_DEFAULTS = {"group_size": 100_000, "bin_size": 200, "num_processes": 1}
PACKERS: dict[str, Callable[[], Packer]] = {
    OURS: lambda: Packer(plan_packs, lambda lengths: lengths, lambda plan: map(plan.documents, range(plan.num_packs))),
    "lightbinpack.obfd (list)": lambda: peer(*_OBFD, np.ndarray.tolist),
    "lightbinpack.obfd (int32 array)": lambda: peer(*_OBFD, as_int32),
    "NeMo Automodel greedy_knapsack": lambda: peer(*_GREEDY_KNAPSACK, np.ndarray.tolist),
    "axolotl pack_parallel": lambda: peer(*_PACK_PARALLEL, as_int32, **_SAMPLERS_DEFAULTS),
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
    for lengths_name, (budget, draw) in DISTRIBUTIONS.items():
        lengths = draw(options.documents, np.random.default_rng(0))
        first_calls = {name: timed(name, one, lengths[:FIRST_CALL], budget)[0] for name, one in packers.items()}
        contestants = {name: partial(timed, name, packer, lengths, budget) for name, packer in packers.items()}
        rows = []
        for name, turns in take_turns(contestants, options.repeats).items():
            row = {"lengths": lengths_name, "documents": options.documents, "packer": name, **turns[0][1]}
            rows.append({**row, "seconds": min(took for took, _ in turns), "first_call": first_calls[name]})
        yield from relative(rows, "seconds")
    yield from absent


def timed(name: str, packer: Packer, lengths: Lengths, max_tokens: int) -> tuple[float, Row]:
    """Return the seconds of a call, and its figures."""
    prepared = packer.prepare(lengths)
    gc.collect()
    gc.freeze()  # keeps objects of the peers' imports out of collections while a packer makes its lists
    started = time.perf_counter()
    packed = packer.pack(prepared, max_tokens)
    return time.perf_counter() - started, checked(name, [*packer.documents(packed)], lengths, max_tokens)


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
    "lengths {lengths} | ranks {ranks} | random order {random:.3f} | cost-sorted groups {sorted:.4f} | "
    "with the tail {with_tail:.4f}"
)
def balance(options: Options, folder: Path) -> Iterable[Row]:
    """The cost of steps of four groups over perfectly shared work."""
    for name, (budget, draw) in DISTRIBUTIONS.items():
        lengths = draw(options.balance_documents, np.random.default_rng(0))
        costs = COST.packs(plan_packs(lengths, budget, seed=0), lengths)
        for ranks in (8, 32, 128):
            if len(costs) >= 2 * ranks * ACCUMULATION:
                yield {"lengths": name, "ranks": ranks, **shared(costs, ranks)}


def shared(costs: NDArray[np.float64], ranks: int) -> Row:
    batch = ranks * ACCUMULATION
    uneven: dict[str, list[float]] = {"random": [], "sorted": [], "with_tail": []}
    for epoch in range(SHUFFLES):
        orders = {
            "random": epoch_order(len(costs), 0, epoch)[: len(costs) // batch * batch],
            "sorted": balanced_order(costs, batch, ranks, 0, epoch, drop_last=True),
            "with_tail": balanced_order(costs, batch, ranks, 0, epoch),
        }
        for name, order in orders.items():
            uneven[name].append(cost_over_ideal(costs[order], ranks, batch))
    return {name: float(np.mean(found)) for name, found in uneven.items()}
