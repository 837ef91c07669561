"""The table of benchmarks/gpu: its FLOPs match torch's counter, and incomparable rows are marked."""

import json
import subprocess

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.gpu import run, setting
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

PACK = 512
COUNTED = {torch.ops.aten.addmm_: lambda total, left, right, **_: 2 * left[0] * left[1] * right[1]}  # like its addmm
OURS = {"kernel": "varlen (FA2)", "head": "fused", "optimizer": "AdamW fused", "quadratic": False}
FIGURES = {"mfu": 0.5, "computed_mfu": 0.4, "reserved": 20e9, "allocated": 10e9}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return one rank's findings: each contestant's implementations and operations, and those of the formula."""
    return run_ranks(_on_one_rank, 1, tmp_path_factory.mktemp("gpu"))[0]


def _on_one_rank(folder):
    from benchmarks.contestants import Setting, Step
    from benchmarks.gpu import cell
    from benchmarks.lengths import write_dataset
    from verl_ext.plugin import register_engine

    register_engine()
    cell.prepare({"shape": "tiny", "folder": str(folder)})
    documents = setting.steps_of_documents("tiny", PACK, 1024, 0)[0]
    write_dataset(documents, folder / "data")
    common = Setting(folder / "tiny", folder / "data", folder / "runs", PACK, 3)
    built = {
        "ours": common.packed("ours", "best_fit"),
        "plain": common.packed("plain", "best_fit", "loss.head=plain"),
        "verl": common.stock("verl", None),
    }
    tokens = sum(len(document["input_ids"]) for document in documents)
    targets = sum(int(document["loss_mask"][1:].sum()) for document in documents)
    found = {}
    for name, contestant in built.items():
        said = cell.implementations(contestant, packed=True)
        engine = contestant.engine if name == "verl" else contestant.trainer.engine
        masks = _masks_seen(engine.module)
        batch = contestant.load(Step(documents, folder / "data"))
        with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
            contestant.train(batch)
        by_operation = counter.get_flop_counts()["Global"]
        # Matrices only, as the counter does not know sdpa on a CPU. Documents of one token have no attention to count.
        products = sum(count for operation, count in by_operation.items() if "mm" in str(operation).split(".")[-1])
        found[name] = {
            **said,
            "observed": setting.optimizer_of(engine.optimizer),
            "masks": [mask for mask in masks if mask is not None],
            "counted": products,
            "expected": setting.flops("tiny", [1] * tokens, targets if said["targets_only"] else tokens),
        }
    document = documents[0]
    masks = _masks_seen(built["verl"].engine.module)
    built["verl"].train(built["verl"].collate([document]))
    found["single"] = {
        **cell.implementations(built["verl"], packed=False),
        "masks": [m for m in masks if m is not None],
    }
    return found


def _masks_seen(module):
    """Return a list to which every layer's attention adds the shape of its mask, or None."""
    seen = []

    def keep(_, args, kwargs):
        mask = kwargs.get("attention_mask")
        seen.append(None if mask is None else tuple(mask.shape))

    for name, part in module.named_modules():
        if name.endswith("self_attn"):
            part.register_forward_pre_hook(keep, with_kwargs=True)
    return seen


def test_model_flops_are_those_that_torch_counts_of_a_plain_model(tmp_path):
    from benchmarks.gpu import cell

    cell.prepare({"shape": "tiny", "folder": str(tmp_path)})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32, attn_implementation="eager")
    lengths = [96, 384]
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            model(torch.arange(length)[None] % 7).logits.sum().backward()
    by_operation = counter.get_flop_counts()["Global"]
    squares = by_operation[torch.ops.aten.bmm]  # eager attention computes the whole square, a causal kernel half of it
    counted = by_operation[torch.ops.aten.mm] + squares / 2
    assert setting.flops("tiny", lengths, sum(lengths)) == pytest.approx(counted, rel=0.02)
    assert squares / 2 > 0.1 * counted


