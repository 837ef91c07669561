"""The throughput tables are fair: same documents, same targets, same loss; no timing is asserted."""

import itertools
import json

import numpy as np
import pytest

from benchmarks import longalign, train_throughput
from benchmarks.document_order import dealt_out, sorted_batching
from benchmarks.lengths import long_tailed_lengths, make_documents
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

_CONTESTANTS = ("padded", "dynamic", "next_fit", "ours", "dynamic_ours", "single")
_OPTIONS = (
    *("--documents", "12", "--budget", "256", "--hidden", "128", "--layers", "1"),
    *("--repeats", "2", "--cost-pairs", "1", "--contestants", ",".join(_CONTESTANTS)),
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return one rank's tiny contest result, each contestant's documents, and the isolation experiment."""
    return run_ranks(_on_one_rank, 1, tmp_path_factory.mktemp("contest"))[0]


@pytest.fixture
def result(measured):
    """Return the contest's result, as written to JSON."""
    return measured["result"]


def _on_one_rank(folder):
    from benchmarks.contest import make_steps
    from benchmarks.contestants import Setting, build_contestants
    from benchmarks.model import VOCABULARY

    result = train_throughput.measure(train_throughput.arguments(_OPTIONS), folder)
    step = make_steps([8], 256, VOCABULARY, folder / "again", seed=1)[0]
    setting = Setting(folder / "model", step.folder, folder / "again", budget=256, steps=1)
    contestants = build_contestants(_CONTESTANTS[:4], setting, micro_batch_size=4)
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
    assert abs(losses[0, 0] - losses[0, 1]) > 1e-4  # different steps have different losses


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
    """Return a batch's documents, sorted: (tokens, positions that predict a target)."""
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
    """verl's own engine on SDPA relies on transformers to find documents by their positions."""
    calls, before, after = measured["isolation"]
    assert calls == 2  # one micro-batch each time: the documents lay side by side
    assert np.abs(before[0] - after[0])[1:-1].max() > 1e-4  # inside the changed document, later tokens see the change
    for kept in (1, 2):
        assert np.abs(before[kept] - after[kept])[:-1].max() < 1e-6


def _log_probs_around_a_change(dynamic, folder):
    """Return (model calls, log-probabilities by document before and after changing document 0's first token)."""
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

    dynamic.forwards.clear()
    before = log_probs()
    documents[0]["input_ids"][0] += 1
    after = log_probs()
    return dynamic.forwards.calls, before, after


_METHODS = (*longalign.METHODS, *longalign.ON_REQUEST)
_EPOCH = (
    *("--table", "longalign", "--documents", "16", "--steps", "2", "--budget", "256", "--hidden", "128"),
    *("--layers", "1", "--repeats", "1", "--ranks", "2", "--methods", ",".join(_METHODS)),
)


@pytest.fixture(scope="module")
def epochs(tmp_path_factory):
    """Return each rank's result of LongAlign's table, with 32 documents on two ranks."""
    folder = tmp_path_factory.mktemp("longalign")
    options = train_throughput.arguments(_EPOCH)
    longalign.write_inputs(options, folder)
    return run_ranks(_measured, 2, options, folder)


def _measured(options, folder):
    from benchmarks.epochs import measure

    return measure(options, folder)


@pytest.fixture
def rows(epochs):
    """Return the table's rows by method."""
    return epochs[0]["methods"]


def test_all_methods_train_on_the_same_documents_and_targets(rows):
    assert set(rows) == set(_METHODS)
    assert {row["documents"] for row in rows.values()} == {32}
    assert len({row["targets"] for row in rows.values()}) == 1
    nll = np.array([row["nll"] for row in rows.values()])
    assert np.ptp(nll) < 1e-4 * nll.mean()


def test_both_ranks_ran_equally_many_forwards(rows):
    forwards = {name: row["forwards"] for name, row in rows.items()}
    assert all(one == other for one, other in forwards.values())
    assert forwards["naive"] == forwards["sorted"] == [32 // 4 // 2] * 2
    assert forwards["naive_1"] == forwards["sorted_1"] == forwards["single"] == [32 // 2] * 2
    assert forwards["packing"] == forwards["balanced"] < forwards["naive"]


def test_only_padded_methods_run_more_tokens_than_the_documents_have(epochs, rows):
    for name, row in rows.items():
        idle_slots = sum(row["forwards"]) if row["engine"] == "ours" else 0
        assert (row["tokens"] > epochs[0]["tokens"] + idle_slots) == (name in ("naive", "sorted")), name
    assert rows["sorted"]["tokens"] < rows["naive"]["tokens"]


def test_like_lengths_and_like_costs_share_a_micro_step(rows):
    assert rows["sorted_1"]["cost_over_ideal"] < rows["naive_1"]["cost_over_ideal"]
    assert rows["balanced"]["cost_over_ideal"] <= rows["packing"]["cost_over_ideal"]
    assert all(row["cost_over_ideal"] >= 1 for row in rows.values())


def test_the_table_names_every_method_and_longaligns_own_figures(epochs):
    table = longalign.report({"ranks": {"2": json.loads(json.dumps(epochs[0]))}})
    assert all(f"\n{name} " in table for name in (*_METHODS, *longalign.PUBLISHED))


def test_sorted_batching_keeps_documents_of_like_length_in_shuffled_groups():
    lengths = np.random.default_rng(0).integers(1, 10**6, 96)
    order = sorted_batching(lengths, 8, seed=0)
    assert sorted(order) == list(range(96))
    groups = lengths[order].reshape(12, 8)
    by_length = groups[np.argsort(groups[:, 0])]
    assert (np.diff(by_length.ravel()) >= 0).all()
    assert (np.diff(groups[:, 0]) < 0).any()
    shares = dealt_out(order, steps=3, micro_batch_size=4, ranks=2)
    assert shares.shape == (2, 3, 16)
    micro_steps = shares.reshape(2, 12, 4).swapaxes(0, 1).reshape(12, 8)  # the ranks run one group at a time
    assert (micro_steps == order.reshape(12, 8)).all()


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
    with pytest.raises(SystemExit):
        train_throughput.arguments(["--table", "longalign", "--documents", "12"])
    assert "--documents must be a multiple of --micro-batch-size × 2 ranks; got 12" in capsys.readouterr().err


def test_refuses_methods_that_do_not_exist(capsys):
    with pytest.raises(SystemExit):
        train_throughput.arguments(["--table", "longalign", "--methods", "naive,sort"])
    assert "--methods must be of naive, sorted" in capsys.readouterr().err
