"""Mixtures: budgets in tokens, balanced length intervals, whole documents, and the packs that come of them."""

import pickle
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.tokenised_data import random_documents, write_tokenised
from verl_ext.data import SFTDataSet
from verl_ext.data.mixture_options import MixtureOptions
from verl_ext.data.mixture_report import mixture_notices, mixture_report
from verl_ext.packing import STRATEGIES, Spans, plan_packs
from verl_ext.packing.mixture import TOLERANCE, IntervalDraw, MixtureSource, draw_mixture
from verl_ext.packing.nearest_subset import WINDOW, nearest_subset
from verl_ext.packing.repeated import MOST_PARTS, PART_PACKS, plan_repeated

EDGES = (8, 16, 32, 64, 128)


@pytest.fixture
def lengths():
    """2,000 documents of 1 to 128 tokens, short ones more often."""
    return np.exp(np.random.default_rng(0).uniform(0, np.log(128), 2000)).astype(np.int32) + 1


def draw(lengths, *sources, seed=0, **options):
    return draw_mixture(lengths, sources, [np.arange(len(lengths))] * len(sources), seed, **options)


def times_drawn(interval, size):
    return np.bincount(interval.documents, minlength=size)


# The pure core


def test_every_interval_gives_the_same_number_of_tokens_not_of_documents(lengths):
    intervals = draw(lengths, MixtureSource("long", tokens=20_000, edges=EDGES))
    assert [interval.given for interval in intervals] == pytest.approx([5000] * 4, rel=TOLERANCE)
    documents = [len(interval.documents) for interval in intervals]
    assert documents[0] > 5 * documents[-1]


def test_an_interval_holds_its_upper_edge_and_not_its_lower_one():
    intervals = draw(np.array([8, 9, 16, 17, 32, 33]), MixtureSource("long", tokens=1000, edges=(8, 16, 32)))
    assert [sorted(set(interval.documents.tolist())) for interval in intervals] == [[1, 2], [3, 4]]
    assert [interval.pool for interval in intervals] == [25, 49]


def test_given_tokens_are_those_of_the_documents_and_lie_in_their_interval(lengths):
    for interval in draw(lengths, MixtureSource("long", tokens=60_000, edges=EDGES)):
        drawn = lengths[interval.documents]
        assert interval.given == drawn.sum()
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
    assert interval.given == pytest.approx(interval.wanted, rel=TOLERANCE)


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
    sources = [
        MixtureSource("fixed", tokens=10_000),
        MixtureSource("one", weight=1),
        MixtureSource("three", weight=3),
    ]
    wanted = [interval.wanted for interval in draw(lengths, *sources, total_tokens=50_000)]
    assert wanted == [10_000, 10_000, 30_000]
    with pytest.raises(ValueError, match=r"^data.mixture.total_tokens must leave tokens .*got 10000, .* sum to 10000$"):
        draw(lengths, *sources, total_tokens=10_000)


def test_without_a_total_weighted_sources_share_the_tokens_that_they_hold(lengths):
    half = np.arange(1000)
    sources = [MixtureSource("one", weight=1), MixtureSource("three", weight=3)]
    intervals = draw_mixture(lengths, sources, [half, half], seed=0)
    assert sum(interval.wanted for interval in intervals) == pytest.approx(lengths[:1000].sum(), abs=1)
    assert intervals[1].wanted == pytest.approx(3 * intervals[0].wanted, abs=4)


def test_the_scale_is_a_factor_on_every_budget(lengths):
    sources = [MixtureSource("fixed", tokens=10_000, edges=EDGES), MixtureSource("rest", weight=1)]
    whole = draw(lengths, *sources, total_tokens=30_000)
    tenth = draw(lengths, *sources, total_tokens=30_000, scale=0.1)
    assert [interval.wanted for interval in tenth] == [interval.wanted / 10 for interval in whole]


def test_an_interval_without_a_document_is_an_error_that_names_it(lengths):
    with pytest.raises(
        ValueError, match=r"data.mixture.sources.long.intervals .*more than 128 and at most 256"
    ) as told:
        draw(lengths, MixtureSource("long", tokens=10_000, edges=(64, 128, 256)))
    assert "\n" not in str(told.value)


def test_a_source_without_documents_or_with_a_budget_for_none_is_an_error():
    with pytest.raises(ValueError, match=r"data.mixture.sources.all must have at least one document .*got none"):
        draw_mixture(np.array([5]), [MixtureSource("all", tokens=5)], [np.arange(0)], seed=0)
    with pytest.raises(ValueError, match=r"sources.all must have tokens for at least one document; got 40 .* has 100"):
        draw(np.array([100, 120]), MixtureSource("all", tokens=40))