@pytest.mark.parametrize("contestant", ["ours", "plain", "verl"])
def test_computed_flops_are_those_of_the_head_that_a_contestant_names(measured, contestant):
    found = measured[contestant]
    assert found["counted"] == pytest.approx(found["expected"], rel=0.02)


def test_a_head_of_targets_computes_fewer_operations_than_the_model_has(measured):
    assert measured["ours"]["targets_only"]
    assert not measured["plain"]["targets_only"]
    assert not measured["verl"]["targets_only"]
    assert measured["ours"]["counted"] < 0.8 * measured["verl"]["counted"]


def test_every_contestant_names_its_kernel_head_and_optimizer(measured):
    kinds = {name: [found[kind] for kind in run.IMPLEMENTATIONS] for name, found in measured.items()}
    assert kinds["ours"] == ["sdpa", "fused", "AdamW loop"]
    assert kinds["plain"] == ["sdpa", "plain", "AdamW loop"]
    assert kinds["verl"] == ["sdpa, T × T mask", "plain, log-softmax by rows", "AdamW loop"]
    assert all(measured[name]["optimizer"] == measured[name]["observed"] for name in ("ours", "plain", "verl"))


def test_a_mask_is_called_quadratic_where_transformers_makes_one(measured):
    for name in ("ours", "verl", "single"):
        found = measured[name]
        assert found["quadratic"] is any(len(shape) == 4 and shape[-1] == shape[-2] for shape in found["masks"]), name


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_an_optimizer_is_named_by_its_options(options):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], **options)
    assert setting.optimizer_of(optimizer) == f"AdamW {next((key for key, on in options.items() if on), 'loop')}"


def _rows(verl):
    shared = {"shape": "0.6B", "pack": 8192, **FIGURES}
    return [
        {**shared, **OURS, "contestant": "ours", "tokens_per_second": 300.0},
        {**shared, **OURS, "contestant": "verl", "tokens_per_second": 100.0, **verl},
    ]


def _cells(text):
    """Return the rows of the first table as dicts keyed by heading."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line, strict=False)) for line in lines[2:]]


def test_a_row_has_its_implementations_both_mfus_and_both_peaks():
    text = run.report({"throughput": _rows({"kernel": "flash_attention_2"})})
    ours, verl = _cells(text)
    assert (ours["kernel"], ours["head"], ours["optimizer"]) == ("varlen (FA2)", "fused", "AdamW fused")
    assert (ours["model MFU"], ours["computed MFU"]) == ("0.50", "0.40")
    assert (ours["GB reserved"], ours["GB allocated"]) == ("20.0", "10.0")
    assert (ours["× verl"], verl["× verl"], verl["kernel"]) == ("3.00", "1.00", "flash_attention_2")
    assert run.MARK not in text


@pytest.mark.parametrize("end", [{}, {"failed": "out of memory"}])
def test_a_row_with_a_quadratic_mask_is_marked_and_no_ratio_is_taken_to_it(end):
    text = run.report({"throughput": _rows({"kernel": "sdpa, T × T mask", "quadratic": True, **end})})
    ours, verl = _cells(text)
    assert verl["contestant"] == f"verl {run.MARK}"
    assert verl["kernel"] == "sdpa, T × T mask"
    assert (ours["contestant"], ours["× verl"]) == ("ours", "–")
    assert "× verl" not in verl or verl["× verl"] == "–"
    assert "flash-attn" in next(line for line in text.splitlines() if line.startswith(run.MARK))


def test_a_cell_that_fails_keeps_what_it_ran():
    said = json.dumps({"kernel": "sdpa", "quadratic": True})
    done = subprocess.CompletedProcess([], 1, f"note\n{said}\n{{'train_runtime': 1}}\n", "…\nCUDA out of memory.\n")
    assert run.outcome(done) == {"kernel": "sdpa", "quadratic": True, "failed": "out of memory"}


def test_the_allocators_setting_is_the_users_or_that_of_a_run(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert run.allocator() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in run.report({})
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert run.allocator() == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
