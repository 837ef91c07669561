"""Runs on a base in NF4: ten steps of PEFT's, resumes, references, exports, gathered bytes, what is refused."""

import shutil
import sys

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from tests.lib.errors import names
from tests.lib.four_bits import DOCUMENTS, PACKS, bitsandbytes_base, with_factors, write_model
from tests.lib.packed_engine import build_worker, token_step
from tests.lib.ranks import run_cases
from tests.lib.reference import Reference, fill_adapters
from tests.lib.tiny_model import VOCABULARY
from tests.lib.tokenized_data import random_documents, random_units, write_tokenized, write_units
from tests.lib.training import differences, metrics, plain_losses, refusals, resume_run, train_alone, train_twice
from verl_ext.commands.export import main as export

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.slow

NAMED = ["q_proj", "o_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
NF4 = ("model.lora_rank=4", "model.lora_alpha=8", "model.quantization=nf4")
LORA = (*NF4, f"model.target_modules={NAMED}".replace(" ", ""))
STEPS = ("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.val_before_train=false")
BF16 = "engine.mixed_precision={param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}"
RUNS = {  # the model and the overrides of a run on two ranks
    "alone": ("qwen3", ()),
    "with the base": ("qwen3", ("checkpoint.save_lora_only=false", "model.quantization_nested=true")),
    "tied": ("tied", ("checkpoint.save_contents=[model,optimizer,extra,hf_model]",)),
    "experts": ("qwen3_moe", ("model.target_modules=[q_proj]", f"model.target_parameters={EXPERTS}".replace(" ", ""))),
}
LEARNING = ("optim.lr=1e-2", "optim.lr_scheduler_type=constant", "optim.weight_decay=0.01", "optim.clip_grad=1.0")


def ten_steps(folder):
    """Return the losses of ten steps over the same packs."""
    engine = build_worker(folder, 1, [*LORA, *LEARNING]).engine
    fill_adapters(engine.module)
    return [token_step(engine, PACKS).report["train/loss"] for _ in range(10)]


def gathered(folder):
    """Return the bytes that FSDP gathers in a step, with a base in bf16 and in NF4."""
    call, found = collectives.DefaultAllGather.__call__, []

    def counted(self, output_tensor, *args, **kwargs):
        found[-1] += output_tensor.nbytes
        return call(self, output_tensor, *args, **kwargs)

    collectives.DefaultAllGather.__call__ = counted
    try:
        for more in ("model.quantization=null", "model.quantization=nf4"):
            engine = build_worker(folder, 1, [*LORA, BF16, "model.target_modules=[q_proj]", more]).engine
            found.append(0)
            token_step(engine, PACKS)
    finally:
        collectives.DefaultAllGather.__call__ = call
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    large = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    folders = {name: write_model(tmp_path_factory.mktemp(name), name) for name in ("qwen3", "tied", "qwen3_moe")}
    return {**folders, "large": write_model(tmp_path_factory.mktemp("large"), "qwen3", **large)}


@pytest.fixture(scope="module")
def documents():
    return random_documents(np.random.default_rng(0), [40, 30, 20, 60] * 2, VOCABULARY, 1)


@pytest.fixture(scope="module")
def runs(folders, documents, tmp_path_factory):
    """Execute and resume each run, and return the folder of all and what the cases found."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_tokenized(folder / "data", documents)
    units = random_units(np.random.default_rng(2), [2, 3, 2, 1, 2, 2, 4, 2])
    pairs = write_units(folder / "units", units, {1: "maths", 2: "code"})
    cases = {"ten steps": (2, ten_steps, folders["qwen3"]), "gathered": (2, gathered, folders["large"])}
    overrides = {}
    for name, (model, more) in RUNS.items():
        run = [f"data.train_dir={data}", f"data.val_dir={data}", f"model.path={folders[model]}", *LORA, *STEPS, *more]
        cases[name] = (2, train_twice, run, folder / name, folder / f"resumed {name}")
        overrides[name] = run
    shared = ("data.share_prefixes=true", "data.share_least=2", "data.train_batch_size=2")
    dpo = [f"data.train_dir={pairs}", "data=preference", "loss=dpo", f"model.path={folders['qwen3']}", *LORA, *shared]
    into = f'trainer.default_local_dir="{folder / "dpo"}"'
    cases["dpo"] = (2, train_alone, [*dpo, "trainer.total_training_steps=2", into])
    on_one = (1, resume_run, overrides["alone"], folder / "alone", folder / "on one rank", 1)
    return folder, run_cases(cases, {"on one rank": on_one}), overrides


def test_ten_steps_are_those_of_peft_with_bitsandbytes(runs, folders):
    adapted = with_factors(bitsandbytes_base(folders["qwen3"]), target_modules=NAMED)
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    adam = torch.optim.AdamW(trained.values(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01)
    for loss in runs[1]["ten steps"][0]:
        expected = Reference(adapted, DOCUMENTS).step(PACKS, "token", {})
        assert loss == pytest.approx(expected.loss, rel=1e-5)
        for name, parameter in trained.items():
            parameter.grad = expected.gradients[name].float() * min(1.0, 1.0 / expected.grad_norm)
        adam.step()


def test_a_step_gathers_less_than_a_third_of_the_bytes_of_a_base_in_bf16(runs):
    bf16, nf4 = runs[1]["gathered"][0]
    assert nf4 / bf16 <= 0.30


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_the_whole_one_in_every_bit(name, runs):
    assert differences(runs[0] / f"resumed {name}", runs[0] / name, 3) == []


def test_a_run_resumes_on_other_ranks(runs):
    whole, resumed = (metrics(runs[0] / name) for name in ("alone", "on one rank"))
    assert resumed[3, "train/loss"] == pytest.approx(whole[3, "train/loss"], rel=1e-5)


def test_rewards_of_a_run_that_begins_with_its_reference_are_0(runs):
    found = metrics(runs[0] / "dpo")
    assert found[1, "train/reward_margin"] == found[1, "train/reward_chosen"] == 0
    assert found[2, "train/reward_margin"] != 0


@pytest.mark.parametrize("name", RUNS)
def test_a_merged_export_computes_what_was_trained(name, runs, documents, capsys):
    folder = runs[0] / f"merged {name}"
    given = ["dtype=float32"] if name != "tied" else ["dtype=float32", "base_form=dequantized"]
    assert export([f'checkpoint="{runs[0] / name}"', f'output_dir="{folder}"', *given]) == 0
    assert "merged into the numbers of NF4" in capsys.readouterr().out
    wanted = metrics(runs[0] / name)[3, "val/loss"]
    assert plain_losses(folder, documents)[0] == pytest.approx(wanted, rel=1e-5)
    if name == "tied":  # its checkpoints hold the merged model in bf16
        own = runs[0] / name / "global_step_3" / "huggingface"
        assert plain_losses(own, documents)[0] == pytest.approx(wanted, rel=1e-3)


def test_the_original_base_is_another_model_by_choice(runs, documents, capsys):
    losses = []
    for name in ("alone", "with the base"):
        folder = runs[0] / f"original {name}"
        given = [f'checkpoint="{runs[0] / name}"', f'output_dir="{folder}"', "base_form=original", "dtype=float32"]
        assert export(given) == 0
        assert "merged into the original weights, not into" in capsys.readouterr().out
        losses.append(plain_losses(folder, documents)[0] / metrics(runs[0] / name)[3, "val/loss"] - 1)
    assert min(map(abs, losses)) > 1e-4


def test_exported_adapters_are_loaded_by_peft_and_merged_as_they_were_trained(runs, folders, documents):
    folder, merged = runs[0] / "adapter", runs[0] / "merged adapter"
    assert export([f'checkpoint="{runs[0] / "alone"}"', f'output_dir="{folder}"', "form=adapter"]) == 0
    model = PeftModel.from_pretrained(bitsandbytes_base(folders["qwen3"]), folder)
    sums, count = 0.0, 0
    for document in documents:
        ids = torch.as_tensor(document["input_ids"], dtype=torch.int64)
        mask = torch.as_tensor(document["loss_mask"])[1:].bool()
        logs = model.train()(ids[None]).logits[0].double().log_softmax(-1)[:-1]
        sums -= float(logs.gather(1, ids[1:, None])[mask].sum())
        count += int(mask.sum())
    wanted = metrics(runs[0] / "alone")[3, "val/loss"]
    assert sums / count == pytest.approx(wanted, rel=1e-5)
    assert export([f'checkpoint="{folder}"', f'output_dir="{merged}"', "dtype=float32"]) == 0
    assert plain_losses(merged, documents)[0] == pytest.approx(wanted, rel=1e-5)


REFUSED = {
    "model.lora_rank=0": ("model.quantization", "model=lora", "nf4"),
    "model.lora_rank=0 model.freeze=[embed_tokens]": ("model.quantization", "model.freeze=['embed_tokens']", "nf4"),
    "model.quantization=int8": ("model.quantization", "nf4", "int8"),
    "model.quantization=null model.quantization_nested=true": (
        *("model.quantization_nested", "model.quantization=nf4", True),
    ),
    "model.path=NARROW": ("model.quantization", "Qwen3Config", 64, "mlp.down_proj.weight (2) of 96"),
}


def test_what_cannot_be_quantized_is_refused_in_one_line_before_weights(folders, runs, tmp_path, monkeypatch):
    narrow = write_model(tmp_path / "narrow", "qwen3", intermediate_size=96)
    into = f"trainer.default_local_dir={tmp_path / 'run'}"
    changes = [change.replace("NARROW", narrow).split() for change in REFUSED]
    for line, things in zip(refusals([*runs[2]["alone"], into], changes), REFUSED.values(), strict=True):
        assert "\n" not in line
        assert names(line, *things), line
    import bitsandbytes.functional as bnb

    def broken(*args, **kwargs):
        raise RuntimeError("Configured CPU binary not found")

    monkeypatch.setattr(bnb, "quantize_4bit", broken)
    (line,) = refusals([*runs[2]["alone"], into], [[]])
    assert names(line, "model.quantization", "bitsandbytes", "CPU", "nf4 (Configured CPU binary not found)")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    (line,) = refusals([*runs[2]["alone"], into], [[]])
    assert names(line, "model.quantization", "pip install '.[four_bits]'", "nf4")


def test_a_resume_in_another_form_or_on_another_base_is_refused(folders, runs, tmp_path):
    folder = tmp_path / "begun"
    shutil.copytree(runs[0] / "alone", folder)
    begun = [*runs[2]["alone"], f"trainer.default_local_dir={folder}"]
    changes = [["model.quantization=null"], ["model.quantization_nested=true"], [f"model.path={folders['tied']}"]]
    told = refusals(begun, changes)
    assert names(told[0], "model.quantization", "None", "nf4")
    assert names(told[1], "model.quantization_nested", "True")
    assert names(told[2], "but the run in")
