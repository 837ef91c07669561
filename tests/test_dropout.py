"""Dropout: a resumed run draws the masks of an uninterrupted one, and no two ranks draw the same masks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PersimmonConfig

from tests.ranks import run_cases
from tests.tiny_model import VOCABULARY
from tests.tokenized_data import random_documents, write_tokenized
from tests.training import build, exact_metrics, train_alone
from verl_ext.layers.dropout import switch_dropout_off

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
DROPOUT = {"embd_pdrop": 0.2, "resid_pdrop": 0.2, "attn_pdrop": 0.2}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write four packs of the same single document: two steps an epoch."""
    document = random_documents(np.random.default_rng(0), [40], VOCABULARY, 1)
    return write_tokenized(tmp_path_factory.mktemp("data") / "train", document * 4)


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """Return options of a GPT-2 with all dropouts at 0.2, and of a Qwen3 under adapters with dropout, given and new."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = GPT2Config(**SIZES, **DROPOUT, initializer_range=0.2, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder / "gpt2")
    return {
        "gpt2": [f"model.path={folder / 'gpt2'}"],
        "lora": [f"model.path={tiny_model}", "model=lora", f"model.lora_adapter_path={folder / 'adapter'}"],
        "new lora": [f"model.path={tiny_model}", "model=lora", "model.lora_dropout=0.5"],
    }


OTHER = {"gpt2": "trainer.seed=2", "lora": "trainer.seed=2", "new lora": "model.lora_dropout=0"}  # draws other masks
DROPOUTS = {  # one of each model
    "gpt2": "transformer.h.0.attn.resid_dropout",
    "new lora": "base_model.model.model.layers.0.self_attn.q_proj.lora_dropout.default",
}


def write_adapter(model: Path, folder: str) -> None:
    """Write an adapter with dropout whose weights change the output."""
    config = LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)


def run_of(data: str, model: list[str], output: Path, *overrides: str) -> list[str]:
    packs = ("data.strategy=none", "data.train_batch_size=2", "data.balance=none")
    return [f"data.train_dir={data}", *model, f"trainer.default_local_dir={output}", *packs, *overrides]


def masks_of(runs: list[list[str]], module: str) -> list[list[torch.Tensor]]:
    """Return the masks of one of this rank's dropouts in each run, call by call."""
    masks: list[list[torch.Tensor]] = []
    for overrides in runs:
        trainer, of_run = build(overrides), []
        dropout = trainer.engine.module.get_submodule(module)
        dropout.register_forward_hook(lambda _module, _inputs, output, kept=of_run: kept.append(output == 0))
        trainer.fit()
        masks.append(of_run)
    return masks


@pytest.fixture(scope="module")
def runs(tiny_model, data, models, tmp_path_factory):
    """Return the folder of runs, and each rank's masks by model, ranks of a pack, or where layers are recomputed."""
    folder = tmp_path_factory.mktemp("runs")
    write_adapter(tiny_model, models["lora"][-1].partition("=")[2])
    cases = {}
    for name, other in OTHER.items():
        for output, steps, *more in (("whole", 4), ("resumed", 1), ("resumed", 4), ("other", 2, other)):
            more += [f"data.val_dir={data}", "trainer.test_freq=1", f"trainer.total_training_steps={steps}"]
            cases[name, output, steps] = (2, train_alone, run_of(data, models[name], folder / name / output, *more))
    for name, module in DROPOUTS.items():
        recomputed = run_of(data, models[name], folder / name / "alone", "model.enable_gradient_checkpointing=true")
        cases[name, "recomputed"] = (1, masks_of, [recomputed], module)
        for shared in (1, 2):
            shape = (f"engine.ulysses_sequence_parallel_size={shared}", "trainer.total_training_steps=1")
            outputs = [folder / name / f"{shared} {again}" for again in range(2)]
            both = [run_of(data, models[name], output, *shape) for output in outputs]
            cases[name, shared] = (2, masks_of, both, module)
    return folder, run_cases(cases)


@pytest.mark.parametrize("name", OTHER)
def test_a_resumed_run_with_dropout_equals_an_uninterrupted_one_to_the_last_bit(name, runs):
    whole, resumed, other = (exact_metrics(runs[0] / name / output) for output in ("whole", "resumed", "other"))
    assert resumed == whole
    # Dropout is active: new adapters change the loss from the second step on.
    assert other[2, "train/loss"] != whole[2, "train/loss"]


@pytest.mark.parametrize("sequence_parallel", [1, 2])
@pytest.mark.parametrize("name", DROPOUTS)
def test_no_two_ranks_draw_the_same_mask_and_a_second_run_draws_the_same(name, sequence_parallel, runs):
    of_ranks = []
    for first, second in runs[1][name, sequence_parallel]:
        assert torch.equal(torch.cat(first), torch.cat(second))
        of_ranks.append(torch.cat(first))
    assert of_ranks[0].shape == of_ranks[1].shape
    assert not torch.equal(*of_ranks)


@pytest.mark.parametrize("name", DROPOUTS)
def test_a_recomputed_layer_draws_the_mask_of_its_forward(name, runs):
    ((masks,),) = runs[1][name, "recomputed"]
    assert len(masks) == 8  # two steps of two micro-batches, each with a forward and its recomputation
    for forward, recomputed in zip(masks[::2], masks[1::2], strict=True):
        assert torch.equal(forward, recomputed)
    assert not any(torch.equal(masks[0], later) for later in masks[2::2])


@pytest.mark.parametrize("kind", ["gpt2", "persimmon"])  # the latter reads its config in each forward
def test_dropout_that_is_switched_off_leaves_a_model_that_computes_the_same_twice(kind):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 48}
    persimmon = PersimmonConfig(vocab_size=VOCABULARY, **sizes, attention_dropout=0.2, hidden_dropout=0.2)
    config = GPT2Config(**SIZES, **DROPOUT) if kind == "gpt2" else persimmon
    model, ids = AutoModelForCausalLM.from_config(config).train(), torch.arange(5, 25)[None]
    before = config.to_dict()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    assert switch_dropout_off(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert model.config.to_dict() == before  # which an export writes