@pytest.mark.parametrize(("tokens", "scale"), [(4e19, 1.0), (2.0**53, 2.0**53), (2e10, 1.0)])
def test_a_budget_far_too_large_is_one_line_with_its_key(tokens, scale):
    with pytest.raises(ValueError, match=r"^data.mixture.sources.all must draw fewer than 2\^31 documents") as told:
        draw(np.array([5, 4]), MixtureSource("all", tokens=tokens), scale=scale)
    assert "\n" not in str(told.value)


def test_an_interval_that_nothing_is_wanted_of_is_not_off():
    nothing = IntervalDraw("all", 0, 8, np.zeros(0, np.int64), 0, wanted=0, given=0, pool=5, hindrance=None)
    spans = Spans(np.zeros(1, int), np.zeros(1, int), np.array([5]))
    (row,) = mixture_report([nothing], spans, ["DIR"], np.array([0, 1]))
    assert (row.off, row.epochs) == (0.0, 0.0)


def test_the_document_that_hinders_is_named_with_what_it_would_change():
    short, long = draw(np.array([9, 9, 9, 30]), MixtureSource("long", tokens=54, edges=(8, 16, 32)))
    assert (short.given, short.hindrance) == (27, None)
    assert (long.given, long.hindrance.document, long.hindrance.tokens_otherwise) == (30, 3, 0)


def test_a_long_document_does_not_leave_a_hole_that_short_ones_could_fill():
    lengths = np.array([1_000_000] * 50 + [100] * 50_000)
    for seed in range(5):
        (interval,) = draw(lengths, MixtureSource("all", tokens=4_050_000), seed=seed)
        assert abs(interval.given - 4_050_000) <= 50


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.floats(0, 1), st.integers(0, 9))
def test_among_few_documents_no_subset_is_nearer(lengths, share, seed):
    values = np.array(lengths)
    wanted = round(share * values.sum())
    chosen = nearest_subset(values, wanted, 0.0, np.random.default_rng(seed))
    sums = [sum(part) for size in range(len(lengths) + 1) for part in combinations(lengths, size)]
    assert abs(wanted - values[chosen].sum()) == min(abs(wanted - one) for one in sums)


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
    assert abs(sum(interval.wanted for interval in intervals) - source.tokens) <= 0.5
    for interval in intervals:
        low, high = (0, 200) if interval.low is None else (interval.low, interval.high)
        pool = np.flatnonzero((values > low) & (values <= high))
        counts = times_drawn(interval, len(values))
        assert counts.sum() == counts[pool].sum()
        assert counts[pool].max() - counts[pool].min() <= 1
        assert counts[pool].min() >= interval.wanted // values[pool].sum()
        assert interval.given == (counts * values).sum()
        off = abs(interval.given - interval.wanted)
        assert (interval.hindrance is not None) == (off > TOLERANCE * interval.wanted)
        if interval.hindrance:
            assert abs(interval.hindrance.tokens_otherwise - interval.wanted) >= off or len(pool) > WINDOW


def test_copies_of_a_document_go_into_different_packs():
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 60, 3000)
    documents = np.concatenate([np.arange(3000), np.arange(3000)[lengths > 30], np.arange(1000)])
    plan = plan_repeated(lengths, documents, 100, "best_fit", seed=0)
    assert sorted(plan.document_index) == sorted(documents)
    assert plan.pack_sums(lengths).max() <= 100
    for pack in range(plan.num_packs):
        assert len(set(plan.documents(pack))) == len(plan.documents(pack))
    assert plan.num_packs <= plan_packs(lengths[documents], 100).num_packs * 1.02


def test_short_documents_repeated_as_often_as_there_are_parts_never_meet_and_fill_their_packs():
    lengths = np.random.default_rng(0).integers(20, 301, 4000)
    documents = np.repeat(np.arange(4000), 1 + np.arange(4000) % MOST_PARTS)
    assert lengths[documents].sum() > 1000 * MOST_PARTS * PART_PACKS
    plan = plan_repeated(lengths, documents, 1000, "best_fit", seed=0)
    assert plan.num_packs <= plan_packs(lengths[documents], 1000).num_packs * 1.003
    assert all(len(np.unique(plan.documents(pack))) == len(plan.documents(pack)) for pack in range(plan.num_packs))


