"""The fits by length equal plain loops over documents; also their order of documents, and the lower bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.packing_inputs import first_fit_decreasing_count, packing_inputs
from verl_ext.packing import plan_packs
from verl_ext.packing.best_fit import best_fit, fewest_packs, place_documents, plan_from_placements, sort_by_length


@st.composite
def repeated_lengths(draw):
    """Draw few distinct lengths, with many documents of each."""
    max_tokens = draw(st.integers(2, 60))
    distinct = draw(st.lists(st.integers(1, max_tokens), min_size=1, max_size=6))
    lengths = [length for length in distinct for _ in range(draw(st.integers(1, 40)))]
    return lengths, max_tokens


inputs_of_every_kind = st.one_of(packing_inputs(min_size=1), repeated_lengths())


def best_fit_loop(lengths, max_tokens):
    """Return the lengths in each pack: the longest document goes first, into the earliest pack with the least room."""
    packs = []
    for length in sorted(lengths, reverse=True):
        rooms = [(max_tokens - sum(pack), number) for number, pack in enumerate(packs)]
        fitting = [room for room in rooms if room[0] >= length]
        if fitting:
            packs[min(fitting)[1]].append(length)
        else:
            packs.append([length])
    return packs


def first_fit_loop(lengths, max_tokens):
    """Return the lengths in each pack: the longest document goes first, into the earliest pack that holds it."""
    packs = []
    for length in sorted(lengths, reverse=True):
        for pack in packs:
            if sum(pack) + length <= max_tokens:
                pack.append(length)
                break
        else:
            packs.append([length])
    return packs


def fewest_packs_by_search(lengths, max_tokens):
    """Find the optimum by trying every pack for every document."""
    lengths = sorted(lengths, reverse=True)
    best = len(lengths)

    def place(at, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if at == len(lengths):
            best = len(rooms)
            return
        for room in set(rooms):
            if room >= lengths[at]:
                others = list(rooms)
                others.remove(room)
                place(at + 1, [*others, room - lengths[at]])
        place(at + 1, [*rooms, max_tokens - lengths[at]])

    place(0, [])
    return best


def packs_by_length(lengths, max_tokens, first_fit):
    lengths = np.asarray(lengths)
    documents, histogram = sort_by_length(lengths, seed=1)
    placements = place_documents(histogram, max_tokens, first_fit=first_fit)
    plan = plan_from_placements(documents, placements)
    assert sorted(plan.document_index.tolist()) == list(range(len(lengths)))
    return [lengths[plan.documents(pack)].tolist() for pack in range(plan.num_packs)]


@pytest.mark.parametrize(("first_fit", "loop"), [(False, best_fit_loop), (True, first_fit_loop)])
@settings(max_examples=200, deadline=None)
@given(inputs_of_every_kind)
def test_a_fit_by_length_makes_the_packs_of_the_loop_over_documents(first_fit, loop, inputs):
    assert packs_by_length(*inputs, first_fit) == loop(*inputs)


@pytest.mark.parametrize("first_fit", [False, True])
def test_a_fit_stops_when_it_needs_more_packs_than_it_may(first_fit):
    histogram = sort_by_length(np.asarray([4, 4, 4, 7]), seed=0)[1]
    assert place_documents(histogram, 10, first_fit=first_fit, most_packs=2) is None
    placements = place_documents(histogram, 10, first_fit=first_fit, most_packs=3)
    assert placements is not None
    assert placements.num_packs == 3


@settings(max_examples=200, deadline=None)
@given(inputs_of_every_kind, st.integers(0, 3))
def test_best_fit_is_never_above_either_loop_nor_below_the_lower_bound(inputs, seed):
    lengths, max_tokens = inputs
    packs = plan_packs(lengths, max_tokens, seed=seed).num_packs
    assert packs <= min(len(best_fit_loop(*inputs)), first_fit_decreasing_count(*inputs))
    histogram = sort_by_length(np.asarray(lengths), seed)[1]
    assert -(-sum(lengths) // max_tokens) <= fewest_packs(histogram, max_tokens) <= packs


@settings(max_examples=200, deadline=None)
@given(packing_inputs(min_size=1))
def test_the_lower_bound_is_never_above_the_optimum(inputs):
    lengths, max_tokens = inputs[0][:7], inputs[1]
    histogram = sort_by_length(np.asarray(lengths), seed=0)[1]
    assert fewest_packs(histogram, max_tokens) <= fewest_packs_by_search(lengths, max_tokens)


@pytest.mark.parametrize(
    ("lengths", "packs"),
    [([6, 6, 6], 3), ([7, 7, 4, 4], 3), ([5, 5, 5], 2), ([10], 1), ([3, 3, 3, 3], 2), ([8, 8, 3, 3, 3, 1], 3)],
)
def test_the_lower_bound_sees_documents_that_cannot_share_a_pack(lengths, packs):
    histogram = sort_by_length(np.asarray(lengths), seed=0)[1]
    assert fewest_packs(histogram, 10) == packs


@settings(max_examples=100, deadline=None)
@given(inputs_of_every_kind)
def test_with_many_distinct_lengths_first_fit_alone_is_made(inputs):
    plan = best_fit(np.asarray(inputs[0]), inputs[1], seed=0, lengths_tried_twice=0)
    assert plan.num_packs == first_fit_decreasing_count(*inputs)


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(1, 20), st.integers(1, 2**50)), min_size=1, max_size=40), st.integers(0, 9))
def test_documents_are_sorted_from_longest_to_shortest_and_counted_by_length(lengths, seed):
    lengths = np.asarray(lengths)
    documents, histogram = sort_by_length(lengths, seed)
    assert sorted(documents.tolist()) == list(range(len(lengths)))
    assert lengths[documents].tolist() == sorted(lengths.tolist(), reverse=True)
    assert np.repeat(histogram.lengths, histogram.counts).tolist() == lengths[documents].tolist()
    assert (np.diff(histogram.lengths) < 0).all()


def test_documents_of_equal_length_are_shuffled_without_preference():
    first = [sort_by_length(np.full(4, 7), seed)[0][0] for seed in range(400)]
    assert (np.abs(np.bincount(first, minlength=4) - 100) < 40).all()


def test_the_order_of_a_seed_is_the_same_everywhere():
    """A run that resumes on another machine must find the same packs."""
    assert sort_by_length(np.asarray([3, 9, 3, 3, 9, 3]), seed=5)[0].tolist() == [4, 1, 3, 5, 2, 0]
