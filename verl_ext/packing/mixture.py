"""Mixtures: a budget of tokens for every source and, within it, the same number of tokens for every length interval.

    a source of 102 tokens     (8, 16]    (16, 32]    51 tokens from each interval
    documents                  9  9 12  |  20 30      pools of 30 and 50 tokens
    drawn                      9  9 12  |  20 30      whole epochs: every document floor(wanted / pool) times,
                               9    12  |             then a random subset of whole documents nearest to the rest

Tokens are balanced, not documents (GLM-Long): an interval of long documents holds few of them and gives as many tokens.
In the picture the second interval is 2 % short: no document comes nearer to the last token, and the one of 20 is named.
Sources are drawn one by one, so that a document may be drawn by several of them. The draw depends on the lengths, the
budgets and the seed alone.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from verl_ext.packing.best_fit import hindering, nearest_subset

KEY = "data.mixture"
TOLERANCE = 0.01  # of an interval's budget
MOST_DOCUMENTS = 2**31 - 1  # drawn from one interval, in whole epochs


@dataclass(frozen=True)
class MixtureSource:
    """A budget in tokens or a weight, one of them; edges: ascending, interval i is edges[i] < length <= edges[i+1];
    None: one interval of all lengths."""

    name: str
    tokens: float | None = None
    weight: float | None = None
    edges: tuple[int, ...] | None = None

    @property
    def key(self) -> str:
        """The dotted key of this source."""
        return f"{KEY}.sources.{self.name}"

    @property
    def intervals(self) -> list[tuple[int | None, int | None]]:
        """(low, high) of each interval, (None, None) where it is of all lengths."""
        return [(None, None)] if self.edges is None else list(pairwise(self.edges))


@dataclass(frozen=True)
class Hindrance:
    """The document that keeps an interval more than TOLERANCE off, and the tokens given if it were drawn once more
    (tokens are missing) or once less."""

    document: int
    tokens_otherwise: int


@dataclass(frozen=True)
class IntervalDraw:
    """What one interval of a source gives: documents int64[D], whole epochs first, each in the order of the data.

    distinct: different documents among them; wanted, given, pool: tokens of the budget, of the documents drawn, and of
    all documents of the interval; hindrance: None within TOLERANCE.
    """

    source: str
    low: int | None
    high: int | None
    documents: NDArray[np.int64]
    distinct: int
    wanted: int
    given: int
    pool: int
    hindrance: Hindrance | None


def draw_mixture(
    lengths: NDArray[np.integer],
    sources: Sequence[MixtureSource],
    members: Sequence[NDArray[np.int64]],
    seed: int,
    scale: float = 1.0,
    total_tokens: float | None = None,
) -> list[IntervalDraw]:
    """The documents of every source and interval, in the order of `sources`.

    Args:
        lengths: integer[S], tokens of each document, at least 1.
        sources: budgets and intervals.
        members: int64[≤ S] for each source: the documents it draws from, ascending.
        seed: of the subsets; every source and interval has its own.
        scale: a factor on every budget.
        total_tokens: what weighted sources share, the budgets in tokens taken off; None: the tokens that they hold.

    Raises:
        ValueError: an interval without a document, a source whose budget is too small for any or draws more than
            MOST_DOCUMENTS from an interval, nothing left to share.
    """
    pools = [_pools(lengths, source, ours) for source, ours in zip(sources, members, strict=True)]
    budgets = _budgets(lengths, sources, pools, total_tokens)
    draws: list[IntervalDraw] = []
    for source, pool, budget in zip(sources, pools, budgets, strict=True):
        drawn = _draw_source(lengths, source, pool, round(budget * scale), seed)
        if not any(interval.given for interval in drawn):
            shortest = min(int(lengths[documents].min()) for documents in pool)
            raise ValueError(
                f"{source.key} must have tokens for at least one document; got {round(budget * scale)} tokens over "
                f"{len(pool)} intervals, and its shortest document has {shortest}"
            )
        draws += drawn
    return draws


def _pools(lengths: NDArray[np.integer], source: MixtureSource, members: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The documents of each interval of a source, ascending; ValueError when there are none."""
    if len(members) == 0:
        raise ValueError(f"{source.key} must have at least one document to draw from; got none")
    if source.edges is None:
        return [members]
    ours = lengths[members]
    intervals = list(pairwise(source.edges))
    pools = [members[(ours > low) & (ours <= high)] for low, high in intervals]
    for (low, high), pool in zip(intervals, pools, strict=True):
        if len(pool) == 0:
            raise ValueError(
                f"{source.key}.intervals must each hold a document; got none of more than {low} and at most {high} "
                f"tokens (its documents have {ours.min()} to {ours.max()})"
            )
    return pools


