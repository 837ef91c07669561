"""A step's numbers: exact sums, one reduction, a slot for every category on every rank, perplexities at validation."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.ranks import run_ranks
from tests.lib.reference import Document, pack_row
from verl_ext.data import CategoryTable
from verl_ext.losses import MODES, LossSpec, PreferenceOptions
from verl_ext.metrics import COUNTS, RESERVED, LengthBins, StepSums
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.loss import StepLoss
from verl_ext.trainer.objective import PreferenceObjective

NAMES = ("gsm8k", "code")
PREFERENCES = PreferenceObjective(PreferenceOptions("dpo")).measures


def _sums(weighted_loss: float, category_loss: list[float], counts: list[float]) -> StepSums:
    """``counts``: normaliser, tokens, target tokens, packs, then tokens of no category and of each category."""
    sums = StepSums.zeros(len(NAMES) + 1, "cpu")
    sums.totals.add_(weighted_loss)
    sums["nll"].add_(torch.tensor(category_loss, dtype=torch.float64))
    normaliser, tokens, *others = counts
    return counted(sums, [normaliser], [tokens, tokens, *others])  # all are computed


def counted(sums: StepSums, normalisers: list[float], counts: list[float]) -> StepSums:
    """Add Z, COUNTS and target tokens by slot in place."""
    sums.normalisers.add_(torch.tensor(normalisers, dtype=torch.float64))
    for name, value in zip(COUNTS, counts, strict=False):
        sums[name].add_(value)
    sums["targets"].add_(torch.tensor(counts[len(COUNTS) :], dtype=torch.float64))
    return sums


def test_a_report_has_the_loss_the_counts_and_each_categorys_mean():
    #                       weighted   none gsm8k code   Z    tokens targets packs none gsm8k code
    report = _sums(12.0, [5.0, 6.0, 2.0], [4.0, 100, 9, 3, 1, 4, 4]).report("train", NAMES)
    counts = {"tokens": 100, "target_tokens": 9, "packs": 3, "gsm8k_tokens": 4, "code_tokens": 4}
    losses = {"loss": 3.0, "gsm8k_loss": 1.5, "code_loss": 0.5}
    assert report == {f"train/{name}": value for name, value in (losses | counts).items()}
    assert all(isinstance(report[f"train/{name}"], int) for name in counts)


def test_a_category_without_a_token_has_a_count_and_no_loss_and_nothing_seen_neither():
    report = _sums(1.0, [0, 6.0, 0], [1.0, 10, 4, 1, 0, 4, 0]).report("val", NAMES)
    assert report["val/code_tokens"] == 0
    assert "val/code_loss" not in report
    report = StepSums.zeros(3, "cpu").report("val", NAMES)
    assert math.isnan(report["val/loss"])
    assert math.isnan(report["val/perplexity"])
    assert "val/gsm8k_perplexity" not in report


def test_validation_has_perplexities_of_all_targets_and_of_each_category():
    #                       weighted  none gsm8k code   Z   tokens targets packs none gsm8k code
    sums = _sums(12.0, [5.0, 6.0, 2.0], [4.0, 100, 9, 3, 1, 4, 4])
    report = sums.report("val", NAMES)
    assert report["val/perplexity"] == pytest.approx(math.exp(13 / 9))  # not exp(val/loss), which is weighted
    assert report["val/gsm8k_perplexity"] == pytest.approx(math.exp(report["val/gsm8k_loss"]))
    assert report["val/code_perplexity"] == pytest.approx(math.exp(report["val/code_loss"]))
    assert not any("perplexity" in name for name in sums.report("train", NAMES))


@pytest.mark.parametrize(("loss", "expected"), [(709.0, math.exp(709)), (710.0, math.inf), (math.inf, math.inf)])
def test_a_perplexity_past_float64_is_infinite(loss, expected):
    report = _sums(1.0, [0, loss, 0], [1.0, 1, 1, 1, 0, 1, 0]).report("val", NAMES)
    assert report["val/perplexity"] == report["val/gsm8k_perplexity"] == expected


@pytest.mark.parametrize("mode", MODES)
def test_perplexity_is_unweighted_over_all_targets_whatever_the_loss_mode(mode):
    """The log-probability of the pack's token t is −t; targets are at 1, 2, 3 and 5; that at 3 has no category."""
    pack = pack_row(
        [
            Document([10, 11, 12, 13], [0, 1, 1, 1], [0, 7, 9, 0], [1, 2, 3, 4]),
            Document([14, 15, 16], [0, 1, 0], [0, 9, 0], [5, 6, 7]),
        ]
    )
    batch = StepCollator(LossSpec(mode, np.array([1.0, 0.5, 0.0])), CategoryTable((7, 9), NAMES))([pack])
    sums = batch.counts.on("cpu")
    (micro_batch,) = batch.micro_batches(1)
    log_probs = torch.nested.nested_tensor_from_jagged(-torch.arange(1.0, 8.0), micro_batch["input_ids"].offsets())
    StepLoss(1.0, 1, sums)({"log_probs": log_probs}, micro_batch)
    report = sums.report("val", NAMES)
    assert report["val/perplexity"] == pytest.approx(math.exp((1 + 2 + 3 + 5) / 4))
    assert report["val/gsm8k_perplexity"] == pytest.approx(math.exp(1))
    assert report["val/code_perplexity"] == pytest.approx(math.exp((2 + 5) / 2))


