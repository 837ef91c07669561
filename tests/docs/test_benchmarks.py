"""What can be wrong silently in a benchmark: the contestants do the work that is timed. No timing is asserted."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import activations, gpu, index, leaks, loading, packing, scaling, titans, training
from benchmarks.documents import DISTRIBUTIONS, make_documents, write_documents, write_many_documents
from benchmarks.gpu import cells
from benchmarks.harness import equal
from benchmarks.models import write_model, write_qwen3
from benchmarks.texts import Kind
from tests.lib.errors import refused
from tests.lib.ranks import run_cases
from verl_ext.packing import cost_over_ideal

pytestmark = pytest.mark.slow
SIZES = {"hidden": 128, "layers": 1}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what rank 0 of each group of ranks measured."""
    folder = tmp_path_factory.mktemp("measured")
    contest = training.Options(documents=12, budget=256, repeats=2, **SIZES)
    epochs = training.Options(epoch_documents=32, epoch_budget=256, steps=2, epochs=1, ranks=[2], **SIZES)
    cases = {
        "longalign": (2, _measure_epochs, epochs, folder / "longalign"),
        "read": (1, _read, folder / "corpus"),
        "contest": (1, _compete, contest, folder / "contest"),
        "flops": (1, _on_tiny_models, folder / "tiny"),
    }
    return {name: first for name, (first, *_) in run_cases(cases).items()}


# --- packing


@pytest.mark.parametrize(("packs", "fault"), [([[0], [0, 1]], "repeated"), ([[0]], "lost"), ([[0, 1]], "budget")])
def test_a_packer_that_cheats_is_an_error(packs, fault):
    with refused(fault, error=RuntimeError):
        packing.checked("peer", packs, np.array([6, 5]), 10)


@pytest.mark.parametrize(
    ("ranks", "found"), [(8, [1.403, 1.0006, 1.0013]), (32, [1.503, 1.0022, 1.0049]), (128, [1.533, 1.0090, 1.0111])]
)
def test_groups_share_steps_as_the_readme_says(ranks, found):
    lengths = DISTRIBUTIONS["A"].draw(100_000, np.random.default_rng(0))
    row = packing.shared(packing.COST.packs(packing.plan_packs(lengths, 65_536), lengths), ranks)
    assert [row[name] for name in ("random", "sorted", "with_tail")] == pytest.approx(found, abs=6e-4)


# --- loading


def test_every_reader_gives_the_same_tokens_and_targets(found):
    documents, tokens = found["read"]
    for of_reader in documents.values():
        assert of_reader == documents["templating"]
        assert sum(len(ids) for ids, _ in of_reader) == tokens
        assert all(0 < len(targets) < len(ids) for ids, targets in of_reader)


def _read(folder):
    readers, tokens = loading.build_readers(Kind("short", ((3, 9),) * 4, 256), 24, folder)
    found = {name: [_documents(read(item)) for item in items] for name, (items, read) in readers.items()}
    return {name: sorted(itertools.chain(*documents)) for name, documents in found.items()}, tokens


def _documents(batch):
    """Return the documents of what a loader makes, sorted: (tokens, positions that predict a target)."""
    if isinstance(batch, dict) and batch["input_ids"].is_nested:  # verl's collator
        rows = zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True)
        return sorted((ids.tolist(), mask[1:].nonzero().flatten().tolist()) for ids, mask in rows)
    if isinstance(batch, dict):  # a pack or a row, with a batch's dimension if the original made it
        ids, positions, predicts = (batch[name].flatten() for name in ("input_ids", "position_ids", "loss_mask"))
        predicts = predicts.roll(-1)
    else:
        ids, positions = batch.input_ids, batch.position_ids
        predicts = torch.zeros_like(ids).index_fill(0, batch.targets["row"], 1)
    edges = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
    found = [(ids[a:b].tolist(), predicts[a:b].nonzero().flatten().tolist()) for a, b in itertools.pairwise(edges)]
    return sorted((tokens, targets) for tokens, targets in found if targets)  # the rest is padding