def test_one_document_repeated_far_more_often_than_the_rest_does_not_split_them_all():
    lengths = np.random.default_rng(0).integers(20, 301, 40_000)
    documents = np.concatenate([np.arange(40_000), np.full(600, 7)])
    plan = plan_repeated(lengths, documents, 1000, "best_fit", seed=0)
    assert plan.num_packs <= plan_packs(lengths[documents], 1000).num_packs * 1.003


def test_documents_that_cannot_meet_themselves_are_packed_as_one_list():
    lengths = np.random.default_rng(0).integers(51, 101, 1000)
    documents = np.tile(np.arange(1000), 3)
    plan, one_list = plan_repeated(lengths, documents, 100, "best_fit", 0), plan_packs(lengths[documents], 100)
    assert plan.document_index.tolist() == documents[one_list.document_index].tolist()


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
    st.lists(st.integers(0, 10**6), max_size=60),
    st.sampled_from(["best_fit", "next_fit", "none"]),
)
def test_a_plan_of_repeated_documents_holds_each_as_often_as_it_is_drawn(lengths, drawn, strategy):
    documents = np.array(drawn, np.int64) % len(lengths)
    plan = plan_repeated(np.array(lengths), documents, 20, strategy, seed=0)
    assert sorted(plan.document_index) == sorted(documents)
    assert plan.pack_offsets[-1] == len(documents)
    assert (plan.pack_sums(lengths) <= 20).all()
    assert (np.diff(plan.pack_offsets) > 0).all()


def test_few_packs_are_planned_as_one_list():
    lengths, documents = np.array([60, 40]), np.array([0, 0, 1, 1])
    assert plan_repeated(lengths, documents, 100, "best_fit", seed=0).num_packs == 2


# data.mixture


def read(text):
    return MixtureOptions.read(OmegaConf.create(text))


def test_a_mixture_is_read_from_yaml():
    options = read(
        "{scale: 0.5, sources: {a: {tokens: 4e9}, b: {weight: 2, train_dir: [/x, /y/../z]},"
        " c: {tokens: 10, intervals: [0, 8]}}}"
    )
    assert options.sources == (
        MixtureSource("a", tokens=4e9),
        MixtureSource("b", weight=2),
        MixtureSource("c", tokens=10, edges=(0, 8)),
    )
    assert options.folders == (None, ("/x", "/z"), None)
    assert (options.scale, options.total_tokens) == (0.5, None)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "{sources: {a: {token: 5}}}",
            "unknown key data.mixture.sources.a.token; nearest: data.mixture.sources.a.tokens",
        ),
        ("{source: {a: {tokens: 5}}}", "unknown key data.mixture.source; nearest: data.mixture.sources"),
        ("{sources: {a: {tokens: 5, interval: [1, 2]}}}", "nearest: data.mixture.sources.a.intervals"),
        ("{sources: {a: {tokens: 5, weight: 1}}}", "a must have either tokens or weight; got tokens=5, weight=1"),
        ("{sources: {a: {}}}", "data.mixture.sources.a must have either tokens or weight; got none of them"),
        ("{sources: {a: 5}}", "data.mixture.sources.a must be a mapping, e.g. {tokens: 4.0e9}; got 5"),
        ("{sources: {}}", "data.mixture.sources must name at least one source"),
        ("{scale: 1}", "data.mixture.sources must name at least one source"),
        ("{sources: {a: {tokens: 0}}}", "data.mixture.sources.a.tokens must be a number above 0; got 0"),
        ("{sources: {a: {tokens: true}}}", "data.mixture.sources.a.tokens must be a number above 0; got True"),
        ("{sources: {a: {weight: .nan}}}", "data.mixture.sources.a.weight must be a number above 0; got nan"),
        ("{sources: {a: {tokens: 4B}}}", "data.mixture.sources.a.tokens must be a number above 0; got '4B'"),
        ("{sources: {a: {tokens: 4e19}}}", "data.mixture.sources.a.tokens must be at most 2^53; got 4e+19"),
        ("{sources: {a: {tokens: .inf}}}", "data.mixture.sources.a.tokens must be at most 2^53; got inf"),
        ("{scale: 1e300, sources: {a: {tokens: 5}}}", "data.mixture.scale must be at most 2^53; got 1e+300"),
        (
            "{total_tokens: 1e300, sources: {a: {weight: 5}}}",
            "data.mixture.total_tokens must be at most 2^53; got 1e+300",
        ),
        ("{scale: -1, sources: {a: {tokens: 5}}}", "data.mixture.scale must be a number above 0; got -1"),
        ("{total_tokens: 9, sources: {a: {tokens: 5}}}", "data.mixture.total_tokens must be null where no source has"),
        ("{sources: {a: {tokens: 5, intervals: [8]}}}", "intervals must be at least two ascending whole numbers"),
        ("{sources: {a: {tokens: 5, intervals: [8, 8]}}}", "of tokens, e.g. [8192, 16384]; got [8, 8]"),
        ("{sources: {a: {tokens: 5, intervals: [1.5, 8]}}}", "intervals must be at least two ascending whole numbers"),
        (
            "{sources: {a: {tokens: 5, train_dir: '???'}}}",
            "a.train_dir must name a tokenised dataset folder; got nothing",
        ),
        ("{sources: {a: {tokens: 5, train_dir: 7}}}", "a.train_dir must name a tokenised dataset folder; got 7"),
    ],
)
def test_a_mistake_in_the_mixture_is_told_with_its_key(text, line):
    with pytest.raises(ValueError, match=r"data\.mixture") as told:
        read(text)
    assert line in str(told.value)
    assert "\n" not in str(told.value)


