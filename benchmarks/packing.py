"""Packers beside each other, and how evenly ranks share the steps of full packs.

Packers take turns in one process on one core; a figure is the best of its turns. Each receives lengths in its own form,
made outside the clock, and returns packs in its own form: lists of lists from the others, `document_index` and
`pack_offsets` from ours. Every plan is checked for lost documents and packs over budget. Peers are optional; a missing
one has a row with the reason. TRL's packing function moves the tokens with the documents and gets 5,000 documents;
verl's Karmarkar–Karp distributes documents over a given number of packs, which is raised until they fit, and gets 300.
Ours is compared with each on the same number. Objects left by imports are frozen before the clock starts: without this,
packers that return many lists took up to three times as long.

The balance is the cost of the most expensive pack of each group of packs (one a rank) over the mean, with a cost of
24,576·l + l²: attention costs as much as the rest at 24,576 tokens. An epoch takes that many times as long as with
perfectly shared work. Full steps leave out the packs that do not fill a step; with the tail, the last step is smaller
and ranks idle in its last group. Order is the correlation of a group's cost with the next one's over shuffles.
"""

import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import packers
from benchmarks.cells import in_own_process
from benchmarks.documents import DISTRIBUTIONS
from benchmarks.harness import Row, Turns, relative, table, take_turns
from benchmarks.meters import measured
from benchmarks.packers import Lengths, Packer, plan_documents
from verl_ext import options
from verl_ext.options import option
from verl_ext.packing import CostModel, balanced_order, cost_over_ideal, epoch_order, plan_packs

SLOW = 3.0  # seconds: a slower packer runs once
FIRST_CALL = 1000  # documents of a call that pays for imports and compilation
COST = CostModel(linear=24_576, quadratic=1)  # of a hidden size of 4,096
ACCUMULATION = 4  # groups of an optimizer step
PAIRS = 60_000  # at least, of consecutive groups: a standard error of the correlation of 1/sqrt(PAIRS)
SHUFFLES = 5  # over which step costs are averaged
QUICK = ["documents=5000", "large=20000", "repeats=2", "balance_documents=20000"]


@dataclass(frozen=True)
class Options(options.Options):
    """Sizes of the three tables."""

    documents: int = option(1_000_000, "documents of the comparison", least=1)
    large: int = option(10_000_000, "documents for ours alone", least=1)
    balance_documents: int = option(100_000, "documents whose packs ranks share", least=1)
    repeats: int = option(5, "turns, of which the best counts", least=1)


@table(
    "lengths {lengths} | packer {packer} | documents {documents:,} | packs {packs:,} | fill {fill:.2%} | "
    "seconds {seconds:.3f} | to ours {× seconds:.1f} × | first call, s {first_call:.3f}"
)
def compared(options: Options, folder: Path) -> Iterable[Row]:
    """Packers on the same documents."""
    found, absent = packers.peers()
    everyone = [packers.ours(), *found]
    sizes = {packer.name: min(packer.most_documents or options.documents, options.documents) for packer in everyone}
    for name, distribution in DISTRIBUTIONS.items():
        for size in sorted(set(sizes.values()), reverse=True):
            lengths = distribution.draw(size, np.random.default_rng(0))
            group = [everyone[0], *(packer for packer in found if sizes[packer.name] == size)]
            contests = {packer.name: Contest(packer, lengths, distribution.max_tokens) for packer in group}
            rows = [{"packer": packer, **contest.plan()} for packer, contest in contests.items()]
            turns = take_turns({packer: contest.seconds for packer, contest in contests.items()}, options.repeats)
            rows = [{**row, "seconds": Turns(turns[row["packer"]]).best} for row in rows]
            yield from ({"lengths": name, "documents": size, **row} for row in relative(rows, "seconds"))
    yield from ({"packer": name, "failed": reason} for name, reason in absent.items())


class Contest:
    """One packer's turns on the same lengths."""

    def __init__(self, packer: Packer, lengths: Lengths, max_tokens: int) -> None:
        self.packer, self.lengths, self.max_tokens = packer, lengths, max_tokens
        self._last = 0.0

    def plan(self) -> Row:
        """Pack few documents, then all, and check every pack."""
        first_call, _ = self._packed(self.lengths[:FIRST_CALL])
        self._last, packed = self._packed(self.lengths)
        packs = self.packer.documents(packed)
        check_packs(self.packer.name, packs, self.lengths, self.max_tokens)
        fill = float(self.lengths.sum() / len(packs) / self.max_tokens)
        return {"first_call": first_call, "packs": len(packs), "fill": fill}

    def seconds(self) -> float:
        """Return the seconds of a call, or those of the last one if the packer is slow."""
        if self._last < SLOW:
            self._last, _ = self._packed(self.lengths)
        return self._last

    def _packed(self, lengths: Lengths) -> tuple[float, Any]:
        prepared = self.packer.prepare(lengths)
        gc.collect()
        gc.freeze()  # keeps objects of the peers' imports out of collections while a packer makes its lists
        started = time.perf_counter()
        packed = self.packer.pack(prepared, self.max_tokens)
        return time.perf_counter() - started, packed


def check_packs(name: str, packs: Sequence[Any], lengths: Lengths, max_tokens: int) -> None:
    """Raise RuntimeError unless every document lies in one pack and no pack is over its budget."""
    documents = np.concatenate([np.asarray(pack, np.int64) for pack in packs])
    if not np.array_equal(np.bincount(documents, minlength=len(lengths)), np.ones(len(lengths), np.int64)):
        raise RuntimeError(f"{name} lost or repeated documents")
    starts = np.cumsum([0] + [len(pack) for pack in packs[:-1]])
    if np.add.reduceat(lengths[documents], starts).max() > max_tokens:
        raise RuntimeError(f"{name} went over the budget")


@table(
    "lengths {lengths} | documents {documents:,} | packs {packs:,} | fill {fill:.3%} | "
    "seconds of one core {seconds:.2f} | peak MiB above the input {peak_mib:.0f}"
)
def large(options: Options, folder: Path) -> Iterable[Row]:
    """Our plan alone, in a process of its own."""
    for name in DISTRIBUTIONS:
        yield {"lengths": name, "documents": options.large, **in_own_process(large_plan, name, options.large)}


def large_plan(name: str, documents: int) -> Row:
    """Return one plan's processor seconds, packs, fill, and peak memory above the input in MiB."""
    distribution = DISTRIBUTIONS[name]
    lengths = distribution.draw(documents, np.random.default_rng(0))
    gc.collect()
    with measured() as figures:
        plan = plan_packs(lengths, distribution.max_tokens)
    check_packs("verl-ext", plan_documents(plan), lengths, distribution.max_tokens)
    return {**figures, "packs": plan.num_packs, "fill": float(lengths.sum() / plan.num_packs / distribution.max_tokens)}


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
    """Return how evenly a number of ranks share steps of full packs."""
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
