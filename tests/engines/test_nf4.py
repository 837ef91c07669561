"""A frozen base in NF4 under adapters: steps, runs and exports are those of plain PEFT with bitsandbytes."""

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.lib.four_bits import DOCUMENTS, MODELS, PACKS, bitsandbytes_base, in_fp64, with_factors, write_model
from tests.lib.packed_engine import build_worker, token_step
from tests.lib.ranks import run_cases
from tests.lib.reference import Reference, fill_adapters
from verl_ext.engines.nf4 import NF4Linear
from verl_ext.engines.nf4_reading import quantize_rest
from verl_ext.engines.optimizer import parameter_groups
from verl_ext.flops import train_flops

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.slow

NAMED = ["q_proj", "o_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # the model and PEFT's options
    **{name: (name, {"target_modules": NAMED}) for name in ("llama", "qwen3", "tied", "gemma3")},
    **{name: (name, {"target_modules": ["q_proj", "o_proj"]}) for name in ("qwen3_moe", "gpt_oss")},
    "dora": ("llama", {"target_modules": NAMED, "use_dora": True}),
    "nested": ("qwen3", {"target_modules": NAMED}),
    "experts of qwen3_moe": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts of gpt_oss": ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "whole head": ("qwen3", {"target_modules": NAMED, "modules_to_save": ["lm_head"]}),
}
MEMORY = ("qwen3", "gpt_oss", "experts of qwen3_moe")
LAYOUTS = {  # ranks, those that share a pack, overrides, kinds
    "one rank": (1, 1, (), tuple(KINDS)),
    "two ranks": (2, 1, (), tuple(KINDS)),
    "four ranks": (4, 1, (), tuple(MODELS)),
    "two ranks of a pack": (2, 2, (), MEMORY),
    "groups of ranks": (2, 1, ("parallel.context_parallel_size=2",), MEMORY),
    "tiles": (2, 1, ("model.tile_tokens=4",), MEMORY),
    "no checkpointing": (1, 1, ("model.enable_gradient_checkpointing=false",), MEMORY),
    "inputs on the host": (1, 1, ("model.activation_offload=true",), MEMORY),
    "experts over ranks": (2, 1, ("parallel.expert_parallel=2",), ("qwen3_moe", *(k for k in KINDS if "experts" in k))),
}
CASES = [(kind, layout) for layout, (*_, kinds) in LAYOUTS.items() for kind in kinds]


def overrides_of(kind: str) -> list[str]:
    given = ["model.lora_rank=4", "model.lora_alpha=8", "model.quantization=nf4"]
    for name, value in KINDS[kind][1].items():
        given.append(f"model.{name}={str(value).lower() if isinstance(value, bool) else value}".replace(" ", ""))
    return [*given, f"model.quantization_nested={str(kind == 'nested').lower()}"]


def steps(folders, of_pack, more, kinds):
    """Return a step of each kind, and the frozen parameters' types and shapes on this rank."""
    found = {}
    for kind in kinds:
        engine = build_worker(folders[KINDS[kind][0]], of_pack, [*overrides_of(kind), *more]).engine
        fill_adapters(engine.module)
        kept = {n: (p.dtype, p.shape, p.to_local().nbytes) for n, p in engine.module.named_parameters()}
        found[kind] = token_step(engine, PACKS), kept
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write_model(tmp_path_factory.mktemp(name), name) for name in MODELS}


@pytest.fixture(scope="module")
def found(folders):
    return run_cases({name: (ranks, steps, folders, *more) for name, (ranks, *more) in LAYOUTS.items()})


@pytest.fixture(scope="module")
def expected(folders):
    """Return the step of each kind by PEFT with bitsandbytes, and in fp64."""
    found = {}
    for kind, (model, _) in KINDS.items():
        theirs = with_factors(bitsandbytes_base(folders[model], kind == "nested"), **KINDS[kind][1])
        step = Reference(theirs, DOCUMENTS).step(PACKS, "token", {})
        found[kind] = step, Reference(in_fp64(theirs), DOCUMENTS).step(PACKS, "token", {})
    return found


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_step_equals_that_of_peft_with_bitsandbytes(kind, layout, found, expected):
    (step, _), (theirs, exact) = found[layout][0][kind], expected[kind]
    theirs.assert_taken(step, loss=1e-6)
    rounding = max(exact.gradient_errors(theirs.gradients).values())  # of fp32
    assert max(exact.gradient_errors(step.gradients).values()) < max(1e-6, 2 * rounding)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_holds_its_share_of_rows_in_four_bits(kind, found):
    kept = found["two ranks"][1][kind][1]
    packed = {name: of for name, of in kept.items() if of[0] == torch.uint8}
    numbers = sum(2 * shape.numel() for name, (_, shape, _) in packed.items() if not name.endswith("_absmax"))
    assert sum(size for *_, size in packed.values()) / numbers <= 0.57 / 2
    assert not [name for name in packed if any(part in name for part in ("embed", "lm_head", "norm", "router"))]
    linear = [name for name, of in kept.items() if name.endswith("proj.weight") or "base_layer.weight" in name]
    assert not [name for name in linear if kept[name][0] != torch.uint8 and "lm_head" not in name]


def test_a_step_has_the_flops_of_its_numbers_and_trains_no_packed_parameter():
    config = Qwen3MoeConfig(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    before = train_flops(model, config)
    quantize_rest(model, nested=False)
    assert {layer.weight.dtype for layer in model.modules() if isinstance(layer, NF4Linear)} == {torch.uint8}
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.uint8
    assert train_flops(model, config) == before
    optim = OmegaConf.create({"optimizer": "AdamW", "lr": 1.0, "weight_decay": 0.0, "decay": "matrices", "lr_of": {}})
    grouped = [parameter for group in parameter_groups(model, optim) for parameter in group["params"]]
    assert {parameter.is_floating_point() for parameter in grouped} == {True}
