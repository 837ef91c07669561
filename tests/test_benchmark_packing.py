"""The packing benchmark at a small size: its plans are checked and its balance figures hold; no timing is asserted."""

import importlib
import json

import numpy as np
import pytest

from benchmarks import packers, packing, step_balance
from benchmarks.length_distributions import DISTRIBUTIONS
from tests.test_packing import first_fit_decreasing_count

pytestmark = pytest.mark.slow

# Step cost over ideal by ranks, for cost-sorted groups and for packs in random order, on another draw of lengths.
SORTED = {"A": {8: 1.0006, 32: 1.0027, 128: 1.0085}, "B": {8: 1.0001, 32: 1.0002, 128: 1.0011}}
RANDOM = {"A": {8: 1.38, 32: 1.48, 128: 1.51}, "B": {8: 1.17, 32: 1.22, 128: 1.23}}


@pytest.fixture(scope="module")
def result():
    """Return the measurements of `--quick` without any peer installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packers, "PEERS", {"absent": lambda: importlib.import_module("a_packer_that_is_not_installed")})
        return packing.measure(packing.arguments(["--quick"]))


def test_a_peer_that_is_not_installed_is_skipped_with_one_line(result):
    assert result["skipped"] == ["absent: skipped, No module named 'a_packer_that_is_not_installed'"]
    assert packing.report(result).startswith(result["skipped"][0])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_ours_needs_no_more_packs_than_first_fit_decreasing(result, name):
    row = result["distributions"][name]["packers"][0]
    lengths = DISTRIBUTIONS[name].draw(row["documents"], np.random.default_rng(0))
    assert row["packs"] <= first_fit_decreasing_count(lengths.tolist(), DISTRIBUTIONS[name].max_tokens)
    assert 0.99 < row["fill"] <= 1


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_cost_sorted_groups_share_steps_evenly_and_in_a_shuffles_order(result, name):
    rows = result["distributions"][name]["balance"]
    assert [row["ranks"] for row in rows] == [8, 32, 128]
    for row in rows:
        assert row["sorted"] - 1 < 1.1 * (SORTED[name][row["ranks"]] - 1)
        assert row["random"] == pytest.approx(RANDOM[name][row["ranks"]], abs=0.03)
        assert row["sorted"] <= row["sorted_with_tail"] < 1.02
        assert row["standard_error"] < 0.01
        assert abs(row["correlation"]["sorted"] - row["correlation"]["random"]) < 0.03


def test_the_large_plan_is_measured_in_a_process_of_its_own(result):
    large = result["distributions"]["A"]["large"]
    assert large["documents"] == 20_000
    assert large["fill"] > 0.99
    assert 0 <= large["peak_mib"] < 100


def test_the_result_is_json_and_the_report_names_every_distribution(result):
    json.dumps(result)
    report = packing.report(result)
    assert all(f"{name}: {distribution.text}" in report for name, distribution in DISTRIBUTIONS.items())


def test_karmarkar_karp_of_the_installed_verl_is_compared():
    pytest.importorskip("verl")
    (packer,) = packers.PEERS["verl"]()
    lengths = DISTRIBUTIONS["A"].draw(60, np.random.default_rng(0))
    packs = packer.documents(packer.pack(packer.prepare(lengths), 65_536))
    packing.check_packs(packer.name, packs, lengths, 65_536)


@pytest.mark.parametrize(("packs", "fault"), [([[0], [0, 1]], "repeated"), ([[0]], "lost"), ([[0, 1]], "budget")])
def test_a_packer_that_cheats_is_an_error(packs, fault):
    with pytest.raises(RuntimeError, match=fault):
        packing.check_packs("peer", packs, np.array([6, 5]), 10)


def test_too_few_packs_for_the_ranks_leave_their_row_out():
    assert [row["ranks"] for row in step_balance.step_balance(DISTRIBUTIONS["A"], 2_000)] == [8]


def test_refuses_a_size_below_one(capsys):
    with pytest.raises(SystemExit):
        packing.arguments(["--documents", "0"])
    assert "--documents must be at least 1; got 0" in capsys.readouterr().err
