"""Measure how evenly data-parallel ranks share steps of full packs, and whether balancing orders the costs.

"Step cost over ideal" sums D times the most expensive pack of every group of D packs (one a rank), over the cost of all
packs; an epoch takes that many times as long as with perfectly shared work. *Full steps* leave out the packs that do
not fill a step; *with the tail*, the last step is smaller and some ranks idle in its last group. "Order" is the
correlation of a group's cost with the next one's, averaged over enough shuffles for a standard error below 0.01.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.length_distributions import Distribution
from verl_ext.packing import CostModel, balanced_order, cost_over_ideal, epoch_order, plan_packs

COST = CostModel(linear=24_576, quadratic=1)  # attention costs as much as the rest at 24,576 tokens (hidden size 4,096)
RANKS = (8, 32, 128)
ACCUMULATION = 4  # groups of an optimizer step
PAIRS = 60_000  # at least, of consecutive groups: a standard error of 1/sqrt(PAIRS)
SHUFFLES = 5  # over which step costs are averaged


def step_balance(distribution: Distribution, documents: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return a row for each number of ranks."""
    lengths = distribution.draw(documents, np.random.default_rng(seed))
    costs = COST.packs(plan_packs(lengths, distribution.max_tokens, seed=seed), lengths)
    return [_row(costs, ranks) for ranks in RANKS if len(costs) >= 2 * ranks * ACCUMULATION]


def _row(costs: NDArray[np.float64], ranks: int) -> dict[str, Any]:
    batch = ranks * ACCUMULATION
    steps = len(costs) // batch
    epochs = max(-(-PAIRS // (steps * ACCUMULATION)), SHUFFLES)
    found: dict[str, list[float]] = {name: [] for name in ("random", "sorted", "sorted_with_tail")}
    correlations: dict[str, list[float]] = {"random": [], "sorted": []}
    for epoch in range(epochs):
        orders = {
            "random": epoch_order(len(costs), 0, epoch)[: steps * batch],
            "sorted": balanced_order(costs, batch, ranks, 0, epoch, drop_last=True),
        }
        for name, order in orders.items():
            correlations[name].append(_correlation(costs[order], ranks))
        if epoch < SHUFFLES:
            orders["sorted_with_tail"] = balanced_order(costs, batch, ranks, 0, epoch)
            for name, order in orders.items():
                found[name].append(cost_over_ideal(costs[order], ranks, batch))
    return {
        "ranks": ranks,
        "packs": len(costs),
        "steps": steps,
        "epochs": epochs,
        **{name: float(np.mean(values)) for name, values in found.items()},
        "correlation": {name: float(np.mean(values)) for name, values in correlations.items()},
        "standard_error": float(max(np.std(values, ddof=1) for values in correlations.values()) / np.sqrt(epochs)),
    }


def _correlation(costs: NDArray[np.float64], ranks: int) -> float:
    """Return the correlation of the cost of a group of `ranks` packs with that of the next group."""
    groups = costs.reshape(-1, ranks).sum(axis=1)
    return float(np.corrcoef(groups[:-1], groups[1:])[0, 1])


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as text."""
    line = "{:>6} {:>14} {:>14} {:>15} {:>22} {:>10} {:>6}"
    lines = [
        line.format("", "random order", "cost-sorted", "cost-sorted", "correlation of groups", "", ""),
        line.format("ranks", "full steps", "full steps", "with the tail", "cost-sorted", "random", "±"),
    ]
    for row in rows:
        correlation = row["correlation"]
        lines.append(
            line.format(
                row["ranks"],
                f"{row['random']:.3f}",
                f"{row['sorted']:.5f}",
                f"{row['sorted_with_tail']:.4f}",
                f"{correlation['sorted']:+.4f}",
                f"{correlation['random']:+.4f}",
                f"{row['standard_error']:.4f}",
            )
        )
    return "\n".join(lines)
