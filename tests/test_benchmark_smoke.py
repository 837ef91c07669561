"""The throughput contest is fair: same documents, same targets, same loss; no timing is asserted."""

import itertools
import json

import numpy as np
import pytest

from benchmarks import train_throughput
from benchmarks.lengths import long_tailed_lengths, make_documents
from tests.ranks import run_ranks

_CONTESTANTS = ("padded", "dynamic", "next_fit", "ours", "dynamic_ours", "single")
_OPTIONS = (
    *("--documents", "12", "--budget", "256", "--hidden", "128", "--layers", "1"),
    *("--repeats", "2", "--cost-pairs", "1", "--contestants", ",".join(_CONTESTANTS)),
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What one rank gave: a tiny contest's result, each contestant's documents, and the isolation experiment."""
    return run_ranks(_on_one_rank, 1, tmp_path_factory.mktemp("contest"))[0]


@pytest.fixture
def result(measured):
    """The contest's result, as written to JSON."""
    return measured["result"]


def _on_one_rank(folder):
    from benchmarks.contest import make_steps
    from benchmarks.contestants import build_contestants
    from benchmarks.model import VOCABULARY

    result = train_throughput.measure(train_throughput.arguments(_OPTIONS), folder)
    step = make_steps([8], 256, VOCABULARY, folder / "again", seed=1)[0]
    contestants = build_contestants(_CONTESTANTS[:4], step, folder / "model", folder / "again", 256, 4, 1)
    return {
        "result": result,
        "loaded": {name: _documents_of(contestant.load(step)) for name, contestant in contestants.items()},
        "documents": sorted(
            (d["input_ids"].tolist(), d["loss_mask"][1:].nonzero()[0].tolist()) for d in step.documents
        ),
        "isolation": _log_probs_around_a_change(contestants["dynamic"], folder),
    }


def test_all_contestants_report_the_same_loss_at_every_step(result):
    losses = np.array([result["contestants"][name]["steps"]["losses"] for name in _CONTESTANTS])
    assert losses.shape == (len(_CONTESTANTS), 2)
    assert np.ptp(losses, axis=0).max() < 1e-4
    assert abs(losses[0, 0] - losses[0, 1]) > 1e-4  # another step, another loss


def test_unpadded_contestants_run_exactly_the_tokens_of_the_documents(result):
    for name in ("dynamic", "ours", "dynamic_ours", "single"):
        assert result["contestants"][name]["steps"]["tokens"] == result["tokens_per_step"]


def test_padded_contestants_run_what_their_batches_pad_to(result):
    padded, next_fit = (result["contestants"][name]["steps"] for name in ("padded", "next_fit"))
    assert padded["micro_batches"] == [3, 3]
    assert next_fit["tokens"] == [256 * packs for packs in next_fit["micro_batches"]]
    for steps in (padded, next_fit):
        assert all(ran > real for ran, real in zip(steps["tokens"], result["tokens_per_step"], strict=True))


def test_no_micro_batch_of_a_token_budget_is_larger_than_the_budget(result):
    for name in ("dynamic", "next_fit", "ours"):
        row = result["contestants"][name]
        assert 0 < row["fill"] <= 1
        for tokens, calls in zip(row["steps"]["tokens"], row["steps"]["micro_batches"], strict=True):
            assert tokens <= calls * 256


@pytest.mark.parametrize("name", _CONTESTANTS[:4])
def test_every_document_and_target_reaches_the_contestant(name, measured):
    assert measured["loaded"][name] == measured["documents"]


def _documents_of(batch):
    """The documents of a batch, sorted: (tokens, positions that predict a target)."""
    if isinstance(batch, dict):
        rows = zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True)
        return sorted((ids.tolist(), mask[1:].nonzero().flatten().tolist()) for ids, mask in rows)
    edges = [*(batch.position_ids == 0).nonzero().flatten().tolist(), len(batch.position_ids)]
    documents = []
    for start, end in itertools.pairwise(edges):
        predicting = batch.coefficients[start:end].nonzero().flatten().tolist()
        if predicting:  # the rest is padding
            documents.append((batch.input_ids[start:end].tolist(), predicting))
    return sorted(documents)


def test_stock_dynamic_batches_keep_documents_apart(measured):
    """verl's own engine on SDPA relies on transformers to find documents by their positions; it does."""
    calls, before, after = measured["isolation"]
    assert calls == 2  # each time one micro-batch: the documents lay side by side
    assert np.abs(before[0] - after[0])[1:-1].max() > 1e-4  # inside the changed document, later tokens see the change
    for kept in (1, 2):
        assert np.abs(before[kept] - after[kept])[:-1].max() < 1e-6


def _log_probs_around_a_change(dynamic, folder):
    """(model calls, log-probabilities by document before and after a change of document 0's first token)."""
    from verl.utils import tensordict_utils as tu

    from benchmarks.contestants import Step

    rng = np.random.default_rng(0)
    documents = [{"input_ids": rng.integers(1, 100, n), "loss_mask": np.arange(n).clip(0, 1)} for n in (30, 40, 50)]

    def log_probs():
        batch = dynamic.load(Step(documents, folder))
        data = tu.get_tensordict(tensor_dict=batch, non_tensor_dict=dict(dynamic.meta))
        with dynamic.engine.eval_mode():
            output = dynamic.engine.infer_batch(data, loss_function=dynamic.loss)
        return [values.numpy() for values in output["model_output"]["log_probs"].unbind()]

    dynamic.forwards.calls = 0
    before = log_probs()
    documents[0]["input_ids"][0] += 1
    after = log_probs()
    return dynamic.forwards.calls, before, after


def test_lengths_are_long_tailed_and_within_the_budget():
    lengths, long = long_tailed_lengths(1000, 4096, np.random.default_rng(0))
    assert long.sum() == 100
    assert lengths.min() >= 4
    assert lengths.max() <= 4096
    assert lengths[long].min() >= 512
    assert 55 < np.median(lengths[~long]) < 75


def test_documents_never_begin_with_a_target():
    documents = make_documents(20, 256, 64, np.random.default_rng(0))
    assert all(document["loss_mask"][0] == 0 and document["loss_mask"][-1] == 1 for document in documents)


def test_the_result_is_json_and_the_table_names_every_contestant(result):
    json.dumps(result, default=float)
    table = train_throughput.report(result)
    assert all(name in table for name in _CONTESTANTS)
    assert "category loss" in table


def test_refuses_documents_that_do_not_fill_the_padded_micro_batches(capsys):
    with pytest.raises(SystemExit):
        train_throughput.arguments(["--documents", "10"])
    assert "--documents must be a multiple of --micro-batch-size; got 10" in capsys.readouterr().err
