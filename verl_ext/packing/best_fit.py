"""Best fit decreasing: the longest first, where it fills a pack best.

Documents of equal length are placed together, into groups of packs that look alike (histogram packing):

    5 documents of 30           open packs, in order of use      after it
                                2 with room 70                   2 with room 10, of 2 = floor(70 / 30) documents each
                                4 with room 40                   1 with room 10, of 1
                                                                 3 with room 40

A pack is used until the next document of that length does not fit it, so the work grows with pairs of a length and a
group (fewer than 100,000 for a million documents of chat and long lengths), not with documents or the budget. Lengths
only decrease, so a pack either has room for the present length (it is *open*) or waits for the first length that fits
its room, without a search tree. A million documents take about 0.1 s.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from verl_ext.packing.plan import Indices, Ints, PackPlan, index_type, offsets_of

FEWEST_RANDOM_BITS = 16
LENGTHS_TRIED_TWICE = 2**15  # most distinct lengths for two fits; more if each has DOCUMENTS_PER_LENGTH documents
DOCUMENTS_PER_LENGTH = 20

Group = tuple[int, int, int, int]  # first pack, room of each, packs (numbered on from the first), documents in each


class Histogram(NamedTuple):
    """Strictly decreasing lengths int64[R], and counts int64[R] of their documents."""

    lengths: Ints
    counts: Ints


class Placements(NamedTuple):
    """The packs of the documents, in the order of placement.

    The first `alone` documents open a pack each. A row of `batches` int32 or int64[N, 4] puts the next documents into
    packs `first .. first + packs`, `each` to a pack, which already holds `before`.
    """

    num_packs: int
    alone: int
    batches: Indices


def best_fit(lengths: Ints, max_tokens: int, seed: int, lengths_tried_twice: int | None = None) -> PackPlan:
    """Return packs in order of opening, documents in order of placement.

    lengths int64[D], each 1..max_tokens. The longest document comes first; among equal lengths the seed decides. There
    are never more packs than with first fit decreasing: if best fit does not reach the lower bound, first fit is tried
    too. With more than `lengths_tried_twice` distinct lengths, first fit alone is tried, because a second try would add
    half to the time.
    """
    if len(lengths) == 0:
        return PackPlan(np.zeros(0, np.int32), np.zeros(1, np.int64))
    documents, histogram = sort_by_length(lengths, seed)
    if lengths_tried_twice is None:
        lengths_tried_twice = max(LENGTHS_TRIED_TWICE, len(lengths) // DOCUMENTS_PER_LENGTH)
    first_fit_alone = len(histogram.lengths) > lengths_tried_twice
    placements = place_documents(histogram, max_tokens, first_fit=first_fit_alone)
    assert placements is not None, "every document fits a pack of its own"
    if not first_fit_alone and placements.num_packs > fewest_packs(histogram, max_tokens):
        placements = (
            place_documents(histogram, max_tokens, first_fit=True, most_packs=placements.num_packs - 1) or placements
        )
    return plan_from_placements(documents, placements)


def sort_by_length(lengths: Ints, seed: int) -> tuple[Indices, Histogram]:
    """Return documents int[D], longest first, and their histogram.

    lengths are int64[D], D at least 1; documents are int32 or int64[D]. Among documents of equal length the seed
    decides. This is one sort of a 64-bit key per document, which vectorised sorts do in about a tenth of an argsort's
    time:

        highest bits                                  lowest bits
        longest - length  |  random bits of the seed  |  number of the document
    """
    documents = len(lengths)
    longest, shortest = int(lengths.max()), int(lengths.min())
    number_bits, length_bits = (documents - 1).bit_length(), max((longest - shortest).bit_length(), 1)
    if number_bits + length_bits + FEWEST_RANDOM_BITS > 64:  # ranks of lengths need fewer bits than lengths
        distinct, ranks = np.unique(lengths, return_inverse=True)
        order, histogram = _sort_keys(ranks, len(distinct) - 1, number_bits, number_bits, seed)
        return order, Histogram(distinct[histogram.lengths], histogram.counts)
    return _sort_keys(lengths, longest, length_bits, number_bits, seed)


def _sort_keys(lengths: Ints, longest: int, length_bits: int, number_bits: int, seed: int) -> tuple[Indices, Histogram]:
    keys = np.random.default_rng(seed).bit_generator.random_raw(len(lengths))
    keys >>= np.uint64(length_bits + number_bits)
    part = np.subtract(longest, lengths, dtype=np.int64).view(np.uint64)
    part <<= np.uint64(64 - length_bits - number_bits)
    keys |= part
    keys <<= np.uint64(number_bits)
    keys |= np.arange(len(lengths), dtype=np.uint64)
    keys.sort()
    np.bitwise_and(keys, np.uint64((1 << number_bits) - 1), out=part)
    documents = part.astype(index_type(len(lengths)))
    keys >>= np.uint64(64 - length_bits)
    starts = np.concatenate([[0], np.flatnonzero(keys[1:] != keys[:-1]) + 1])
    return documents, Histogram(longest - keys[starts].astype(np.int64), np.diff(starts, append=len(lengths)))


def fewest_packs(histogram: Histogram, max_tokens: int) -> int:
    """Return Martello and Toth's lower bound L2, in linear time.

    Documents over max_tokens / 2 need a pack each. Beside one of more than max_tokens - t no document of t or more
    finds room, so documents of t .. max_tokens / 2 share the room that the other large ones leave, and new packs
    (Knapsack Problems, 1990, chapter 8):

        L2 = large + max over t of ceil((tokens of t .. max_tokens/2 - room beside large ones up to max_tokens - t) / max_tokens)
    """  # noqa: E501  the formula is one line
    lengths, counts = histogram
    large = int(np.searchsorted(-lengths, -(max_tokens // 2), side="left"))
    packs_before, room_before = offsets_of(counts[:large]), offsets_of((counts * (max_tokens - lengths))[:large])
    thresholds = lengths[large:]
    if len(thresholds) == 0:
        return int(packs_before[-1])
    tokens = np.cumsum(counts[large:] * thresholds)
    too_large = np.searchsorted(-lengths[:large], -(max_tokens - thresholds), side="left")
    beyond = tokens - (room_before[-1] - room_before[too_large])
    return int(packs_before[-1] + max(-(-beyond.max() // max_tokens), 0))


def place_documents(
    histogram: Histogram, max_tokens: int, *, first_fit: bool = False, most_packs: int | None = None
) -> Placements | None:
    """Place documents into the fullest (`first_fit`: earliest) open pack that fits.

    Packs are numbered in the order in which they are opened. Returns None if more than `most_packs` are needed.
    """
    documents = int(histogram.counts.sum())
    most_packs = documents if most_packs is None else most_packs
    large = int(np.searchsorted(-histogram.lengths, -(max_tokens // 2), side="left"))
    counts, rooms = histogram.counts[:large], max_tokens - histogram.lengths[:large]
    alone = int(counts.sum())  # two documents over half the budget never share a pack
    groups: list[Group] = list(
        zip((np.cumsum(counts) - counts).tolist(), rooms.tolist(), counts.tolist(), repeat(1), strict=False)
    )
    small = Histogram(histogram.lengths[large:], histogram.counts[large:])
    reached = np.searchsorted(rooms, small.lengths, side="left").tolist()  # rooms ascend
    waiting = [groups[start:end] for start, end in zip(reached, [large, *reached], strict=False)]
    with _garbage_collection_paused():
        num_packs, rows = _fit_small(small, max_tokens, first_fit, alone, waiting, most_packs)
    if num_packs > most_packs:
        return None
    return Placements(num_packs, alone, np.array(rows, index_type(documents)).reshape(-1, 4))


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pause garbage collection, whose search through many tuples takes time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fit_small(
    histogram: Histogram,
    max_tokens: int,
    first_fit: bool,
    num_packs: int,
    waiting: list[list[Group]],  # by the first length that fits their room
    most_packs: int,
) -> tuple[int, list[int]]:
    """Return (packs, rows of Placements.batches joined); stop at more packs than `most_packs`."""
    groups: list[Group] = []  # the open packs: a heap by number, or a stack, as groups come in with less and less room
    push: Callable[[Group], None] = partial(heappush, groups) if first_fit else groups.append
    pop: Callable[[], Group] = partial(heappop, groups) if first_fit else groups.pop
    first_that_fits, shortest = _first_that_fits(histogram), int(histogram.lengths[-1]) if waiting else 0
    batches: list[int] = []
    record = batches.extend
    # Lengths only decrease, so a pack with too little room waits for the first length that fits it.
    for length, left, arrived in zip(histogram.lengths.tolist(), histogram.counts.tolist(), waiting, strict=True):
        if first_fit:
            for group in arrived:
                push(group)
        elif arrived:
            arrived.sort(key=itemgetter(1, 0), reverse=True)
            groups.extend(arrived)
        while left:
            # Take the fullest (or earliest) open packs that look alike; if none is open, open as many as are needed.
            if groups:
                first, room, packs, before = pop()
            else:
                first, room, packs, before = num_packs, max_tokens, -(-left // (max_tokens // length)), 0
                num_packs += packs
                if num_packs > most_packs:
                    return num_packs, batches
            each = room // length
            take = left // each
            if not take:  # the last documents of this length do not fill one pack
                take, each = 1, left
            # Fill as many of these packs as documents are left for; the others stay open as they are.
            if take < packs:
                push((first + take, room, packs - take, before))
                packs = take
            left -= packs * each
            record((first, packs, each, before))
            # The filled packs stay open for this length, wait for a shorter one, or are closed.
            room -= each * length
            if room >= length:
                push((first, room, packs, before + each))
            elif room >= shortest:
                waiting[first_that_fits(room)].append((first, room, packs, before + each))
    return num_packs, batches


def _first_that_fits(histogram: Histogram) -> Callable[[int], int]:
    """Return a function from rooms to indices of first fitting lengths."""
    if len(histogram.lengths) and histogram.lengths[0] <= histogram.counts.sum():
        rooms = np.arange(histogram.lengths[0] + 1)
        return np.searchsorted(-histogram.lengths, -rooms, side="left").tolist().__getitem__
    descending = (-histogram.lengths).tolist()
    return lambda room: bisect_left(descending, -room)


def plan_from_placements(documents: Indices, placements: Placements) -> PackPlan:
    """Return packs in order of opening, documents[D] in placement order."""
    num_packs, alone, batches = placements
    first, packs, each, _ = batches.T
    changes = np.bincount(first, each, num_packs + 1) - np.bincount(first + packs, each, num_packs + 1)
    sizes = np.cumsum(changes[:-1]).astype(np.int64)
    sizes[:alone] += 1
    offsets = offsets_of(sizes)
    index = np.empty_like(documents)
    index[offsets[:alone]] = documents[:alone]
    index[_positions(batches, offsets)] = documents[alone:]
    return PackPlan(index, offsets)


def _positions(batches: Indices, offsets: Ints) -> Indices:
    """Return the position in document_index of each document of the batches."""
    first, packs, each, before = batches.T
    pack = np.repeat(first - (np.cumsum(packs, dtype=first.dtype) - packs), packs)
    pack += np.arange(len(pack), dtype=pack.dtype)
    start = offsets.astype(first.dtype)[pack]
    start += np.repeat(before, packs)
    if (each == 1).all():
        return start
    sizes = np.repeat(each, packs)
    start -= np.cumsum(sizes, dtype=sizes.dtype) - sizes
    positions = np.repeat(start, sizes)
    positions += np.arange(len(positions), dtype=positions.dtype)
    return positions