def test_many_documents_are_an_ordinary_tokenized_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.documents._BATCH", 7)
    write_many_documents(tmp_path, documents=40, mean_tokens=12, vocabulary=100, seed=0)
    rows = load_from_disk(str(tmp_path))
    assert len(rows) == 40
    for row in rows:
        mask = np.asarray(row["loss_mask"])
        assert len(row["input_ids"]) == len(row["category_ids"]) == len(mask) == row["length"]
        assert mask.tolist() == sorted(mask)  # its last tokens
        assert mask.sum() == max(row["length"] // 4, 1)
        assert ((np.asarray(row["category_ids"]) > 0) == mask).all()


# --- training


def test_contestants_get_the_same_documents_and_run_what_their_names_say(found):
    rows, loaded = found["contest"]
    assert all(documents == loaded["ours"] for documents in loaded.values())
    rows = {row["name"]: row for row in rows}
    assert len({tuple(row["tokens"]) for row in rows.values()}) == 1  # their losses are compared by the benchmark
    tokens, losses = rows["ours"]["tokens"], rows["ours"]["loss"]
    assert abs(losses[0] - losses[1]) > 1e-4
    assert rows["dynamic"]["ran"] == rows["ours"]["ran"] == tokens
    assert rows["padded"]["forwards"] == [3, 3]
    assert (np.array(rows["padded"]["ran"]) > tokens).all()
    assert all((tokens <= 256 * np.array(rows[name]["forwards"])).all() for name in ("dynamic", "ours"))


def _compete(options, folder):
    write_qwen3(folder / "model", options.hidden, options.layers, options.budget)
    ways, measured_rows = {}, training.measured_rows
    training.measured_rows = lambda given, *rest: ways.update(given) or measured_rows(given, *rest)
    rows = training.compete(options, folder)["rows"]
    return rows, {name: _documents(turns[-1][0]) for name, (_, turns) in ways.items()}


def _measure_epochs(options, folder):
    if dist.get_rank() == 0:
        write_qwen3(folder / "model", 128, 1, 256)
        write_documents(training.documents_of(options), folder / "documents")
    dist.barrier()
    return training.measure_epochs(options, folder)["rows"]


def test_longaligns_methods_train_on_the_same_targets_and_wait_as_their_names_say(found):
    rows = {row["name"]: row for row in training.ratios(found["longalign"], "naive")}
    forwards = {name: row["forwards"][0] for name, row in rows.items()}
    uneven = {name: row["cost_over_ideal"][0] for name, row in rows.items()}
    assert {tuple(row["documents"]) for row in rows.values()} == {(32,)}
    assert (forwards["naive"], forwards["sorted"], forwards["naive_1"], forwards["sorted_1"]) == (4, 4, 16, 16)
    assert forwards["packing"] == forwards["balanced"] < 4
    assert rows["sorted"]["padding"] < rows["naive"]["padding"]
    assert rows["naive_1"]["padding"] == rows["dynamic"]["padding"] == 0
    assert 1 <= uneven["sorted_1"] < uneven["naive_1"]
    assert uneven["balanced"] <= uneven["packing"]


def test_sorted_batching_keeps_documents_of_like_length_in_shuffled_groups():
    lengths = np.random.default_rng(0).integers(1, 10**6, 96)
    order = training.sorted_batching(lengths, 8, seed=0)
    groups = lengths[order].reshape(12, 8)
    assert (np.diff(groups[np.argsort(groups[:, 0])].ravel()) >= 0).all()
    assert (np.diff(groups[:, 0]) < 0).any()
    shares = training.dealt_out(order, steps=3, micro_batch_size=4, ranks=2)
    assert (shares.reshape(2, 12, 4).swapaxes(0, 1).reshape(12, 8) == order.reshape(12, 8)).all()


# --- memory of heads and activations, leaks, memories


def test_activation_cases_compute_the_same():
    sizes = activations.Options(hidden=16, intermediate=48, layers=2, tile=5)
    equal([activations.measure(case, 24, sizes) for case in activations.CASES], ("loss", "gradient"), 1e-5)


def test_plain_transformers_mixes_the_documents_of_a_convolution_and_not_those_of_attention():
    convolution, attention = leaks.errors("lfm2"), leaks.errors("qwen3")
    assert convolution["transformers"] > 0.1
    assert max(attention["transformers"], attention["ours"], convolution["ours"]) < 1e-5


def test_both_models_are_the_same_qwen_but_for_the_memory_and_read_the_whole_text():
    options, names = titans.Options(lengths=[256], hidden=32, layers=2, chunk=64), {}
    for kind, chunks in (("full", [256]), ("memory", [64] * 4)):
        model, read = titans.work_of(kind, "read", 256, options)
        seen = []
        model.get_input_embeddings().register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0].shape[-1]))
        assert read().shape == (1, 1, titans.VOCABULARY)
        assert seen == chunks
        model, step = titans.work_of(kind, "train", 128, options)
        names[kind], reached = {name for name, _ in model.named_parameters()}, set()
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, reached=reached: reached.add(name))
        step()
        assert reached == names[kind]
    assert names["full"] < names["memory"]
    assert all("memory." in name for name in names["memory"] - names["full"])


# --- scaling

COSTS = np.random.default_rng(0).uniform(1, 5, 8 * 4 * 3)
PERFECT = {"flops": 1.0, "node_link": 1e30, "network": 1e30, "latency": 0.0, "jitter": 0.0, "memory": 1e30}
PERFECT |= {"storage": 1e30, "node_storage": 1e30}