_WORDS = ["loss", "a", "a_loss", "a_tokens", "perplexity", "a_perplexity", "sft", "nll", "chosen", "reward", "a_pair"]
_NAMES = st.lists(st.one_of(st.sampled_from(_WORDS), st.text(max_size=4)), unique=True, max_size=5)


def _metrics(names: tuple[str, ...]) -> set[str]:
    """Return the names of all metrics of preferences, some of whose tokens are shared, and of the run."""
    sums = StepSums.zeros(len(names) + 1, "cpu", PREFERENCES)
    sums.values += 1
    counted(sums, [1] * 3, [2, 1, *[1] * (3 + len(names))])
    sums.has_stats = True
    return {"val/total_tokens", "val/total_target_tokens", "val/router_loss", *sums.report("val", names)}


@given(_NAMES)
def test_no_two_metrics_share_a_name_unless_it_is_reserved(names):
    names = tuple(name for name in names if name not in RESERVED)
    assert len(_metrics(names)) == len(_metrics(tuple(f"category {number}" for number in range(len(names)))))


@pytest.mark.parametrize("name", RESERVED)
def test_a_reserved_name_would_be_another_metric(name):
    assert len(_metrics((name,))) < len(_metrics(("category",)))


def test_accuracy_and_entropy_are_means_over_targets_where_the_engine_gives_them():
    sums = _sums(12.0, [5.0, 6.0, 2.0], [4.0, 100, 9, 3, 1, 4, 4])
    assert not any("entropy" in name or "accuracy" in name for name in sums.report("val", NAMES))
    correct, entropy = torch.tensor([1.0, 1, 0, 1, 1]), torch.tensor([0.5, 1, 2, 3, torch.nan])
    sums.add_targets(torch.tensor([0, 1, 1, 2, -1]), torch.zeros(5), correct, entropy)
    report = (sums + StepSums.zeros(3, "cpu")).report("val", NAMES)
    assert "val/entropy" not in report  # part of the set lacks them
    report = sums.report("val", NAMES)
    assert (report["val/token_accuracy"], report["val/entropy"]) == (3 / 9, 6.5 / 9)
    assert (report["val/gsm8k_token_accuracy"], report["val/gsm8k_entropy"]) == (1 / 4, 3 / 4)
    assert (report["val/code_token_accuracy"], report["val/code_entropy"]) == (1 / 4, 3 / 4)


def test_a_documents_bin_is_that_of_its_length_and_categories_stay_what_they_are():
    """Documents of 2, 4 and 5 tokens and bins up to 2, up to 4 and above; the log-probability of token t is −t."""
    documents = [
        Document([10, 11], [0, 1], [0, 7], [1, 2]),
        Document([12, 13, 14, 15], [0, 1, 0, 1], [0, 9, 0, 0], [3, 4, 5, 6]),
        Document([16, 17, 18, 19, 20], [0, 0, 0, 1, 1], [0, 0, 0, 7, 9], [7, 8, 9, 10, 11]),
    ]
    bins, spec = LengthBins((2, 4)), LossSpec("sequence", np.array([1.0, 0.5, 2.0]))
    reports = []
    for of_lengths in (LengthBins(), bins):
        batch = StepCollator(spec, CategoryTable((7, 9), NAMES), bins=of_lengths)([pack_row(documents), None])
        sums = batch.counts.on("cpu")
        for micro_batch in batch.micro_batches(1):
            offsets = micro_batch["input_ids"].offsets()
            positions = torch.arange(1.0, int(offsets[-1]) + 1)
            log_probs = torch.nested.nested_tensor_from_jagged(-positions, offsets)
            StepLoss(1.0, 1, sums)({"log_probs": log_probs}, micro_batch)
        reports.append(sums.report("val", NAMES, of_lengths))
    whole, apart = reports
    assert {name: apart.pop(name) for name in whole} == whole
    losses = {"loss_0_2": 1.0, "loss_2_4": (3 + 5) / 2, "loss_4_inf": (9 + 10) / 2}
    counts = {"target_tokens_0_2": 1, "target_tokens_2_4": 2, "target_tokens_4_inf": 2}
    assert apart == {f"val/{name}": value for name, value in (losses | counts).items()}


