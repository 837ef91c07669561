"""What is frozen lies in the type of a forward: the same bits, less memory, any mix within a layer."""

import pytest
import torch

from tests.lib.errors import names
from tests.lib.packed_engine import build_worker, token_step
from tests.lib.ranks import run_cases
from tests.lib.reference import documents_of_answers, fill_adapters
from tests.lib.small_models import write_small_models
from tests.lib.tiny_model import write_tiny_model
from tests.lib.training import differences, metrics, refusals, resume_run, small_run, train_twice
from verl_ext.commands.export import main as export

pytestmark = pytest.mark.slow

DOCUMENTS = documents_of_answers(21, 2, 13, 30, 9, 17)
PACKS = [DOCUMENTS[:3], DOCUMENTS[3:]]
BF16 = "engine.mixed_precision={param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}"
LORA = ("model.lora_rank=4", "model.target_modules=[q_proj,down_proj]")
WORDS = "model.new_tokens=['w3 w5']"
KINDS = {  # the model and the overrides
    "adapters": ("qwen3", LORA),
    "dora": ("qwen3", (*LORA, "model.use_dora=true")),
    "whole ends": ("qwen3", (*LORA, "model.modules_to_save=[embed_tokens,lm_head]")),
    "new rows": ("qwen3", (*LORA, WORDS)),
    "new rows of tied": ("tied", (*LORA, WORDS)),
    "layers": ("qwen3", ("model.freeze=[embed_tokens,'layers.0',q_proj,'*norm*']",)),
    "a last layer": ("tied", ("model.freeze=['!layers.-1']",)),
    "rates of decay": ("nemotron_h", ("model.freeze=['layers.0']",)),
    "adapters beside rates of decay": ("qwen3_5_text", ("model.lora_rank=4", "model.target_modules=[q_proj,out_proj]")),
    "tower": ("gemma3", LORA),
}


def steps(folders, dtype):
    """Return, for each kind, a step and the types of frozen and of trained parameters."""
    found = {}
    for kind, (model, overrides) in KINDS.items():
        engine = build_worker(folders[model], 1, [BF16, f"model.frozen_dtype={dtype}", *overrides]).engine
        fill_adapters(engine.module)
        types = {name: (p.requires_grad, p.dtype, p.to_local().nbytes) for name, p in engine.module.named_parameters()}
        found[kind] = token_step(engine, PACKS), types
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model):
    """Write the models in bf16."""
    folders = write_small_models(("nemotron_h", "qwen3_5_text", "gemma3"), tmp_path_factory.mktemp("small"), tiny_model)
    folders["qwen3"] = write_tiny_model(tmp_path_factory.mktemp("qwen3"))
    folders["tied"] = write_tiny_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
    return {name: str(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def run(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    more = (*LORA, BF16, "trainer.total_training_steps=3", "trainer.save_freq=1")
    return small_run(folder, folders["qwen3"], [30] * 8, *more), folder


FORMS = {"today": ("model.frozen_dtype=fp32", "checkpoint.save_lora_only=false"), "small": ()}


@pytest.fixture(scope="module")
def found(folders, run):
    cases = {(dtype, ranks): (ranks, steps, folders, dtype) for dtype in ("fp32", "compute") for ranks in (1, 2)}
    for name, more in FORMS.items():
        cases[name] = (2, train_twice, [*run[0], *more], run[1] / name, run[1] / f"resumed {name}")
    of_today = (1, resume_run, [*run[0]], run[1] / "today", run[1] / "small from today", 1)
    return run_cases(cases, {"small from today": of_today})


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_bits_of_a_base_in_fp32(kind, ranks, found):
    (before, of_fp32), (now, types) = (found[dtype, ranks][0][kind] for dtype in ("fp32", "compute"))
    assert now.report == before.report
    assert now.gradients.keys() == before.gradients.keys()
    assert all(torch.equal(now.gradients[name], gradient) for name, gradient in before.gradients.items())
    frozen = {name: (dtype, size) for name, (is_trained, dtype, size) in types.items() if not is_trained}
    assert {dtype for is_trained, dtype, _ in types.values() if is_trained} == {torch.float32}
    precise = {name for name in frozen if "A_log" in name or "dt_bias" in name or "conv1d" in name or ".D" in name}
    assert precise or "decay" not in kind
    assert all(dtype == (torch.float32 if name in precise else torch.bfloat16) for name, (dtype, _) in frozen.items())
    assert all(2 * size == of_fp32[name][2] for name, (_, size) in frozen.items() if name not in precise)


@pytest.mark.parametrize("name", FORMS)
def test_a_resumed_run_equals_the_whole_one_in_every_bit(name, run, found):
    assert differences(run[1] / f"resumed {name}", run[1] / name, 3) == []


def test_runs_of_both_forms_and_a_resume_from_the_one_in_the_other_have_the_same_losses(run, found):
    of_today, small, resumed = (metrics(run[1] / name) for name in ("today", "small", "small from today"))
    for step in (1, 2, 3):
        assert small[step, "train/loss"] == of_today[step, "train/loss"]
    assert resumed[3, "train/loss"] == pytest.approx(of_today[3, "train/loss"], rel=1e-3)  # bf16, on one rank


def test_both_checkpoints_export_the_same_merged_weights(run, found):
    for name in FORMS:
        assert export([f'checkpoint="{run[1] / name}"', f'output_dir="{run[1] / name}/merged"', "dtype=float32"]) == 0
    today, small = ((run[1] / name / "merged" / "model.safetensors").read_bytes() for name in FORMS)
    assert today == small


def test_a_run_that_freezes_everything_is_refused(run):
    (told,) = refusals([*run[0][:2]], [["model.freeze=['*']"]])
    assert names(told, "model.freeze", "['*']")
