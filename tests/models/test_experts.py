"""Mixtures of experts by grouped products, in released checkpoints' formats, and refused options."""

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from tests.lib.checked import checked
from tests.lib.engine_steps import DOCUMENTS, PACKS, engine_steps
from tests.lib.errors import names, refused
from tests.lib.ranks import run_ranks
from tests.lib.reference import Reference, load_eager
from tests.lib.small_models import model_class, model_config, packed_and_plain, write_mxfp4
from verl_ext.config.compose import compose
from verl_ext.layers.experts import choose_experts, experts_problem
from verl_ext.layers.trial import shrunk

GROUPED = ("qwen3_moe", "gpt_oss", "nemotron_h")


def _gradients(model, ids):
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.logsumexp(-1).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", GROUPED)
def test_grouped_products_have_the_gradients_of_a_loop_over_experts(kind, monkeypatch):
    _, model = packed_and_plain(kind)
    ids = torch.randint(3, 190, (2, 23), generator=torch.Generator().manual_seed(0))
    grouped, calls = torch.nn.functional.grouped_mm, []
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *a, **k: calls.append(1) or grouped(*a, **k))
    choose_experts(model, "eager")
    looped = _gradients(model, ids)
    assert not calls
    choose_experts(model, "grouped_mm")
    found = _gradients(model, ids)
    assert calls
    assert found.keys() == looped.keys()
    for name, gradient in looped.items():
        assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-9, name


def test_grouped_products_are_refused_where_transformers_has_none():
    with torch.device("meta"):
        jet, qwen, dense = (model_class(kind)(shrunk(model_config(kind))) for kind in ("jetmoe", "qwen3_moe", "qwen3"))
    assert names(experts_problem(jet, "grouped_mm"), "model.experts", "auto or eager", "JetMoeForCausalLM")
    assert experts_problem(jet, "eager") is None
    assert experts_problem(qwen, "grouped_mm") is None
    assert names(experts_problem(dense, "eager"), "model.experts", "auto", "Qwen3ForCausalLM")


def test_the_option_is_checked_before_a_model_is_loaded():
    config = compose(["model.path=unused", "data.train_dir=unused", "model.experts=grouped_mm"])
    with refused("model.experts", "auto", "Qwen3ForCausalLM", alone=False):
        checked(config, hf_config=transformers.Qwen3Config())


def test_quantized_weights_that_transformers_cannot_dequantize_are_refused():
    hf_config = transformers.Qwen3Config(quantization_config={"quant_method": "gptq", "bits": 4})
    config = compose(["model.path=unused", "data.train_dir=unused"])
    with refused("model.path", "quant_method=gptq", alone=False):
        checked(config, hf_config=hf_config)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory, tiny_model):
    """Write a small GPT-OSS with MXFP4 experts, as in released checkpoints, and one with its plain weights."""
    folder, plain = (tmp_path_factory.mktemp(name) for name in ("mxfp4", "plain"))
    torch.manual_seed(0)
    config = shrunk(model_config("gpt_oss"), intermediate_size=32)
    model_class("gpt_oss")(config).save_pretrained(folder)
    write_mxfp4(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    fresh = model_class("gpt_oss")(config)
    fresh.load_state_dict(model.float().state_dict())
    fresh.save_pretrained(plain)
    for written in (folder, plain):
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(written)
    return str(folder), str(plain)


@pytest.mark.slow
def test_a_checkpoint_in_mxfp4_is_trained_with_the_weights_that_transformers_dequantizes(quantized):
    folder, plain = quantized
    step = run_ranks(engine_steps, 1, {"gpt_oss": folder}, 1, 1)[0]["gpt_oss"]
    expected = Reference(load_eager(plain), DOCUMENTS).step(PACKS, "token", {})
    assert step.report["train/loss"] == pytest.approx(expected.loss, rel=1e-5)
    for name, gradient in expected.gradients.items():
        assert float((step.gradients[name].double() - gradient).norm()) <= 2e-4 * float(gradient.norm()) + 1e-7, name