def _budgets(
    lengths: NDArray[np.integer],
    sources: Sequence[MixtureSource],
    pools: Sequence[Sequence[NDArray[np.int64]]],
    total_tokens: float | None,
) -> list[float]:
    """Tokens of each source, before scaling."""
    weights = sum(source.weight or 0 for source in sources)
    in_tokens = sum(source.tokens or 0 for source in sources)
    shared = 0.0
    if weights and total_tokens is not None:
        shared = total_tokens - in_tokens
        if shared <= 0:
            raise ValueError(
                f"{KEY}.total_tokens must leave tokens to the sources with a weight; got {total_tokens:g}, and the "
                f"budgets in tokens sum to {in_tokens:g}"
            )
    elif weights:
        held = np.zeros(len(lengths), bool)
        for source, intervals in zip(sources, pools, strict=True):
            for pool in intervals if source.weight else ():
                held[pool] = True
        shared = float(lengths[held].sum(dtype=np.int64))
    return [source.tokens if source.tokens else shared * (source.weight or 0) / weights for source in sources]


def _draw_source(
    lengths: NDArray[np.integer], source: MixtureSource, pools: Sequence[NDArray[np.int64]], budget: int, seed: int
) -> list[IntervalDraw]:
    number = zlib.crc32(source.name.encode())  # its draw does not change when another source comes or goes
    return [
        _draw_interval(
            lengths[pool].astype(np.int64),
            pool,
            source.name,
            interval,
            (budget * (i + 1)) // len(pools) - (budget * i) // len(pools),
            np.random.default_rng([seed, number, i]),
        )
        for i, (interval, pool) in enumerate(zip(source.intervals, pools, strict=True))
    ]


def _draw_interval(
    lengths: NDArray[np.int64],
    pool: NDArray[np.int64],
    source: str,
    interval: tuple[int | None, int | None],
    wanted: int,
    rng: np.random.Generator,
) -> IntervalDraw:
    """lengths int64[n] of the documents pool int64[n]."""
    tokens = int(lengths.sum())
    epochs, rest = divmod(wanted, tokens)
    if epochs * len(pool) > MOST_DOCUMENTS:
        raise ValueError(
            f"{KEY}.sources.{source} must draw fewer than 2^31 documents from an interval; got a budget of {wanted:,} "
            f"tokens for an interval of {len(pool):,} documents with {tokens:,} tokens"
        )
    chosen = nearest_subset(lengths, rest, TOLERANCE * wanted, rng)
    given = epochs * tokens + int(lengths[chosen].sum())
    hindrance = None
    if abs(given - wanted) > TOLERANCE * wanted:
        at = hindering(lengths, chosen, wanted - given)
        step = int(lengths[at])
        hindrance = Hindrance(int(pool[at]), given + step if given < wanted else given - step)
    return IntervalDraw(
        source,
        *interval,
        documents=np.concatenate([np.tile(pool, epochs), pool[chosen]]),
        distinct=len(pool) if epochs else int(chosen.sum()),
        wanted=wanted,
        given=given,
        pool=tokens,
        hindrance=hindrance,
    )