def test_preferences_of_several_bins_are_those_of_one():
    bins, rng = LengthBins((8,)), np.random.default_rng(0)
    apart, whole = (StepSums.zeros(size, "cpu", PREFERENCES) for size in (6, 3))
    slots = torch.tensor([0, 1, 2, 3, 4, 5, 5])  # the last three are slots 0 to 2 of the second bin
    terms = {name: torch.from_numpy(rng.uniform(1, 2, 7)) for name in PREFERENCES.by_slot[4:]}
    nll = torch.from_numpy(rng.uniform(1, 2, 7))
    for sums, of_sums in ((apart, slots), (whole, slots % 3)):
        sums.add_targets(of_sums, nll)
        sums.add_terms(terms, of_sums)
        sums.totals.add_(2.0)
        counted(sums, [2.0] * 3, [9, 9, 7, 1, *torch.bincount(of_sums, minlength=sums.slots).tolist()])
    found, wanted = apart.report("val", NAMES, bins), whole.report("val", NAMES)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    by_bin = {"val/loss_0_8": float(nll[:3].mean()), "val/loss_8_inf": float(nll[3:].mean())}
    assert {name: found[name] for name in by_bin} == pytest.approx(by_bin)


def test_parts_add_up_in_place():
    sums = _sums(1.0, [0, 1, 0], [1, 5, 2, 1, 0, 2, 0])
    sums.totals.add_(2.0)
    sums["nll"].index_add_(0, torch.tensor([1, 2, 2]), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    counted(sums, [2], [7, 7, 3, 1, 0, 1, 2])
    report = sums.report("train", NAMES)
    assert report["train/loss"] == 1.0
    assert (report["train/gsm8k_loss"], report["train/code_loss"]) == (2 / 3, 2.5)
    assert (report["train/tokens"], report["train/packs"]) == (12, 2)


def test_counts_past_what_float32_holds_stay_exact():
    # float32 cannot represent 2^24 + 1, which a long validation set reaches within minutes.
    many = 2**24 + 1
    sums = StepSums.zeros(2, "cpu")
    for _ in range(3):
        counted(sums, [1.0], [many, many, many, 1, 0, many])
    report = sums.report("val", ("gsm8k",))
    assert report["val/tokens"] == report["val/target_tokens"] == report["val/gsm8k_tokens"] == 3 * many


def test_small_losses_are_not_lost_in_large_sums():
    sums = StepSums.zeros(2, "cpu")
    sums["nll"].add_(2.0**24)
    sums["nll"].index_add_(0, torch.ones(4, dtype=torch.long), torch.full((4,), 0.25, dtype=torch.float64))
    counted(sums, [1], [1, 1, 1, 1, 0, 1])
    assert sums.report("val", ("gsm8k",))["val/gsm8k_loss"] == 2.0**24 + 1


def _reduce_on_rank() -> tuple[dict[str, float], int]:
    calls = 0

    def all_reduce(tensor: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        dist.all_reduce(tensor)

    # gsm8k is only on rank 0, code only on rank 1.
    mine = [_sums(1.0, [0, 6.0, 0], [2.0, 10, 4, 1, 0, 4, 0]), _sums(3.0, [7.0, 0, 1.0], [3.0, 20, 3, 2, 1, 0, 2])][
        dist.get_rank()
    ]
    before = mine.values.tolist()
    report = mine.reduced(all_reduce).report("train", NAMES)
    assert mine.values.tolist() == before, "the rank's own sums stay as they were"
    return report, calls


def test_categories_that_only_one_rank_has_are_the_same_on_all_after_one_reduction():
    ranks = run_ranks(_reduce_on_rank, 2)
    for report, calls in ranks:
        assert calls == 1
        counts = {"tokens": 30, "target_tokens": 7, "packs": 3, "gsm8k_tokens": 4, "code_tokens": 2}
        expected = {"loss": 4 / 5, "gsm8k_loss": 1.5, "code_loss": 0.5, **counts}
        assert report == pytest.approx({f"train/{name}": value for name, value in expected.items()}, rel=1e-15)
