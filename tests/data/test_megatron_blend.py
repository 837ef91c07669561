"""The order of a blend: at every prefix, counts keep the chairman assignment's bound; and Megatron's rule."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.lib.errors import refused
from verl_ext.data.stream.megatron.blend import blend_order, megatron_blend_order, normalised

WEIGHTS = st.lists(
    st.one_of(st.floats(1e-9, 1.0), st.integers(1, 20), st.sampled_from([0, 0.5, 1e6, 1e-12, 1e300])),
    min_size=1,
    max_size=40,
).filter(any)


def tijdeman(weights, n):
    """Apply the rule as stated, step by step, in fractions."""
    total = sum(Fraction(str(weight)) for weight in weights)
    shares = [Fraction(str(weight)) / total for weight in weights]
    least = Fraction(1, 2 * len(weights) - 2)
    counts, order = [0] * len(weights), []
    for k in range(1, n + 1):
        lags = [share * k - count for share, count in zip(shares, counts, strict=True)]
        eligible = [source for source, lag in enumerate(lags) if lag >= least]
        order.append(min(eligible, key=lambda source: (1 - least - lags[source]) // shares[source]))
        counts[order[-1]] += 1
    return order


def worst_deviation(source, weights):
    total = sum(Fraction(str(weight)) for weight in weights)
    worst = Fraction(0)
    for number, weight in enumerate(weights):
        share = Fraction(str(weight)) / total
        counts = np.cumsum(source == number).tolist()
        worst = max(worst, *(abs(count - share * k) for k, count in enumerate(counts, 1)))
    return worst


@settings(deadline=None, max_examples=60)
@given(WEIGHTS, st.integers(1, 300))
@example([1e-9] * 30 + [1], 300)
@example([0.5] + [0.5 / 39] * 39, 300)
def test_counts_stay_within_tijdemans_bound_at_every_prefix(weights, n):
    source, _ = blend_order(weights, n)
    sources = sum(weight > 0 for weight in weights)
    bound = 1 - Fraction(1, 2 * sources - 2) if sources > 1 else 0
    assert source.dtype == np.int16
    assert worst_deviation(source, weights) <= bound < 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 30) | st.floats(0.01, 1.0), min_size=2, max_size=6), st.integers(1, 80))
@example([1, 1], 10)
@example([3, 1], 10)
@example([1, 3], 10)
def test_the_order_is_that_of_the_rule_as_stated(weights, n):
    assert blend_order(weights, n)[0].tolist() == tijdeman(weights, n)


@given(st.lists(st.sampled_from([0, 1, 2, 5]), min_size=1, max_size=9).filter(any), st.integers(0, 60))
def test_each_source_gives_its_samples_in_order(weights, n):
    for order, options in ((blend_order, {}), (megatron_blend_order, {}), (megatron_blend_order, {"compiled": False})):
        source, sample = order(weights, n, **options)
        assert len(source) == n
        for number, weight in enumerate(weights):
            assert sample[source == number].tolist() == list(range((source == number).sum()))
            assert weight > 0 or not (source == number).any()


def test_written_weights_repeat_with_their_common_denominator():
    source, sample = blend_order([0.7, 0.3], 1000)
    assert source.tolist() == source[:10].tolist() * 100
    assert np.bincount(source[:10]).tolist() == [7, 3]
    assert sample[-10:].max() == 699


def test_the_order_is_exact_for_weights_far_apart():
    source, _ = blend_order([1e300, 1e-300, 1.0], 100)
    assert (source == 0).all()
    source, _ = blend_order([10**4, 1], 2 * 10**4)
    assert np.flatnonzero(source).tolist() == [5_000, 15_001]  # in the middle of each 10,001


def test_megatrons_rule_is_no_bound_and_the_default_is():
    weights = normalised(1 / np.arange(1, 40) ** 1.5).tolist()
    assert worst_deviation(megatron_blend_order(weights, 400)[0], weights) > 1
    assert worst_deviation(blend_order(weights, 400)[0], weights) < 1


@pytest.mark.parametrize("order", [blend_order, megatron_blend_order])
@pytest.mark.parametrize(
    ("weights", "things"),
    [
        ([0.5, -0.5], ("finite", "[0.5, -0.5]")),
        ([1.0, float("nan")], ("finite", "[1.0, nan]")),
        ([1.0, float("inf")], ("finite", "[1.0, inf]")),
        ([0, 0.0], ("a weight", "[0, 0.0]")),
        ([], ("a weight", "[]")),
        ([1.0] * 32768, (32767, 32768)),
        ([0.0] * 12, ("a weight", f"{[0.0] * 8} and 4 more")),
    ],
)
def test_refuses_weights_that_cannot_be_used(order, weights, things):
    with refused("data.blend", *things):
        order(weights, 10)