def test_all_mistakes_are_told_together():
    with pytest.raises(ValueError, match=r"data\.mixture") as told:
        read("{scale: 0, sources: {a: {token: 5}, b: {tokens: 5, weight: 5}}}")
    assert len(str(told.value).splitlines()) == 3


# SFTDataSet


@pytest.fixture
def folders(tmp_path):
    """Two folders; every document begins with its own token: 1.. in the first, 501.. in the second."""
    rng = np.random.default_rng(0)
    paths = []
    for first_token, sizes in ((1, rng.integers(2, 40, 60)), (501, rng.integers(2, 20, 30))):
        documents = random_documents(rng, sizes, vocab=50, categories=2)
        for number, document in enumerate(documents):
            document["input_ids"][:] = number + first_token
        paths.append(write_tokenised(tmp_path / str(first_token), documents, {1: "one", 2: "two"}))
    return paths


def documents_of(dataset):
    """(first token, length) of every document of every pack."""
    found = []
    for row in dataset:
        begins = np.flatnonzero(row["position_ids"].numpy() == 0)
        sizes = np.diff([*begins, len(row["input_ids"])])
        found += zip(row["input_ids"].numpy()[begins].tolist(), sizes.tolist(), strict=True)
    return found


MIXTURE = {
    "sources": {
        "all": {"tokens": 400},
        "long": {"tokens": 1200, "intervals": [10, 20, 40]},
        "papers": {"weight": 1, "train_dir": None},
    }
}


@pytest.fixture
def mixture(folders):
    sources = {**MIXTURE["sources"], "papers": {"weight": 1, "train_dir": folders[1]}}
    return {"sources": sources}


def test_packs_hold_the_documents_drawn_and_every_document_as_often_as_drawn(folders, mixture):
    dataset = SFTDataSet(folders[0], 50, mixture=mixture)
    found = documents_of(dataset)
    assert len(found) == sum(row.documents for row in dataset.mixture_report) == dataset.pack_documents().sum()
    assert sum(size for _, size in found) == sum(row.tokens_given for row in dataset.mixture_report)
    tokens = dataset.plan.pack_sums(dataset.spans.length)
    assert tokens.tolist() == dataset.pack_tokens().tolist()
    assert tokens.max() <= 50
    assert dataset.pack_targets().tolist() == [int(row["loss_mask"].sum()) for row in dataset]


def test_a_source_draws_from_its_own_folder_or_from_train_dir(folders, mixture):
    dataset = SFTDataSet(folders[0], 50, mixture=mixture)
    assert dataset.folders == tuple(folders)
    of_papers = [token for token, _ in documents_of(dataset) if token > 500]
    assert len(of_papers) == len(set(of_papers)) == 30  # the weighted source shares the tokens that it holds
    papers = dataset.mixture_report[-1]
    assert (papers.source, papers.low, papers.high, papers.epochs, papers.off) == ("papers", None, None, 1.0, 0.0)


def test_train_dir_is_not_needed_where_every_source_has_its_own(folders):
    mixture = {"sources": {"one": {"weight": 1, "train_dir": folders[1]}}}
    assert SFTDataSet(None, 50, mixture=mixture).folders == (folders[1],)
    with pytest.raises(ValueError, match=r"data.train_dir must name a tokenised dataset folder; got None"):
        SFTDataSet(None, 50, mixture={"sources": {"one": {"weight": 1}}})
    assert SFTDataSet("/no/such", 50, mixture=mixture).folders == (folders[1],)  # nothing draws from it
    missing = {"sources": {"one": {"weight": 1, "train_dir": "/no/such"}}}
    with pytest.raises(
        ValueError, match=r"^data.mixture.sources.one.train_dir must be an existing folder; got /no/such"
    ):
        SFTDataSet(None, 50, mixture=missing)


