"""The simulation of benchmarks/scaling.py: its parts have the values that their names say; no timing is asserted."""

import numpy as np
import pytest
from transformers import AutoConfig

from benchmarks.scaling import Cluster, Work, simulated, step_time, table
from verl_ext.packing import cost_over_ideal

pytestmark = pytest.mark.slow

PERFECT = Cluster(flops=1.0, node_link=np.inf, network=np.inf, latency=0, jitter=0, memory=np.inf, storage=np.inf)
PERFECT_STORAGE = {"node_storage": np.inf}
COSTS = np.random.default_rng(0).uniform(1, 5, 8 * 4 * 3)


def cluster(**changes):
    return Cluster(**{**vars(PERFECT), **PERFECT_STORAGE, **changes})


def parts(ranks=8, of=None, **changes):
    return step_time(of or Work(COSTS, unit=1, parameters=1e3, layers=4), cluster(**changes), ranks)


def test_on_perfect_machines_a_step_is_the_work_and_the_wait_for_the_dearest_pack():
    found = parts()
    assert sum(found.values()) == pytest.approx(found["ideal"] + found["balance"])
    assert found["ideal"] == pytest.approx(COSTS.mean() * 4 * 4)  # four packs, each with four forwards' operations
    assert (found["ideal"] + found["balance"]) / found["ideal"] == pytest.approx(cost_over_ideal(COSTS, 8))


def test_a_slow_rank_and_noise_cost_time_and_nothing_else():
    calm, noisy, slow = parts(), parts(jitter=0.1), parts(slow=1.5)
    for found in (noisy, slow):
        assert found["jitter"] > 0
        assert {**found, "jitter": 0} == {**calm, "jitter": 0}


def test_what_computation_hides_is_not_counted_but_the_first_layer_is():
    busy = parts(node_link=1e9)
    travels = (2 * 2 * 4 + 4) * 1e3 * 7 / 8 / 1e9  # two gathers in each of four micro-steps, one reduction
    assert busy["communication"] == pytest.approx(travels / 4)
    exposed = Work(COSTS, unit=1, parameters=1e3, layers=4, overlaps=False)
    assert parts(of=exposed, node_link=1e9)["communication"] == pytest.approx(travels)
    assert parts(ranks=1, of=exposed, node_link=1e9)["communication"] == 0


def test_the_network_limits_what_crosses_nodes_and_storage_what_is_saved():
    work = Work(np.ones(128), unit=1, parameters=1e3, layers=4, overlaps=False)
    inside, across = (parts(ranks, work, node_link=1e9, network=1e8)["communication"] for ranks in (8, 16))
    assert across / inside == pytest.approx(10 * (15 / 16) / (7 / 8))
    assert parts(16, work, node_storage=1e3)["checkpoint"] == pytest.approx(12 * 1e3 / 2e3 / work.save_every)


def test_packs_for_less_than_a_step_are_refused():
    with pytest.raises(ValueError, match="64 ranks need 256 packs a step; got 96"):
        parts(64)


def test_every_number_of_ranks_has_both_orders_and_the_balanced_one_is_faster():
    lengths = np.random.default_rng(0).integers(100, 4000, 4000)
    config = AutoConfig.for_model("qwen3", hidden_size=64, num_hidden_layers=2, vocab_size=100)
    rows = simulated(lengths, 4096, config, Cluster())
    assert [(row["ranks"], row["order"]) for row in rows[:2]] == [(8, "shuffled"), (8, "balanced")]
    assert all(
        balanced["balance"] < shuffled["balance"] for shuffled, balanced in zip(rows[::2], rows[1::2], strict=True)
    )
    assert len(table(rows).splitlines()) == len(rows) + 1
