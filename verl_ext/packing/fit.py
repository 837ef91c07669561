"""Decreasing fits by runs: documents of equal length are placed together, into groups of packs that look alike.

    run: 5 documents of 30      open packs, in order of use      after it
                                2 with room 70                   2 with room 10, of 2 = floor(70 / 30) documents each
                                4 with room 40                   1 with room 10, of 1
                                                                 3 with room 40

Best fit and first fit both stay with a pack until the next document of the run does not fit it, so the work grows with
pairs of a run and a group (below 0.1 of a million documents of chat and long lengths), not with documents or the
budget. Lengths only decrease, so a pack either holds the present length (it is *open*) or waits, without being
looked at, for the first run that fits its room: neither fit needs a search tree.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.packing.decreasing import Runs
from verl_ext.packing.plan import PackPlan, index_type

Group = tuple[int, int, int, int]  # first pack, room of each, packs (numbered on from the first), documents in each


@dataclass(frozen=True)
class OpenPacks:
    """Groups whose packs hold a document of the present length, in the order in which they are to be used.

    push: what remains of the group that was popped last; extend: groups with less room than any open one.
    """

    groups: list[Group]
    push: Callable[[Group], None]
    pop: Callable[[], Group]
    extend: Callable[[list[Group]], None]


def fullest_first() -> OpenPacks:
    """Best fit: a stack, since groups come in with less and less room."""
    groups: list[Group] = []

    def extend(more: list[Group]) -> None:
        if len(more) > 1:
            more.sort(key=itemgetter(1, 0), reverse=True)
        groups.extend(more)

    return OpenPacks(groups, groups.append, groups.pop, extend)


def earliest_first() -> OpenPacks:
    """First fit: a heap over the number of a group's first pack."""
    groups: list[Group] = []

    def extend(more: list[Group]) -> None:
        for group in more:
            heappush(groups, group)

    return OpenPacks(groups, partial(heappush, groups), partial(heappop, groups), extend)


class Placements(NamedTuple):
    """Rows of `batches` int32 or int64[N, 4], in the order of placement: the next documents go to packs
    `first .. first + packs`, `each` to a pack, which already holds `before`. Ahead of them the first `alone`
    documents opened a pack each."""

    num_packs: int
    alone: int
    batches: NDArray[np.integer]


def fit(runs: Runs, max_tokens: int, open_packs: OpenPacks, most_packs: int) -> Placements | None:
    """Where the documents of `runs` go, every one into the first of `open_packs` or else a new pack; None when that
    takes more than `most_packs`. Packs are numbered in the order in which they are opened."""
    large = int(np.searchsorted(-runs.lengths, -(max_tokens // 2), side="left"))
    alone = int(runs.counts[:large].sum())  # two documents over half the budget never share a pack
    rooms = max_tokens - runs.lengths[:large]
    first = np.cumsum(runs.counts[:large]) - runs.counts[:large]
    waiting_large = list(zip(first.tolist(), rooms.tolist(), runs.counts[:large].tolist(), repeat(1), strict=False))
    rest = Runs(runs.lengths[large:], runs.counts[large:])
    reached = np.searchsorted(rooms, rest.lengths, side="left").tolist()
    with _collector_paused():
        num_packs, flat = _fit_runs(rest, max_tokens, open_packs, alone, waiting_large, reached, most_packs)
    if num_packs > most_packs:
        return None
    batches = np.array(flat, index_type(int(runs.counts.sum()))).reshape(-1, 4)
    return Placements(num_packs, alone, batches)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """The fit keeps some 100,000 tuples and makes no cycle: a collector that looks for one takes a tenth of its time,
    and more in a process of many objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fit_runs(
    runs: Runs,
    max_tokens: int,
    open_packs: OpenPacks,
    num_packs: int,
    waiting_large: list[Group],  # room ascending; run i reaches those from reached[i] on
    reached: list[int],
    most_packs: int,
) -> tuple[int, list[int]]:
    """(packs, batches one after the other); the packs are more than `most_packs` when it stopped there."""
    groups, push, pop, extend = open_packs.groups, open_packs.push, open_packs.pop, open_packs.extend
    run_that_fits, shortest = _run_that_fits(runs), int(runs.lengths[-1]) if len(runs.lengths) else 0
    waiting: list[list[Group] | None] = [None] * len(runs.lengths)  # by the first run that fits
    batches: list[int] = []
    record = batches.extend
    unreached = len(waiting_large)
    for run, (length, left, reach) in enumerate(zip(runs.lengths.tolist(), runs.counts.tolist(), reached, strict=True)):
        arrived, waiting[run] = waiting[run] or [], None
        if reach < unreached:
            arrived += waiting_large[reach:unreached]
            unreached = reach
        if arrived:
            extend(arrived)
        while left:
            if groups:
                first, room, packs, before = pop()
            else:
                first, room, packs, before = num_packs, max_tokens, -(-left // (max_tokens // length)), 0
                num_packs += packs
                if num_packs > most_packs:
                    return num_packs, batches
            each = room // length
            take = left // each
            if not take:  # the run's last documents do not fill one pack
                take, each = 1, left
            if take < packs:
                push((first + take, room, packs - take, before))
                packs = take
            left -= packs * each
            record((first, packs, each, before))
            room -= each * length
            if room >= length:
                push((first, room, packs, before + each))
            elif room >= shortest:
                fits = run_that_fits(room)
                others = waiting[fits]
                if others is None:
                    waiting[fits] = [(first, room, packs, before + each)]
                else:
                    others.append((first, room, packs, before + each))
    return num_packs, batches


def _run_that_fits(runs: Runs) -> Callable[[int], int]:
    """room -> the first run whose documents fit it, for rooms below the longest length: from a table where that is no
    larger than the documents are many, else by bisection."""
    if len(runs.lengths) and runs.lengths[0] <= runs.counts.sum():
        rooms = np.arange(runs.lengths[0] + 1)
        return np.searchsorted(-runs.lengths, -rooms, side="left").tolist().__getitem__
    descending = (-runs.lengths).tolist()
    return lambda room: bisect_left(descending, -room)


def plan_from_placements(documents: NDArray[np.integer], placements: Placements) -> PackPlan:
    """Packs in the order in which they were opened, documents[D] in the order in which they were placed."""
    num_packs, alone, batches = placements
    first, packs, each, _ = batches.T
    changes = np.bincount(first, each, num_packs + 1) - np.bincount(first + packs, each, num_packs + 1)
    sizes = np.cumsum(changes[:-1]).astype(np.int64)
    sizes[:alone] += 1
    offsets = np.zeros(num_packs + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    index = np.empty_like(documents)
    index[offsets[:alone]] = documents[:alone]
    index[_places(batches, offsets)] = documents[alone:]
    return PackPlan(index, offsets)


def _places(batches: NDArray[np.integer], offsets: NDArray[np.int64]) -> NDArray[np.integer]:
    """Where in document_index each document goes that the batches place."""
    first, packs, each, before = batches.T
    pack = np.repeat(first - (np.cumsum(packs, dtype=first.dtype) - packs), packs)
    pack += np.arange(len(pack), dtype=pack.dtype)
    start = offsets.astype(first.dtype)[pack]
    start += np.repeat(before, packs)
    if (each == 1).all():
        return start
    sizes = np.repeat(each, packs)
    start -= np.cumsum(sizes, dtype=sizes.dtype) - sizes
    places = np.repeat(start, sizes)
    places += np.arange(len(places), dtype=places.dtype)
    return places
