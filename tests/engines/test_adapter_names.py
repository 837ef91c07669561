"""Names of `model.target_modules` mean the modules of these names, whatever PEFT makes of them for a type of model."""

import copy
import re

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING

from tests.lib.small_models import KINDS, model_class, model_config
from verl_ext.config.adapters import with_adapters
from verl_ext.engines.lora import adapted_parts, as_written, counted_parts, expected_parts
from verl_ext.layers.trial import shrunk

NAMES = ["gate_proj", "up_proj", "down_proj"]
# The types of which PEFT reads names as weights of experts, and one of which it does not.
READ = sorted(kind for kind, old in _MODEL_TO_CONVERSION_PATTERN.items() if old in _MOE_TARGET_MODULE_MAPPING)
TYPES = [kind for kind in (*READ, "qwen2_moe") if kind in KINDS]
ASKED = [["o_proj", *NAMES], ["down_proj"], r".*layers\.1\..*(o_proj|up_proj)"]


def small(kind, device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return model_class(kind)(shrunk(model_config(kind)))


def named(model, asked):
    """Return the linear layers that names or a regular expression mean, by their text alone."""
    linear = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    if isinstance(asked, str):
        return {name for name in linear if re.fullmatch(asked, name)}
    return {name for name in linear if name.rpartition(".")[2] in asked}


def modules_of(parts):
    return {part.removesuffix(".weight") for part in parts}


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("kind", TYPES)
def test_the_modules_of_these_names_are_adapted_and_no_others(kind, asked):
    model = small(kind, "meta")
    if not (expected := named(model, asked)):
        pytest.skip(f"{kind} has no linear layer of these names")
    lora = as_written(model, LoraConfig(r=4, target_modules=asked))
    assert modules_of(expected_parts(model, lora)) == expected
    assert modules_of(adapted_parts(with_adapters(model, lora))) == expected


@pytest.mark.parametrize("kind", TYPES)
def test_all_linear_leaves_no_linear_layer_out(kind):
    model = small(kind, "meta")
    head = model.get_output_embeddings()
    linear = {name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part is not head}
    lora = as_written(model, LoraConfig(r=4, target_modules="all-linear"))
    assert linear <= modules_of(adapted_parts(with_adapters(model, lora)))


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind in READ])
def test_a_mixture_with_all_linear_computes_and_its_experts_are_adapted(kind):
    model, ids, lora = small(kind), torch.arange(3, 20)[None], LoraConfig(r=4, target_modules="all-linear")
    expected = {name for name, part in model.named_modules() if type(part).__name__.endswith("Experts")}
    adapted = with_adapters(copy.deepcopy(model), as_written(model, lora))
    torch.testing.assert_close(adapted(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)  # new ones change nothing
    assert all(any(part.startswith(name) for part in adapted_parts(adapted)) for name in expected)


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_they_compute_what_lora_of_linear_layers_does_and_plain_peft_reads_their_folder(kind, tmp_path):
    model, ids = small(kind), torch.arange(3, 20)[None]
    adapted = with_adapters(copy.deepcopy(model), as_written(model, LoraConfig(r=4, target_modules=["o_proj", *NAMES])))
    plain = copy.deepcopy(model)
    plain.config.model_type = "plain"  # of which PEFT reads names as they are written
    plain = get_peft_model(plain, LoraConfig(r=4, target_modules=["o_proj", *NAMES]))
    trained = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    of_plain = {name: weight for name, weight in plain.named_parameters() if weight.requires_grad}
    assert trained.keys() == of_plain.keys()
    for name, weight in trained.items():
        weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1
        of_plain[name].data = weight.data.clone()
    logits, expected = adapted(ids).logits, plain(ids).logits
    assert not torch.allclose(expected, model(ids).logits, atol=1e-3)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    logits.square().mean().backward()
    expected.square().mean().backward()
    for name, weight in trained.items():
        torch.testing.assert_close(weight.grad, of_plain[name].grad, rtol=1e-3, atol=1e-6)
    adapted.save_pretrained(tmp_path)
    torch.testing.assert_close(PeftModel.from_pretrained(model, tmp_path)(ids).logits, logits, rtol=0, atol=0)


def test_parts_are_counted_by_their_names_inside_a_layer():
    parts = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head"]
    assert counted_parts(parts) == "lm_head (1), mlp.up_proj.weight (2)"
