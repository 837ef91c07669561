"""The packs of each rank in each step: every pack once an epoch, the same steps for any number of ranks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.trainer.step_plan import StepPlan

sizes = {"num_packs": st.integers(1, 60), "batch_size": st.integers(1, 20), "seed": st.integers(0, 5)}


def _with_costs(plan: StepPlan, group_size: int, seed: int) -> StepPlan:
    """Return the same steps, balanced by random costs."""
    costs = np.random.default_rng(seed).integers(1, 9, plan.num_packs).astype(np.float64)
    return replace(plan, costs=costs, group_size=group_size)


shuffled = st.builds(StepPlan, **sizes)
plans = st.one_of(shuffled, st.builds(_with_costs, shuffled, st.integers(1, 8), st.integers(0, 3)))
ranks_of_a_run = st.integers(1, 6)


def _epoch(plan: StepPlan, epoch: int) -> list[np.ndarray]:
    first = epoch * plan.steps_per_epoch
    return [plan.packs(first + step) for step in range(plan.steps_per_epoch)]


@given(plans, st.integers(0, 3))
def test_an_epoch_has_every_pack_once(plan, epoch):
    assert sorted(np.concatenate(_epoch(plan, epoch))) == list(range(plan.num_packs))


@given(plans)
def test_every_step_but_the_last_of_an_epoch_is_full(plan):
    sizes = [len(packs) for packs in _epoch(plan, 0)]
    assert sizes[:-1] == [plan.batch_size] * (len(sizes) - 1)
    assert 1 <= sizes[-1] <= plan.batch_size


@given(st.builds(StepPlan, **sizes, drop_last=st.just(True)))
def test_drop_last_leaves_out_only_what_fills_no_step(plan):
    assert plan.steps_per_epoch == plan.num_packs // plan.batch_size
    assert all(len(packs) == plan.batch_size for packs in _epoch(plan, 1) if plan.steps_per_epoch)


@given(plans, st.integers(0, 2))
def test_what_an_epoch_leaves_out_is_what_it_does_not_visit(plan, epoch):
    dropping = replace(plan, drop_last=True)
    left_out = dropping.left_out(epoch)
    assert len(left_out) == plan.num_packs % plan.batch_size
    if dropping.steps_per_epoch:
        visited = np.concatenate(_epoch(dropping, epoch))
        assert sorted([*visited, *left_out]) == list(range(plan.num_packs))
    assert plan.left_out(epoch).tolist() == []


@given(plans, st.integers(0, 2))
def test_an_epoch_leaves_out_the_same_packs_whatever_the_group_size(plan, epoch):
    kept = [set(replace(plan, drop_last=True, group_size=size).order(epoch)) for size in (1, 3)]
    assert kept[0] == kept[1]


@given(plans, ranks_of_a_run, st.integers(0, 40))
def test_the_ranks_of_a_step_share_its_packs_and_hold_equally_many_slots(plan, ranks, step):
    shares = [plan.rank_packs(step, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    packs = [pack for share in shares for pack in share if pack is not None]
    assert sorted(packs) == sorted(plan.packs(step))
    idle = [share.count(None) for share in shares]
    assert max(idle) <= 1, "no rank idles twice, or there would be a slot too many"


@given(plans, st.integers(0, 40))
def test_one_rank_runs_the_packs_in_the_order_of_the_step(plan, step):
    assert plan.rank_packs(step, 0, 1) == plan.packs(step).tolist()


def test_two_ranks_share_five_packs_as_drawn_and_more_ranks_than_packs_leave_ranks_idle():
    plan = StepPlan(5, 5, seed=0, shuffle=False)
    assert [plan.rank_packs(0, rank, 2) for rank in (0, 1)] == [[0, 2, 4], [1, 3, None]]
    plan = StepPlan(2, 2, seed=0, shuffle=False)
    assert [plan.rank_packs(0, rank, 4) for rank in range(4)] == [[0], [1], [None], [None]]


def test_epochs_differ_in_order_and_a_seed_repeats_them():
    plan = StepPlan(50, 50, seed=1)
    assert plan.packs(0).tolist() != plan.packs(1).tolist()
    assert plan.packs(1).tolist() == StepPlan(50, 50, seed=1).packs(1).tolist()
    assert plan.packs(0).tolist() != StepPlan(50, 50, seed=2).packs(0).tolist()
    assert plan.packs(0).tolist() != list(range(50))


@given(plans, st.integers(0, 2), st.data())
def test_steps_without_a_target_are_those_whose_packs_have_none(plan, epoch, data):
    targets = np.array(data.draw(st.lists(st.integers(0, 1), min_size=plan.num_packs, max_size=plan.num_packs)))
    expected = [step for step, packs in enumerate(_epoch(plan, epoch)) if not targets[packs].sum()]
    assert plan.steps_without_target(targets, epoch) == expected


def test_balanced_ranks_run_packs_of_like_cost_side_by_side():
    costs = np.array([9.0, 1, 5, 2, 8, 6, 1, 9])
    plan = StepPlan(8, 4, seed=0, costs=costs, group_size=2)
    pairs = [
        costs[[a, b]] for step in (0, 1) for a, b in zip(*(plan.rank_packs(step, r, 2) for r in (0, 1)), strict=True)
    ]
    assert sorted(map(sorted, pairs)) == [[1, 1], [2, 5], [6, 8], [9, 9]]
    assert plan.cost_over_ideal(costs, 2) == 2 * (1 + 5 + 8 + 9) / 41


def test_a_group_larger_than_a_step_is_a_step():
    plan = StepPlan(6, 2, seed=0, costs=np.arange(6.0), group_size=4)
    assert all(np.ptp(packs) == 1 for packs in _epoch(plan, 0))


def test_validation_runs_packs_by_cost_the_dearest_first():
    plan = StepPlan(4, 2, seed=0, shuffle=False, costs=np.array([2.0, 9, 1, 5]))
    assert [packs.tolist() for packs in _epoch(plan, 3)] == [[1, 3], [0, 2]]


def test_an_unshuffled_plan_keeps_the_datasets_order_in_every_epoch():
    plan = StepPlan(7, 3, seed=5, shuffle=False)
    assert [plan.packs(step).tolist() for step in range(4)] == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2]]
    assert StepPlan(7, 3, seed=5, shuffle=False, drop_last=True).order(1).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("epochs", "steps", "span", "passes", "expected"),
    [
        (None, None, "run", None, (6, 6)),
        (4, None, "run", None, (24, 24)),
        (None, 9, "run", None, (9, 9)),  # as many epochs as it needs
        (1, 12, "run", None, (6, 12)),  # it ends with the smaller of both, and spans the steps, as in verl
        (4, 4, "run", None, (4, 4)),
        (4, 4, "epochs", None, (4, 24)),  # verl ≤ 0.6: the schedule goes on over the epochs
        (None, None, "run", 3.0, (6, 6)),  # a stream of three passes in its own order
        (2, 6, "run", 3.0, (4, 6)),
        (9, 6, "run", 3.0, (6, 6)),
    ],
)
def test_a_run_ends_after_the_smaller_of_its_steps_and_epochs(epochs, steps, span, passes, expected):
    plan = StepPlan(num_packs=24, batch_size=4, seed=0)
    assert plan.run_steps(epochs, steps, span, passes) == expected
