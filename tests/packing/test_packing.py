"""plan_packs, its strategies, the order of an epoch and the cutting of over-length documents: pure functions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.errors import refused
from tests.lib.packing_inputs import first_fit_decreasing_count, packing_inputs
from verl_ext.packing import STRATEGIES, PackPlan, cut_spans, epoch_order, plan_packs

STRATEGY_NAMES = sorted(STRATEGIES)


def packs_of(plan):
    return [plan.documents(pack).tolist() for pack in range(plan.num_packs)]


def seed_next_fit(lengths, max_tokens):
    """Pack by the loop of the original TokenAwareBatchPack."""
    packs, pack, pack_tokens = [], [], 0
    for index, length in enumerate(lengths):
        if pack and pack_tokens + length > max_tokens:
            packs.append(pack)
            pack, pack_tokens = [], 0
        if length <= max_tokens:
            pack.append(index)
            pack_tokens += length
    if pack and pack_tokens <= max_tokens:
        packs.append(pack)
    return packs


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@settings(deadline=None)
@given(packing_inputs(), st.integers(0, 3))
def test_every_document_is_in_exactly_one_pack_and_no_pack_is_over_budget(strategy, inputs, seed):
    lengths, max_tokens = inputs
    plan = plan_packs(lengths, max_tokens, strategy, seed)
    assert sorted(plan.document_index.tolist()) == list(range(len(lengths)))
    assert plan.pack_offsets[0] == 0
    assert plan.pack_offsets[-1] == len(lengths)
    assert (np.diff(plan.pack_offsets) > 0).all()
    assert (plan.pack_sums(lengths) <= max_tokens).all()


@settings(deadline=None)
@given(packing_inputs())
def test_next_fit_is_the_original_loop(inputs):
    lengths, max_tokens = inputs
    assert packs_of(plan_packs(lengths, max_tokens, "next_fit")) == seed_next_fit(lengths, max_tokens)


def test_best_fit_falls_back_to_first_fit_where_plain_best_fit_needs_a_pack_more():
    lengths = [5, 5, 5, 6, 6, 8, 12, 14, 16, 18, 19, 19, 22, 28, 29, 34, 36, 41]
    assert first_fit_decreasing_count(lengths, 41) == 8
    assert plan_packs(lengths, 41).num_packs == 8


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@settings(deadline=None)
@given(packing_inputs(), st.integers(0, 1000))
def test_the_same_arguments_give_the_same_plan(strategy, inputs, seed):
    first, second = (plan_packs(*inputs, strategy, seed) for _ in range(2))
    assert np.array_equal(first.document_index, second.document_index)
    assert np.array_equal(first.pack_offsets, second.pack_offsets)


def test_best_fit_puts_the_longest_first_and_fills_the_fullest_pack():
    assert packs_of(plan_packs([2, 7, 5, 3, 4], 10)) == [[1, 3], [2, 4], [0]]


def test_the_seed_shuffles_documents_of_equal_length_only():
    lengths = [3] * 40 + [7] * 40
    plans = [plan_packs(lengths, 10, seed=seed) for seed in (0, 1)]
    assert plans[0].num_packs == plans[1].num_packs == 40
    assert not np.array_equal(plans[0].document_index, plans[1].document_index)
    for plan in plans:
        assert (np.asarray(lengths)[plan.document_index].reshape(40, 2) == [7, 3]).all()


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize(
    ("lengths", "max_tokens", "packs"),
    [([1], 1, 1), ([10], 10, 1), ([10, 10, 10], 10, 3), ([7] * 6, 10, 6), ([1000], 1000, 1)],
)
def test_documents_that_fill_or_spoil_a_pack_stand_alone(strategy, lengths, max_tokens, packs):
    assert plan_packs(lengths, max_tokens, strategy).num_packs == packs


@pytest.mark.parametrize("strategy", ["best_fit", "next_fit", "sorted_batch"])
def test_one_token_documents_fill_packs_of_a_budget_that_is_no_power_of_two(strategy):
    plan = plan_packs([1] * 1000, 37, strategy)
    assert plan.pack_sums([1] * 1000).tolist() == [37] * 27 + [1]


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_no_document_gives_no_pack(strategy):
    plan = plan_packs([], 10, strategy)
    assert plan.document_index.tolist() == []
    assert plan.pack_offsets.tolist() == [0]


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_the_index_of_documents_takes_four_bytes_each_and_the_lengths_stay_as_they_were(strategy):
    lengths = np.asarray([5, 3, 5, 8])
    plan = plan_packs(lengths, 8, strategy)
    assert (plan.document_index.dtype, plan.pack_offsets.dtype) == (np.int32, np.int64)
    assert lengths.tolist() == [5, 3, 5, 8]


@settings(deadline=None)
@given(packing_inputs(), st.integers(0, 3))
def test_sorted_batch_packs_neighbours_of_the_sorted_order(inputs, seed):
    lengths, max_tokens = np.asarray(inputs[0], np.int64), inputs[1]
    plan = plan_packs(lengths, max_tokens, "sorted_batch", seed)
    ascending = lengths[plan.document_index]
    assert (np.diff(ascending) >= 0).all()
    assert plan.pack_offsets.tolist() == plan_packs(ascending, max_tokens, "next_fit").pack_offsets.tolist()


@pytest.mark.parametrize("strategy", ["best_fit", "sorted_batch"])
def test_the_seed_decides_between_documents_of_equal_length(strategy):
    plans = [plan_packs([4] * 30, 10, strategy, seed) for seed in (0, 1)]
    assert not np.array_equal(plans[0].document_index, plans[1].document_index)
    assert not np.array_equal(plans[0].document_index, np.arange(30))


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_a_huge_budget_costs_nothing(strategy):
    lengths = [2**31, 2**30, 2**30, 1, 2**31 - 1]
    plan = plan_packs(lengths, 2**31, strategy)
    assert (plan.pack_sums(lengths) <= 2**31).all()
    assert plan.num_packs == {"none": 5, "next_fit": 3, "best_fit": 3, "sorted_batch": 4}[strategy]


def test_a_plan_of_a_selection_is_named_in_the_numbers_of_the_whole():
    plan = plan_packs([6, 4, 5], 10, "next_fit")
    chosen = plan.renumbered(np.asarray([70, 7, 70]))
    assert packs_of(chosen) == [[70, 7], [70]]
    assert chosen.num_packs == plan.num_packs == 2


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(1, 5))
def test_pack_sums_count_a_document_as_often_as_a_plan_names_it(documents, packs):
    offsets = np.linspace(0, len(documents), packs + 1).astype(np.int64)
    plan = PackPlan(np.asarray(documents, np.int32), offsets)
    values = [3, 1, 4, 1, 5]
    assert plan.pack_sums(values).tolist() == [sum(values[i] for i in pack) for pack in packs_of(plan)]


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint64])
def test_any_integer_array_is_accepted(dtype):
    assert packs_of(plan_packs(np.asarray([5, 3], dtype), 8)) == [[0, 1]]
    assert packs_of(plan_packs(torch.tensor([5, 3]), 8)) == [[0, 1]]


@pytest.mark.parametrize(
    ("arguments", "things"),
    [
        (([5, 11, 12], 10), ("lengths", "data.max_tokens=10", "12 at document 2")),
        (([5, 0], 10), ("lengths", 1, "0 at document 1")),
        (([5, -3], 10), ("lengths", 1, "-3 at document 1")),
        (([5.0, 3.0], 10), ("lengths", "float64")),
        (([True], 10), ("lengths", "bool")),
        (([[5]], 10), ("lengths", "shape (1, 1)")),
        (([5], 0), ("data.max_tokens", 1, 0)),
        (([5], 10, "bestfit"), ("data.strategy", "next_fit, none, sorted_batch", "bestfit", "nearest: best_fit")),
    ],
)
def test_a_wrong_argument_is_answered_with_one_line(arguments, things):
    with refused(*things):
        plan_packs(*arguments)


def test_an_epoch_visits_every_pack_once_in_an_order_of_its_own():
    orders = [epoch_order(50, seed, epoch) for seed, epoch in [(1, 0), (1, 1), (2, 0)]]
    for order in orders:
        assert sorted(order.tolist()) == list(range(50))
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert np.array_equal(epoch_order(50, 1, 1), orders[1])


LENGTHS = np.asarray([3, 9, 0, 4, 5])


@pytest.mark.parametrize(
    ("policy", "spans"),
    [
        ("drop", [(0, 0, 3), (3, 0, 4)]),
        ("truncate", [(0, 0, 3), (1, 0, 4), (3, 0, 4), (4, 0, 4)]),
        ("split", [(0, 0, 3), (1, 0, 4), (1, 4, 4), (1, 8, 1), (3, 0, 4), (4, 0, 4), (4, 4, 1)]),
    ],
)
def test_over_length_documents_follow_the_policy_and_empty_ones_are_left_out(policy, spans):
    cut = cut_spans(LENGTHS, 4, policy)
    assert list(zip(cut.row.tolist(), cut.start.tolist(), cut.length.tolist(), strict=True)) == spans
    assert (cut.row.dtype, cut.start.dtype, cut.length.dtype) == (np.int64, np.int64, np.int32)


def test_over_length_error_gives_count_longest_and_options():
    with refused("data.max_tokens", 4, "2 of 5", "9 tokens", "data.over_length=drop|truncate|split"):
        cut_spans(LENGTHS, 4, "error")
    assert len(cut_spans(LENGTHS, 9, "error")) == 4


def test_dropping_every_document_is_an_error():
    with refused("data.max_tokens", 2, "3 tokens", "data.over_length=drop", "none"):
        cut_spans(LENGTHS, 2, "drop")


def test_documents_that_are_all_empty_are_an_error():
    with refused("data.val_dir", "2 documents"):
        cut_spans(np.zeros(2, np.int64), 4, "error", key="data.val_dir")


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(any), st.integers(1, 20))
def test_split_keeps_every_token_once_and_in_order(lengths, max_tokens):
    spans = cut_spans(np.asarray(lengths), max_tokens, "split")
    tokens = [
        (row, start + at)
        for row, start, length in zip(spans.row, spans.start, spans.length, strict=True)
        for at in range(length)
    ]
    assert tokens == [(row, at) for row, length in enumerate(lengths) for at in range(length)]
    assert spans.length.max() <= max_tokens
    assert spans.length.min() >= 1
