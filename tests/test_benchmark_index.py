"""The index benchmark at a small size: the contestants agree byte for byte; no timing is asserted."""

import json
import sys

import numpy as np
import pytest

from benchmarks import index, index_samples

pytestmark = pytest.mark.slow

_SIZES = (
    *("--megabytes", "0.5", "--repeats", "1", "--workers", "1", "--tokens", "50000", "--seq-len", "32"),
    *("--mean-tokens", "20", "--read-tokens", "20000", "--reads", "10"),
    *("--blend-samples", "200", "--blend-sources", "4"),
)


class _Here:
    """A pool that works in this process."""

    def __init__(self, *_):
        self.Pool = lambda _: self

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def apply(self, function, arguments):
        return function(*arguments)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Return a tiny run's measurements in this process, with megatron-core if it is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_samples.multiprocessing, "get_context", _Here)
        return index.measure(index.arguments(_SIZES), tmp_path_factory.mktemp("index"))


def test_every_contestant_is_set_against_the_tokenizer_and_megatron_core_is_said_to_be_absent(result):
    peer = index_samples.peer_problem() is None
    names = ["tokenizer", "in process", "command", *(["megatron-core"] if peer else [])]
    assert list(result["build"]["contestants"]) == names
    assert result["build"]["contestants"]["tokenizer"]["ratios"] == [1.0]
    assert all(row["tokens_per_second"] > 0 for row in result["build"]["contestants"].values())
    assert len(result["skipped"]) == (not peer)
    (samples,) = result["sample_index"]
    assert samples["verl_ext"]["samples"] == (50_000 - 1) // 32
    assert ("megatron-core" in samples) == peer
    assert ("ratios" in result["blend"][0]) == peer
    assert len(result["reads"][0]["readers"]) == (3 if peer else 1)


def test_the_result_is_json_and_the_report_has_all_tables(result):
    json.dumps(result, default=float)
    report = index.report(result)
    for title in (
        "build: ",
        "sample index: 50,000 tokens",
        "blend: 200 samples of 4 sources",
        "random sample, warm map",
    ):
        assert f"\n{title}" in report


def test_a_run_without_megatron_core_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.gpt_dataset", None)
    monkeypatch.setitem(sys.modules, "megatron.core.datasets", None)
    assert index_samples.peer_problem().startswith("megatron-core: skipped, ")


@pytest.mark.parametrize("mean", [1, 7, 300])
def test_drawn_lengths_sum_to_the_tokens_asked_for(mean):
    lengths = index_samples.document_lengths(10_000, mean)
    assert lengths.sum(dtype=np.int64) == 10_000
    assert lengths.min() >= 1
    assert lengths.dtype == np.int32


def test_builders_that_disagree_are_an_error(monkeypatch):
    digests = iter("ab")
    monkeypatch.setattr(index_samples, "sample_index_run", lambda *_: {"digest": next(digests)})
    monkeypatch.setattr(index_samples.multiprocessing, "get_context", _Here)
    with pytest.raises(RuntimeError, match="different indices"):
        index_samples.measure_sample_index(index.arguments(_SIZES), 20, with_peer=True)


def test_refuses_a_size_of_nothing(capsys):
    with pytest.raises(SystemExit):
        index.arguments(["--reads", "0"])
    assert "--reads must be above 0; got 0" in capsys.readouterr().err
