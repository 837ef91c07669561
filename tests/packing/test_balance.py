"""Costs of documents and packs, and an epoch's balanced order: near-equal groups, shuffled, with mixed levels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.packing import CostModel, balanced_order, cost_over_ideal, epoch_order, plan_packs

COST = CostModel(linear=24576, quadratic=1)


@st.composite
def orders(draw):
    batch = draw(st.integers(1, 12))
    return {
        "costs": np.asarray(draw(st.lists(st.integers(0, 20), max_size=80)), np.float64),
        "batch_size": batch,
        "group_size": draw(st.integers(1, batch)),
        "seed": draw(st.integers(0, 3)),
        "epoch": draw(st.integers(0, 2)),
    }


def steps_of(order, batch_size):
    return [order[at : at + batch_size] for at in range(0, len(order), batch_size)]


@pytest.mark.parametrize(("length", "window", "cost"), [(4, 4, 16), (5, 4, 24), (7, 1, 13), (3, None, 9)])
def test_a_window_makes_the_cost_linear_beyond_it(length, window, cost):
    assert CostModel(0, 0, 1, window).documents([length]).tolist() == [cost]


@given(
    st.lists(st.integers(1, 10**6), max_size=40),
    st.sampled_from([CostModel(3, 1), CostModel(70 * 10**9, 10**6, 10**5, 4096), CostModel(6 * 10**12, 10**7)]),
)
def test_the_cost_of_a_pack_is_the_exact_sum_over_its_documents_rounded_once(lengths, cost):
    plan = plan_packs(lengths, 10**6)
    reach = [length if cost.window is None else min(length, cost.window) for length in lengths]
    exact = [
        cost.linear * length + cost.quadratic * length**2 + cost.windowed * within * (2 * length - within)
        for length, within in zip(lengths, reach, strict=True)
    ]
    assert cost.documents(lengths).tolist() == [float(value) for value in exact]
    expected = [float(sum(exact[d] for d in plan.documents(p))) for p in range(plan.num_packs)]
    assert cost.packs(plan, lengths).tolist() == expected


@settings(deadline=None)
@given(orders())
def test_an_epoch_has_every_pack_once(inputs):
    assert sorted(balanced_order(**inputs)) == list(range(len(inputs["costs"])))


@settings(deadline=None)
@given(orders())
def test_a_dropped_rest_is_the_same_for_every_group_size(inputs):
    order = balanced_order(**inputs, drop_last=True)
    full = len(inputs["costs"]) // inputs["batch_size"] * inputs["batch_size"]
    others = balanced_order(**{**inputs, "group_size": 1}, drop_last=True)
    assert len(order) == len(set(order.tolist())) == full
    assert set(order.tolist()) == set(others.tolist())


@settings(deadline=None)
@given(orders(), st.booleans())
def test_every_group_holds_packs_whose_costs_are_neighbours(inputs, drop_last):
    inputs["costs"] = inputs["costs"] + np.linspace(0, 0.5, len(inputs["costs"]))  # no ties
    order = balanced_order(**inputs, drop_last=drop_last)
    place = np.empty(len(inputs["costs"]), np.int64)
    by_cost = np.sort(order)[np.argsort(inputs["costs"][np.sort(order)])]
    place[by_cost] = np.arange(len(order))
    for step in steps_of(order, inputs["batch_size"]):
        for group in steps_of(step, inputs["group_size"]):
            assert np.ptp(place[group]) == len(group) - 1


@settings(deadline=None)
@given(orders())
def test_the_same_arguments_give_the_same_order(inputs):
    assert np.array_equal(balanced_order(**inputs), balanced_order(**inputs))


def test_epochs_and_seeds_differ():
    costs = np.arange(64.0)
    drawn = [tuple(balanced_order(costs, 8, 4, seed, epoch)) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize(("groups", "levels"), [(2, 64), (3, 8), (4, 4), (7, 2), (16, 2)])
def test_no_step_stays_on_one_cost_level(groups, levels):
    """Uses the docstring's number of levels, over more steps than one shuffle would mix."""
    steps, group_size = 500, 4
    costs = np.arange(steps * groups * group_size, dtype=np.float64)
    for epoch in range(5):
        order = balanced_order(costs, groups * group_size, group_size, 0, epoch)
        level = (costs[order] * levels // len(costs)).reshape(steps, groups, group_size)[:, :, 0]
        assert (level.min(axis=1) < level.max(axis=1)).all()


@pytest.mark.parametrize(("groups", "group_size"), [(2, 1), (4, 1), (16, 1), (4, 8)])
def test_consecutive_groups_are_no_more_alike_than_in_a_shuffle(groups, group_size):
    """Averages over epochs the correlation of a group's cost with the next one's; the standard error is 0.003."""
    count, epochs = 3200, 40
    costs = np.sort(np.random.default_rng(0).lognormal(0, 1, count * group_size))
    cost_of_group = costs.reshape(count, group_size).sum(axis=1)

    def correlation(values):
        return np.corrcoef(values[1:], values[:-1])[0, 1]

    def order(epoch):
        return balanced_order(costs, groups * group_size, group_size, 0, epoch)

    balanced = np.mean([correlation(costs[order(e)].reshape(count, group_size).sum(axis=1)) for e in range(epochs)])
    shuffled = np.mean([correlation(cost_of_group[epoch_order(count, 1, e)]) for e in range(epochs)])
    assert abs(balanced - shuffled) < 0.02


@pytest.mark.parametrize("ranks", [8, 32])
def test_ranks_of_a_balanced_step_wait_for_nobody(ranks):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1024, 32769, 20_000)
    plan = plan_packs(lengths, 32768)
    costs = COST.packs(plan, lengths)
    balanced = cost_over_ideal(costs[balanced_order(costs, 4 * ranks, ranks, 0, 0)], ranks, 4 * ranks)
    shuffled = cost_over_ideal(costs[epoch_order(len(costs), 0, 0)], ranks, 4 * ranks)
    assert balanced < 1.005
    assert shuffled > 1.15


