"""Dropout: a resumed run draws the masks of an uninterrupted one, and no two ranks draw the same masks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    OPTConfig,
    PersimmonConfig,
    PhimoeConfig,
)

from tests.lib.ranks import run_cases
from tests.lib.tiny_model import VOCABULARY
from tests.lib.tokenized_data import random_documents, random_units, write_tokenized, write_units
from tests.lib.training import build, exact_metrics, train_alone
from verl_ext.layers.dropout import no_draws, switch_noise_off

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


HEADS = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2}
MIXTURE = {**HEADS, "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": VOCABULARY}
NOISY = {  # what is random in training, whatever its name
    "dropout": GPT2Config(**SIZES, **DROPOUT),
    "dropout that the config has": PersimmonConfig(**HEADS, vocab_size=VOCABULARY, hidden_dropout=0.2),
    "jitter": MixtralConfig(**MIXTURE, router_jitter_noise=0.1),
    "drawn experts": PhimoeConfig(**MIXTURE, input_jitter_noise=0.1, router_jitter_noise=0.1),
    "layers left out": OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_attention_heads=4, num_hidden_layers=6, layerdrop=0.5
    ),
}


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("kind", NOISY)
def test_without_noise_a_model_computes_in_training_what_it_computes_in_evaluation(kind, is_recomputed):
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(NOISY[kind]), torch.arange(5, 25)[None]
    if is_recomputed:
        model.gradient_checkpointing_enable()
    before, forwards = model.config.to_dict(), [0]
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    layers[0].register_forward_pre_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    model.train()
    assert not torch.equal(model(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    expected, gradients = [], []
    switch_noise_off(model)
    for mode in (False, True):
        forwards[0] = 0
        model.train(mode).zero_grad()
        with no_draws(AssertionError("noise")):
            logits = model(ids, use_cache=False).logits
            logits.square().sum().backward()
        expected.append(logits)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*expected)
    assert torch.equal(*gradients)
    assert forwards == [2 if is_recomputed else 1]
    assert model.config.to_dict() == before  # which an export writes


def test_noise_that_does_not_ask_for_training_is_refused():
    with pytest.raises(ValueError, match="noise"), no_draws(ValueError("noise")):
        torch.nn.functional.dropout(torch.ones(4), 0.5)


@pytest.fixture(scope="module")
def noisy_runs(tiny_model, tmp_path_factory):
    """Return the metrics of runs with losses of preferences, by kind of noise, loss and seed; None is without noise."""
    folder = tmp_path_factory.mktemp("preferences")
    units = random_units(np.random.default_rng(2), [2, 2, 2, 2])
    common = ["data=preference", f"data.train_dir={write_units(folder / 'units', units, {1: 'maths'})}"]
    cases = {}
    for kind in ("jitter", "drawn experts"):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(NOISY[kind]).save_pretrained(folder / kind)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder / kind)
        for loss, seed in (("dpo", 1), ("simpo", 1), ("simpo", 2)):
            output = folder / f"{kind} {loss} {seed}"
            more = [f"loss={loss}", f"trainer.seed={seed}", "trainer.total_training_steps=2"]
            run = [*common, f"model.path={folder / kind}", "data.train_batch_size=64", "data.max_tokens=128", *more]
            cases[kind, loss, seed] = (2, train_alone, [*run, f"trainer.default_local_dir={output}"])
    run_cases(cases)
    return {key: exact_metrics(folder / f"{key[0]} {key[1]} {key[2]}") for key in cases}, folder, units


def plain_simpo(folder: Path, units: list[dict]) -> float:
    """Return SimPO's loss of pairs by plain transformers in evaluation: β is 2, the margin 1."""
    model, of_answers = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), []
    for unit in units:
        ids, targets = torch.from_numpy(unit["input_ids"]).long(), torch.from_numpy(unit["loss_mask"])[1:].bool()
        with torch.no_grad():
            logs = model(ids[None]).logits[0, :-1].double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        of_answers.append(logs[targets].mean())
    chosen, rejected = (torch.stack(of_answers[first::2]) for first in (0, 1))
    weights = torch.tensor([unit["pair_weight"] for unit in units[::2]], dtype=torch.float64)
    losses = -torch.nn.functional.logsigmoid(2 * (chosen - rejected) - 1)
    return float((weights * losses).sum() / weights.sum())


@pytest.mark.parametrize("kind", ["jitter", "drawn experts"])
def test_answers_are_compared_without_noise(kind, noisy_runs):
    found, folder, units = noisy_runs
    of_dpo = found[kind, "dpo", 1]
    assert {of_dpo[1, f"train/reward_{name}"] for name in ("chosen", "rejected", "margin")} == {0.0}
    first, second = (found[kind, "simpo", seed] for seed in (1, 2))
    for step in (1, 2):
        assert first[step, "train/loss"] == second[step, "train/loss"]
    assert first[1, "train/loss"] == pytest.approx(plain_simpo(folder / kind, units), rel=1e-5)