def test_a_folder_named_twice_is_read_once(folders):
    mixture = {"sources": {"one": {"tokens": 100}, "two": {"tokens": 100, "train_dir": folders}}}
    dataset = SFTDataSet(folders[0], 50, mixture=mixture)
    assert dataset.folders == tuple(folders)
    assert len(dataset.spans) == 90


def test_the_config_node_gives_the_same_packs_as_the_keyword(folders, mixture):
    config = OmegaConf.create({"max_tokens": 50, "mixture": mixture})
    theirs = SFTDataSet(parquet_files=folders[0], config=config)
    ours = SFTDataSet(folders[0], 50, mixture=mixture)
    assert theirs.plan.document_index.tolist() == ours.plan.document_index.tolist()
    assert theirs.mixture_report == ours.mixture_report
    none = SFTDataSet(parquet_files=folders[0], config=OmegaConf.create({"max_tokens": 50, "mixture": None}))
    assert (none.mixture_report, len(none.plan.document_index)) == ([], 60)


def test_the_lengths_of_a_mixture_are_those_after_over_length_handling(folders):
    mixture = {"sources": {"full": {"tokens": 200, "intervals": [9, 10]}, "tails": {"tokens": 60, "intervals": [0, 9]}}}
    dataset = SFTDataSet(folders[0], 10, over_length="split", mixture=mixture)
    full, tails = dataset.mixture_report
    assert (full.documents, full.tokens_given) == (20, 200)
    assert tails.tokens_given == pytest.approx(60, abs=1)
    assert {size for _, size in documents_of(dataset)} >= {10}
    assert all(size <= 10 for _, size in documents_of(dataset))


def test_what_hinders_is_named_by_row_and_folder(folders, tmp_path):
    own = write_tokenised(tmp_path / "own", random_documents(np.random.default_rng(0), [5, 45], 50, 1))
    mixture = {"sources": {"short": {"tokens": 30}, "own": {"tokens": 30, "intervals": [20, 64], "train_dir": own}}}
    dataset = SFTDataSet(folders[0], 50, mixture=mixture)
    row = dataset.mixture_report[-1]
    assert (row.tokens_given, row.off) == (45, 0.5)
    assert row.hinders == f"row 1 of {own} (45 tokens) drawn once less would make it -100.00%"
    (notice,) = mixture_notices(dataset.mixture_report)
    assert notice.startswith("data.mixture: source own, 20 < length <= 64 gives 45 of 30 tokens (+50.00%); row 1 of ")


def test_a_split_document_that_hinders_is_named_by_where_its_piece_begins(tmp_path):
    own = write_tokenised(tmp_path / "own", random_documents(np.random.default_rng(0), [25], 50, 1))
    sources = {"own": {"tokens": 4, "intervals": [0, 8]}}
    dataset = SFTDataSet(own, 10, over_length="split", mixture={"sources": sources})
    assert dataset.mixture_report[0].hinders.startswith(f"row 0 of {own} (5 tokens from 20) drawn once less")


@pytest.mark.parametrize("max_tokens", [2**53 + 1, 2**62, 2**63, 10**30])
@pytest.mark.parametrize("strategy", ["best_fit", "next_fit"])
def test_a_pack_of_more_tokens_than_sums_can_hold_is_one_line(folders, max_tokens, strategy):
    line = rf"^data.max_tokens must be at most {2**53}; got {max_tokens}$"
    with pytest.raises(ValueError, match=line):
        SFTDataSet(folders[0], max_tokens, strategy=strategy)
    with pytest.raises(ValueError, match=line):
        plan_packs([1, 2], max_tokens, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_largest_pack_is_planned(strategy):
    assert plan_packs([5, 3], 2**53, strategy).pack_sums([5, 3]).sum() == 8


def test_max_samples_is_refused_with_a_mixture(folders, mixture):
    with pytest.raises(ValueError, match=r"data.train_max_samples must be -1 with data.mixture, .*; got 3"):
        SFTDataSet(folders[0], 50, mixture=mixture, max_samples=3)


def test_a_worker_gets_the_same_packs(folders, mixture):
    dataset = SFTDataSet(folders[0], 50, mixture=mixture)
    theirs = pickle.loads(pickle.dumps(dataset))
    assert documents_of(theirs) == documents_of(dataset)
    assert theirs.mixture_report == dataset.mixture_report