def test_groups_of_one_pack_a_rank_balance_micro_batches_of_several_packs_too():
    costs = np.sort(np.random.default_rng(0).lognormal(0, 1, 6400))
    order = balanced_order(costs, batch_size=64, group_size=8, seed=0, epoch=0)
    assert cost_over_ideal(costs[order], ranks=8, batch_size=64, micro_batch_size=2) < 1.01
    assert cost_over_ideal(costs[epoch_order(6400, 0, 0)], ranks=8, batch_size=64, micro_batch_size=2) > 1.5


@pytest.mark.parametrize(
    ("costs", "ranks", "batch_size", "micro", "expected"),
    [
        ([1, 3, 2, 2], 2, None, 1, (3 + 2) * 2 / 8),
        ([1, 3, 2, 2], 2, 2, 1, (3 + 2) * 2 / 8),
        ([1, 3, 2], 2, 2, 1, (3 + 2) * 2 / 6),  # the last step has an idle rank
        ([1, 3, 2, 2], 2, 4, 2, 5 * 2 / 8),  # rank 0 runs 1 + 2, rank 1 runs 3 + 2
        ([1, 3, 2], 1, 2, 1, 1.0),
        ([0, 0], 2, 2, 1, 1.0),
        ([], 2, 4, 1, 1.0),
        ([1, 1, 1], 2, 3, 1, 4 / 3),  # a step whose packs the ranks do not divide
    ],
)
def test_a_step_takes_as_long_as_its_dearest_rank(costs, ranks, batch_size, micro, expected):
    assert cost_over_ideal(np.asarray(costs, np.float64), ranks, batch_size, micro) == pytest.approx(expected)


def test_the_packs_of_an_epochs_last_short_step_vary():
    """Not only the dearest packs, which the order by cost would leave over in every epoch."""
    last = [frozenset(balanced_order(np.arange(14.0), 4, 2, 0, epoch)[12:].tolist()) for epoch in range(40)]
    assert last.count(frozenset({12, 13})) < 20
    assert len(set(last)) > 3
