"""The numbers of a step: exact sums, one reduction, every category's slot on every rank."""

import math

import pytest
import torch

from tests.ranks import run_ranks
from verl_ext.metrics import StepSums

NAMES = ("gsm8k", "code")


def _sums(weighted_loss: float, category_loss: list[float], counts: list[float]) -> StepSums:
    """``counts``: normaliser, tokens, target tokens, packs, then tokens of no category and of each category."""
    sums = StepSums.zeros(len(NAMES), "cpu")
    sums.weighted_loss.add_(weighted_loss)
    sums.category_loss.add_(torch.tensor(category_loss, dtype=torch.float64))
    sums.add_counts(torch.tensor(counts, dtype=torch.float64))
    return sums


def test_a_report_has_the_loss_the_counts_and_each_categorys_mean():
    #                       weighted   none gsm8k code   Z    tokens targets packs none gsm8k code
    report = _sums(12.0, [5.0, 6.0, 2.0], [4.0, 100, 9, 3, 1, 4, 4]).report("train", NAMES)
    assert report == {
        "train/loss": 3.0,
        "train/tokens": 100,
        "train/target_tokens": 9,
        "train/packs": 3,
        "train/gsm8k_loss": 1.5,
        "train/gsm8k_tokens": 4,
        "train/code_loss": 0.5,
        "train/code_tokens": 4,
    }
    assert all(isinstance(report[f"train/{key}"], int) for key in ("tokens", "target_tokens", "packs", "code_tokens"))


def test_a_category_without_a_token_has_a_count_and_no_loss():
    report = _sums(1.0, [0, 6.0, 0], [1.0, 10, 4, 1, 0, 4, 0]).report("val", NAMES)
    assert report["val/code_tokens"] == 0
    assert "val/code_loss" not in report


def test_nothing_seen_has_no_loss():
    assert math.isnan(StepSums.zeros(2, "cpu").report("val", NAMES)["val/loss"])


def test_parts_add_up_in_place():
    sums = _sums(1.0, [0, 1, 0], [1, 5, 2, 1, 0, 2, 0])
    sums.weighted_loss.add_(2.0)
    sums.category_loss.index_add_(0, torch.tensor([1, 2, 2]), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    sums.add_counts(torch.tensor([2, 7, 3, 1, 0, 1, 2], dtype=torch.float64))
    report = sums.report("train", NAMES)
    assert report["train/loss"] == 1.0
    assert (report["train/gsm8k_loss"], report["train/code_loss"]) == (2 / 3, 2.5)
    assert (report["train/tokens"], report["train/packs"]) == (12, 2)


def test_counts_past_what_float32_holds_stay_exact():
    # float32 has no 2^24 + 1; a long validation set gets there within minutes.
    many = 2**24 + 1
    sums = StepSums.zeros(1, "cpu")
    for _ in range(3):
        sums.add_counts(torch.tensor([1.0, many, many, 1, 0, many], dtype=torch.float64))
    report = sums.report("val", ("gsm8k",))
    assert report["val/tokens"] == report["val/target_tokens"] == report["val/gsm8k_tokens"] == 3 * many


def test_small_losses_are_not_lost_in_large_sums():
    sums = StepSums.zeros(1, "cpu")
    sums.category_loss.add_(2.0**24)
    sums.category_loss.index_add_(0, torch.ones(4, dtype=torch.long), torch.full((4,), 0.25, dtype=torch.float64))
    sums.add_counts(torch.tensor([1, 1, 1, 1, 0, 1], dtype=torch.float64))
    assert sums.report("val", ("gsm8k",))["val/gsm8k_loss"] == 2.0**24 + 1


def _reduce_on_rank() -> tuple[dict[str, float], int]:
    import torch.distributed as dist

    calls = 0

    def all_reduce(tensor: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        dist.all_reduce(tensor)

    # gsm8k is on rank 0 alone, code on rank 1 alone.
    mine = [
        _sums(1.0, [0, 6.0, 0], [2.0, 10, 4, 1, 0, 4, 0]),
        _sums(3.0, [7.0, 0, 1.0], [3.0, 20, 3, 2, 1, 0, 2]),
    ][dist.get_rank()]
    before = mine.values.tolist()
    report = mine.reduced(all_reduce).report("train", NAMES)
    assert mine.values.tolist() == before, "the rank's own sums stay as they were"
    return report, calls


def test_categories_that_only_one_rank_has_are_the_same_on_all_after_one_reduction():
    ranks = run_ranks(_reduce_on_rank, 2)
    for report, calls in ranks:
        assert calls == 1
        assert report == pytest.approx(
            {
                "train/loss": 4 / 5,
                "train/tokens": 30,
                "train/target_tokens": 7,
                "train/packs": 3,
                "train/gsm8k_loss": 1.5,
                "train/gsm8k_tokens": 4,
                "train/code_loss": 0.5,
                "train/code_tokens": 2,
            },
            rel=1e-15,
        )
