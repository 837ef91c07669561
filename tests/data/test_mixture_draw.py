"""The draw of a mixture: budgets in tokens, balanced length intervals, whole documents. Pure functions."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.errors import refused
from verl_ext.data.packs.mixture import mixture_report
from verl_ext.packing import Spans
from verl_ext.packing.mixture import TOLERANCE, IntervalDraw, MixtureSource, draw_mixture

EDGES = (8, 16, 32, 64, 128)


@pytest.fixture
def lengths():
    """Draw lengths of 2,000 documents of 1 to 128 tokens, short ones more often."""
    return np.exp(np.random.default_rng(0).uniform(0, np.log(128), 2000)).astype(np.int32) + 1


def draw(lengths, *sources, seed=0, **options):
    return draw_mixture(lengths, sources, [np.arange(len(lengths))] * len(sources), seed, **options)


def times_drawn(interval, size):
    return np.bincount(interval.documents, minlength=size)


def test_every_interval_gives_the_same_number_of_tokens_not_of_documents(lengths):
    intervals = draw(lengths, MixtureSource("long", tokens=20_000, edges=EDGES))
    assert [interval.drawn for interval in intervals] == pytest.approx([5000] * 4, rel=TOLERANCE)
    documents = [len(interval.documents) for interval in intervals]
    assert documents[0] > 5 * documents[-1]


def test_an_interval_holds_its_upper_edge_and_not_its_lower_one():
    intervals = draw(np.array([8, 9, 16, 17, 32, 33]), MixtureSource("long", tokens=1000, edges=(8, 16, 32)))
    assert [sorted(set(interval.documents.tolist())) for interval in intervals] == [[1, 2], [3, 4]]
    assert [interval.pool for interval in intervals] == [25, 49]


def test_given_tokens_are_those_of_the_documents_and_lie_in_their_interval(lengths):
    for interval in draw(lengths, MixtureSource("long", tokens=60_000, edges=EDGES)):
        drawn = lengths[interval.documents]
        assert interval.drawn == drawn.sum()
        assert (drawn > interval.low).all()
        assert (drawn <= interval.high).all()
        assert interval.distinct == len(np.unique(interval.documents))


def test_upsampling_repeats_every_document_equally_often(lengths):
    (interval,) = draw(lengths, MixtureSource("all", tokens=float(lengths.sum()) * 3.4))
    counts = times_drawn(interval, len(lengths))
    assert set(counts.tolist()) == {3, 4}
    assert interval.distinct == len(lengths)


def test_a_whole_epoch_is_every_document_once(lengths):
    (interval,) = draw(lengths, MixtureSource("all", tokens=float(lengths.sum())))
    assert interval.documents.tolist() == list(range(len(lengths)))


def test_subsampling_takes_no_document_twice(lengths):
    (interval,) = draw(lengths, MixtureSource("all", tokens=float(lengths.sum()) * 0.3))
    assert times_drawn(interval, len(lengths)).max() == 1
    assert interval.drawn == pytest.approx(interval.budget, rel=TOLERANCE)


def test_a_random_part_keeps_the_distribution_of_lengths(lengths):
    (interval,) = draw(lengths, MixtureSource("all", tokens=float(lengths.sum()) * 0.5))
    assert lengths[interval.documents].mean() == pytest.approx(lengths.mean(), rel=0.1)


def test_the_seed_decides_the_draw(lengths):
    source = MixtureSource("all", tokens=5000)
    first, again, other = (draw(lengths, source, seed=seed)[0].documents.tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_source_draws_other_documents_than_its_like_and_the_same_beside_others(lengths):
    one, two = (MixtureSource(name, tokens=5000) for name in ("one", "two"))
    first, second = draw(lengths, one, two)
    assert first.documents.tolist() != second.documents.tolist()
    (alone,) = draw(lengths, two)
    assert alone.documents.tolist() == second.documents.tolist()


def test_weighted_sources_share_what_the_budgets_in_tokens_leave_of_the_total(lengths):
    sources = [MixtureSource("fixed", tokens=10_000), MixtureSource("one", weight=1), MixtureSource("three", weight=3)]
    wanted = [interval.budget for interval in draw(lengths, *sources, total_tokens=50_000)]
    assert wanted == [10_000, 10_000, 30_000]
    with refused("data.mixture.total_tokens", 10000):
        draw(lengths, *sources, total_tokens=10_000)


def test_without_a_total_weighted_sources_share_the_tokens_that_they_hold(lengths):
    half = np.arange(1000)
    sources = [MixtureSource("one", weight=1), MixtureSource("three", weight=3)]
    intervals = draw_mixture(lengths, sources, [half, half], seed=0)
    assert sum(interval.budget for interval in intervals) == pytest.approx(lengths[:1000].sum(), abs=1)
    assert intervals[1].budget == pytest.approx(3 * intervals[0].budget, abs=4)


def test_the_scale_is_a_factor_on_every_budget(lengths):
    sources = [MixtureSource("fixed", tokens=10_000, edges=EDGES), MixtureSource("rest", weight=1)]
    whole = draw(lengths, *sources, total_tokens=30_000)
    tenth = draw(lengths, *sources, total_tokens=30_000, scale=0.1)
    assert [interval.budget for interval in tenth] == [interval.budget / 10 for interval in whole]


def test_an_interval_without_a_document_is_an_error_that_names_it(lengths):
    with refused("data.mixture.sources.long.intervals", 128, 256):
        draw(lengths, MixtureSource("long", tokens=10_000, edges=(64, 128, 256)))


def test_a_source_without_documents_or_with_a_budget_for_none_is_an_error():
    with refused("data.mixture.sources.all", "none"):
        draw_mixture(np.array([5]), [MixtureSource("all", tokens=5)], [np.arange(0)], seed=0)
    with refused("data.mixture.sources.all", 40, 100):
        draw(np.array([100, 120]), MixtureSource("all", tokens=40))


@pytest.mark.parametrize(("tokens", "scale"), [(4e19, 1.0), (2.0**53, 2.0**53), (2e10, 1.0)])
def test_a_budget_far_too_large_is_one_line_with_its_key(tokens, scale):
    with refused("data.mixture.sources.all", "2^31"):
        draw(np.array([5, 4]), MixtureSource("all", tokens=tokens), scale=scale)


def test_an_interval_that_nothing_is_wanted_of_is_not_off():
    nothing = IntervalDraw("all", 0, 8, np.zeros(0, np.int64), 0, budget=0, drawn=0, pool=5, nearest_swap=None)
    spans = Spans(np.zeros(1, int), np.zeros(1, int), np.array([5]))
    (row,) = mixture_report([nothing], spans, ["DIR"], np.array([0, 1]))
    assert (row.off, row.epochs) == (0.0, 0.0)


def test_a_draw_that_is_off_names_the_nearest_document_and_what_it_would_give():
    short, long = draw(np.array([9, 9, 9, 30]), MixtureSource("long", tokens=54, edges=(8, 16, 32)))
    assert (short.drawn, short.nearest_swap) == (27, None)
    assert (long.drawn, long.nearest_swap) == (30, (3, 0))


def test_a_long_document_does_not_leave_a_hole_that_short_ones_could_fill():
    lengths = np.array([1_000_000] * 50 + [100] * 50_000)
    for seed in range(5):
        (interval,) = draw(lengths, MixtureSource("all", tokens=4_050_000), seed=seed)
        assert abs(interval.drawn - 4_050_000) <= 50


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=80),
    st.floats(0.05, 5),
    st.sampled_from([None, (0, 200), (0, 20, 200), (10, 30, 90)]),
    st.integers(0, 3),
)
def test_a_draw_is_whole_epochs_and_a_part_of_one_within_the_tolerance_or_explained(lengths, epochs, edges, seed):
    values = np.array(lengths)
    source = MixtureSource("s", tokens=epochs * float(values.sum()), edges=edges)
    try:
        intervals = draw(values, source, seed=seed)
    except ValueError:
        pools = [((values > low) & (values <= high)).sum() for low, high in pairwise(edges or (0, 200))]
        assert 0 in pools or source.tokens <= 200 * len(pools)
        return
    assert abs(sum(interval.budget for interval in intervals) - source.tokens) <= 0.5
    for interval in intervals:
        low, high = (0, 200) if interval.low is None else (interval.low, interval.high)
        pool = np.flatnonzero((values > low) & (values <= high))
        counts = times_drawn(interval, len(values))
        assert counts.sum() == counts[pool].sum()
        assert counts[pool].max() - counts[pool].min() <= 1
        assert counts[pool].min() >= interval.budget // values[pool].sum()
        assert interval.drawn == (counts * values).sum()
        off = abs(interval.drawn - interval.budget)
        assert (interval.nearest_swap is not None) == (off > TOLERANCE * interval.budget)
        assert off <= values[pool].max() / 2