def parts(ranks=8, layers=4, costs=COSTS, **changes):
    return scaling.step_time(costs, scaling.Options(**{**PERFECT, **changes}), ranks, 1e3, layers)


def test_each_part_of_a_simulated_step_follows_its_assumption():
    perfect = parts()
    assert sum(perfect.values()) == pytest.approx(perfect["ideal"] + perfect["balance"])
    assert perfect["ideal"] == pytest.approx(COSTS.mean() * 4)  # four packs
    assert (perfect["ideal"] + perfect["balance"]) / perfect["ideal"] == pytest.approx(cost_over_ideal(COSTS, 8))
    for found in (parts(jitter=0.1), parts(slow=1.5)):
        assert found["jitter"] > 0
        assert {**found, "jitter": 0} == pytest.approx({**perfect, "jitter": 0})
    travels = (2 * 2 * 4 + 4) * 1e3 * 7 / 8 / 1e9  # two gathers in each of four micro-steps, one reduction
    assert parts(node_link=1e9)["communication"] == pytest.approx(travels / 4)  # the first of four layers'
    assert parts(node_link=1e9, layers=1)["communication"] == pytest.approx(travels)
    many = {"costs": np.ones(128), "layers": 1, "node_link": 1e9, "network": 1e8}
    ratio = parts(16, **many)["communication"] / parts(8, **many)["communication"]
    assert ratio == pytest.approx(10 * (15 / 16) / (7 / 8))
    assert parts(16, costs=np.ones(128), node_storage=1e3)["checkpoint"] == pytest.approx(12 * 1e3 / 2e3 / 200)
    with refused("64 ranks", "256 packs", 96):
        parts(64)


# --- index


def test_builders_that_disagree_are_an_error(tmp_path):
    for name, content in ((index.OURS, "a"), (index.PEER, "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "texts.bin").write_text(content)
    with refused("texts.bin", error=RuntimeError):
        index.same_files(tmp_path)


# --- gpu


def test_flops_are_those_that_torch_counts_and_a_head_of_targets_computes_fewer(found):
    built = found["flops"]
    for name, of_one in built.items():
        assert of_one["counted"] == pytest.approx(of_one["expected"], rel=0.02), name
        assert of_one["quadratic"] is any(len(mask) == 4 and mask[-1] == mask[-2] for mask in of_one["masks"]), name
    facts = {name: [built[name][key] for key in ("targets_only", "kernel", "head")] for name in ("ours", "verl")}
    assert facts["ours"] == [True, "sdpa", "fused"]
    assert facts["verl"] == [False, "sdpa, T × T mask", "plain, log-softmax by rows"]
    assert built["ours"]["counted"] < 0.8 * built["verl"]["counted"]


def _on_tiny_models(folder):
    from benchmarks.contestants import Setting

    addmm = {torch.ops.aten.addmm_: lambda total, left, right, **_: 2 * left[0] * left[1] * right[1]}  # like its addmm
    found, documents = {}, make_documents(10, 512, 1024, np.random.default_rng(0))
    write_model(folder / "model", cells.config_of_shape("tiny"), 16, torch.bfloat16)
    write_documents(documents, folder / "data")
    setting = Setting(folder / "model", folder / "data", folder / "runs", 512, 3)  # without recomputation
    for name, built in (("ours", setting.packed("ours")), ("verl", setting.stock("verl", None))):
        ran, masks = built.implementations(packed=True), []
        for path, part in built.engine.module.named_modules():
            if path.endswith("self_attn"):
                part.register_forward_pre_hook(
                    lambda _, args, kwargs, masks=masks: masks.append(kwargs.get("attention_mask")), with_kwargs=True
                )
        batch = built.load(documents, folder / "data")
        with FlopCounterMode(display=False, custom_mapping=addmm) as counter:
            built.train(batch)
        _, tokens, targets = built.counts(batch)
        # Matrices only, as the counter does not know sdpa on a CPU. Documents of one token have no attention to count.
        counts = counter.get_flop_counts()["Global"].items()
        found[name] = {
            **ran,
            "masks": [tuple(mask.shape) for mask in masks if mask is not None],
            "counted": sum(count for operation, count in counts if "mm" in str(operation).split(".")[-1]),
            "expected": cells.flops("tiny", [1] * tokens, targets if ran["targets_only"] else tokens),
        }
    return found


@pytest.mark.parametrize(("quadratic", "ratios"), [(False, [3.0, 1.0]), (True, [None, None])])
def test_no_ratio_is_taken_to_a_quadratic_mask(quadratic, ratios):
    rows = [{"name": "ours", "quadratic": False, "tokens_per_second": 3.0}]
    rows += [{"name": "verl", "quadratic": quadratic, "tokens_per_second": 1.0}]
    assert [row.get("ratio") for row in gpu.with_ratios(rows)] == ratios
