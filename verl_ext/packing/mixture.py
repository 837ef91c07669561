"""Mixtures: budgets of tokens for sources and, alike, their length intervals.

    a source of 102 tokens     (8, 16]    (16, 32]    51 tokens from each interval
    documents                  9  9 12  |  20 30      pools of 30 and 50 tokens
    drawn                      9  9 12  |  20 30      whole epochs: every document floor(budget / pool) times,
                               9    12  |             then whole documents in random order, up to the rest

Tokens are balanced, not documents (GLM-Long): an interval of long documents holds few of them and gives as many tokens.
In the picture, the second interval is 2 % short: no document comes nearer, and the draw names the one of 20 tokens. A
draw is off by at most half of one document.
Sources are drawn one by one, so several of them may draw the same document. The draw depends on the lengths, the
budgets and the seed alone.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from verl_ext.options import must
from verl_ext.packing.plan import Bools, Indices, Ints

KEY = "data.mixture"
TOLERANCE = 0.01  # of an interval's budget
MOST_DOCUMENTS = 2**31 - 1  # drawn from one interval, in whole epochs

Interval = tuple[int | None, int | None]  # low < length <= high, (None, None) for all lengths


@dataclass(frozen=True)
class MixtureSource:
    """A source with a budget in tokens or a weight.

    edges: ascending, interval i is edges[i] < length <= edges[i+1]; None: one interval of all lengths.
    """

    name: str
    tokens: float | None = None
    weight: float | None = None
    edges: tuple[int, ...] | None = None

    @property
    def key(self) -> str:
        """The config key of the source."""
        return f"{KEY}.sources.{self.name}"

    @property
    def intervals(self) -> list[Interval]:
        """(low, high) of each interval; (None, None) for all lengths."""
        return [(None, None)] if self.edges is None else list(pairwise(self.edges))


@dataclass(frozen=True)
class IntervalDraw:
    """An interval's draw: documents int64[D], whole epochs first, in data order.

    - distinct: the number of different documents among them
    - budget, drawn, pool: the tokens of the budget, of the draw, and of all documents of the interval
    - nearest_swap: if the draw is off by more than TOLERANCE, the document that brings it nearest if it is drawn once
      more or once less, and the tokens of the draw then
    """

    source: str
    low: int | None
    high: int | None
    documents: Ints
    distinct: int
    budget: int
    drawn: int
    pool: int
    nearest_swap: tuple[int, int] | None


def draw_mixture(
    lengths: Indices,
    sources: Sequence[MixtureSource],
    members: Sequence[Ints],
    seed: int,
    scale: float = 1.0,
    total_tokens: float | None = None,
) -> list[IntervalDraw]:
    """Draw the documents of every source and interval, in `sources`' order.

    lengths integer[S] of all documents, at least 1; members: int64[≤ S] for each source, the documents it draws from,
    ascending; scale: a factor on every budget; total_tokens: weighted sources share these minus the budgets in tokens;
    None: they share the tokens that they hold. Raises ValueError for an interval without a document, a budget too small
    or large, and nothing to share.
    """
    pools = [_pools(lengths, source, documents) for source, documents in zip(sources, members, strict=True)]
    budgets = _budgets(lengths, sources, pools, total_tokens)
    draws: list[IntervalDraw] = []
    for source, pool, unscaled in zip(sources, pools, budgets, strict=True):
        budget = round(unscaled * scale)
        number = zlib.crc32(source.name.encode())  # its draw does not change when another source comes or goes
        # Edges in whole tokens, so that the intervals' shares add up to the budget exactly.
        edges = [budget * i // len(pool) for i in range(len(pool) + 1)]
        intervals = [
            _draw_interval(lengths, documents, source, source.intervals[i], edges[i + 1] - edges[i], [seed, number, i])
            for i, documents in enumerate(pool)
        ]
        # An interval may stay empty, a source may not: the run would lack what its user asked for.
        if not any(interval.drawn for interval in intervals):
            shortest = min(int(lengths[documents].min()) for documents in pool)
            got = f"{budget} tokens over {len(pool)} intervals, and its shortest document has {shortest}"
            raise ValueError(must(source.key, "have tokens for at least one document", got))
        draws += intervals
    return draws


def _pools(lengths: Indices, source: MixtureSource, members: Ints) -> list[Ints]:
    """Return the documents of each interval of a source, ascending."""
    if len(members) == 0:
        raise ValueError(must(source.key, "have at least one document to draw from", "none"))
    of_members = lengths[members]
    pools = []
    for low, high in source.intervals:
        pools.append(members if low is None or high is None else members[(of_members > low) & (of_members <= high)])
        if len(pools[-1]) == 0:
            sizes = f"(its documents have {of_members.min()} to {of_members.max()})"
            got = f"none of more than {low} and at most {high} tokens {sizes}"
            raise ValueError(must(f"{source.key}.intervals", "each hold a document", got))
    return pools


def _budgets(
    lengths: Indices, sources: Sequence[MixtureSource], pools: Sequence[Sequence[Ints]], total_tokens: float | None
) -> list[float]:
    """Return the tokens of each source, before scaling."""
    weights = sum(source.weight or 0 for source in sources)
    in_tokens = sum(source.tokens or 0 for source in sources)
    shared = 0.0
    if weights and total_tokens is not None:
        shared = total_tokens - in_tokens
        if shared <= 0:
            got = f"{total_tokens:g}, and the budgets in tokens sum to {in_tokens:g}"
            raise ValueError(must(f"{KEY}.total_tokens", "leave tokens to the sources with a weight", got))
    elif weights:
        is_shared = np.zeros(len(lengths), bool)
        for source, intervals in zip(sources, pools, strict=True):
            for pool in intervals if source.weight else ():
                is_shared[pool] = True
        shared = float(lengths[is_shared].sum(dtype=np.int64))
    return [source.tokens if source.tokens else shared * (source.weight or 0) / weights for source in sources]


def _draw_interval(
    all_lengths: Indices, pool: Ints, source: MixtureSource, interval: Interval, budget: int, seed: list[int]
) -> IntervalDraw:
    lengths = all_lengths[pool].astype(np.int64)
    tokens = int(lengths.sum())
    epochs, rest = divmod(budget, tokens)
    # Whole epochs come first, so that no document repeats while another has not been drawn.
    if epochs * len(pool) > MOST_DOCUMENTS:
        of = f"an interval of {len(pool):,} documents with {tokens:,} tokens"
        got = f"a budget of {budget:,} tokens for {of}"
        raise ValueError(must(source.key, "draw fewer than 2^31 documents from an interval", got))
    chosen = _random_subset(lengths, rest, np.random.default_rng(seed))
    drawn = epochs * tokens + int(lengths[chosen].sum())
    # Whole documents may miss the budget; the user then learns of the one that would come nearest.
    nearest_swap = None
    if abs(drawn - budget) > TOLERANCE * budget:
        nearest = _nearest_document(lengths, chosen, budget - drawn)
        step = int(lengths[nearest])
        nearest_swap = int(pool[nearest]), drawn + step if drawn < budget else drawn - step
    return IntervalDraw(
        source.name,
        *interval,
        documents=np.concatenate([np.tile(pool, epochs), pool[chosen]]),
        distinct=len(pool) if epochs else int(chosen.sum()),
        budget=budget,
        drawn=drawn,
        pool=tokens,
        nearest_swap=nearest_swap,
    )


def _random_subset(lengths: Ints, budget: int, rng: np.random.Generator) -> Bools:
    """Return bool[n], documents in random order with a sum near the budget.

    lengths: int64[n] ≥ 1. Each document is taken if the rest of the budget has room, then one more if that is nearer.
    """
    chosen = np.zeros(len(lengths), bool)
    order, room = rng.permutation(len(lengths)), budget
    in_order = lengths[order]
    while len(order):
        running = np.cumsum(in_order)
        fits = int(np.searchsorted(running, room, side="right"))
        chosen[order[:fits]] = True
        room -= int(running[fits - 1]) if fits else 0
        still = fits + np.flatnonzero(in_order[fits:] <= room)
        order, in_order = order[still], in_order[still]
    if room and not chosen.all():
        one_more = _nearest_document(lengths, chosen, room)
        chosen[one_more] = lengths[one_more] < 2 * room
    return chosen


def _nearest_document(lengths: Ints, chosen: Bools, gap: int) -> int:
    """Return the document whose addition or removal comes nearest to the gap."""
    others = np.flatnonzero(chosen == (gap < 0))
    return int(others[np.abs(lengths[others] - abs(gap)).argmin()])
