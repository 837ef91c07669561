"""Muon over FSDP2's shards: torch's own on one process to the last bit, resumes on other ranks, embeddings by AdamW."""

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, MambaConfig, MixtralConfig, Phi3Config

from tests.lib.errors import names
from tests.lib.ranks import run_cases
from tests.lib.small_models import model_class, model_config
from tests.lib.tiny_model import write_tiny_model
from tests.lib.training import (
    differences,
    into,
    metrics,
    refusals,
    resume_run,
    small_run,
    tensors_of,
    train_alone,
    train_twice,
)
from verl_ext.engines.muon import MATRICES
from verl_ext.engines.optimizer import built_optimizer, parameter_groups
from verl_ext.layers.trial import shrunk

SHAPES = [(8, 6), (5, 12), (1, 7), (7, 3), (3, 4, 6), (6,), (16, 16)]  # a rank may have none of a matrix's rows
STEPS = 3
MUON = "optim.optimizer=Muon"


def options(**given: Any) -> Any:
    of_verl = {"optimizer": "Muon", "optimizer_impl": "torch.optim", "lr": 0.1, "betas": (0.8, 0.9)}
    return SimpleNamespace(**of_verl, weight_decay=0.2, override_optimizer_config=given)


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def after_steps(**given: Any) -> list[torch.Tensor]:
    """Return a rank's whole parameters after steps over its shards."""
    model = nn.Module()
    for number, tensor in enumerate(values(0)):
        model.register_parameter(f"p{number}", nn.Parameter(tensor))
    has_replicas = dist.get_world_size() == 4
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")) if has_replicas else None)
    parameters: list[Any] = list(model.parameters())
    groups = [{"params": [p], MATRICES: p.ndim > 1} for p in parameters]
    optimizer = built_optimizer(groups, options(**given))
    for step in range(1, STEPS + 1):
        for parameter, gradient in zip(parameters, values(step), strict=True):
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        optimizer.step()
    return [parameter.full_tensor().detach() for parameter in parameters]


def of_torch(adjust: str, **given: Any) -> list[torch.Tensor]:
    """Return what torch's own optimizers make of the whole parameters, of experts one by one."""
    parameters, experts = [], []
    for tensor in values(0):
        experts.append([nn.Parameter(expert) for expert in (tensor if tensor.ndim == 3 else [tensor])])
        parameters += experts[-1]
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    muon = torch.optim.Muon(matrices, 0.1, 0.2, adjust_lr_fn=adjust, **given)
    adamw = torch.optim.AdamW([p for p in parameters if p.ndim == 1], 0.1, (0.8, 0.9), weight_decay=0.2)
    for step in range(1, STEPS + 1):
        for parts, gradient in zip(experts, values(step), strict=True):
            for part, of_part in zip(parts, gradient if gradient.ndim == 3 else [gradient], strict=True):
                part.grad = of_part.clone()
        muon.step()
        adamw.step()
    with torch.no_grad():
        return [torch.stack(list(parts)) if len(parts) > 1 else parts[0].clone() for parts in experts]


OPTIONS = {"match_rms_adamw": {}, "original": {"momentum": 0.5, "nesterov": False, "ns_steps": 3}}  # the first: default


@pytest.fixture(scope="module")
def found():
    """Return each rank's parameters after steps with options."""
    cases = {}
    for ranks, (adjust, given) in itertools.product((1, 2, 3, 4), OPTIONS.items()):
        cases[ranks, adjust] = (ranks, partial(after_steps, **(given and {"adjust_lr_fn": adjust, **given})))
    return run_cases(cases)


@pytest.mark.parametrize("adjust", OPTIONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_steps_over_shards_have_the_bits_of_torchs_muon_and_adamw_on_one_process(ranks, adjust, found):
    for parameters in found[ranks, adjust]:
        for mine, its in zip(parameters, of_torch(adjust, **OPTIONS[adjust]), strict=True):
            assert torch.equal(mine, its)


def test_the_momentum_of_weights_in_bf16_is_a_sum_of_gradients():
    parameter = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    optimizer = built_optimizer([{"params": [parameter], MATRICES: True}], options(nesterov=False, momentum=0.5))
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.full_like(parameter, 0.75))


def named_groups(model: Any, optim: Any) -> dict[bool, set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: dict[bool, set[str]] = {True: set(), False: set()}
    for group in parameter_groups(model, optim):
        assert isinstance(group, dict)
        groups[group[MATRICES]] |= {names[id(parameter)] for parameter in group["params"]}
    return groups


def test_matrices_of_layers_and_experts_are_muons_and_the_rest_is_adamws():
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "intermediate_size": 32}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    optim = SimpleNamespace(**vars(options()), decay="matrices", lr_of={})
    with torch.device("meta"):
        mixture = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads, num_local_experts=4))
        mamba = AutoModelForCausalLM.from_config(MambaConfig(**sizes, state_size=4, tie_word_embeddings=False))
    groups, layer = named_groups(mixture, optim), "model.layers.0"
    of_attention = {f"{layer}.self_attn.{name}_proj.weight" for name in "qkvo"}
    of_experts = {f"{layer}.mlp.{name}" for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")}
    assert groups[True] == of_attention | of_experts
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} < groups[False]
    groups, mixer = named_groups(mamba, optim), "backbone.layers.0.mixer"
    assert groups[True] == {f"{mixer}.{name}_proj.weight" for name in ("in", "x", "dt", "out")}
    assert {f"{mixer}.A_log", f"{mixer}.conv1d.weight", "backbone.embeddings.weight"} < groups[False]


FUSED = {  # parts by the weight's name, as the layers of transformers split what the weights give
    "phi3": {
        "self_attn.qkv_proj.weight": lambda c: [c.num_attention_heads * 16, *[c.num_key_value_heads * 16] * 2],
        "mlp.gate_up_proj.weight": lambda c: [c.intermediate_size] * 2,
    },
    "qwen3_5_text": {"linear_attn.in_proj_qkv.weight": lambda c: _of_linear_attention(c)},
    "qwen3_moe": {"mlp.experts.gate_up_proj": lambda c: [c.moe_intermediate_size] * 2},
    "gpt_oss": {"mlp.experts.gate_up_proj": lambda c: [c.intermediate_size] * 2},
}


def _of_linear_attention(config: Any) -> list[int]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return [keys, keys, config.linear_num_value_heads * config.linear_value_head_dim]


def split_by_hand(name: str, weight: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Return the matrices that a fused weight joins; GPT-OSS has a column of the gate and one of up in turn."""
    matrices = weight if weight.ndim == 3 else [weight]
    if name == "gpt_oss":
        return [matrix[:, first::2] for matrix in matrices for first in (0, 1)]
    return [part for matrix in matrices for part in matrix.split(sizes)]


def fused_model(kind: str) -> Any:
    torch.manual_seed(0)
    model = model_class(kind)(shrunk(model_config(kind)))
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def fused_step(kind: str) -> dict[str, torch.Tensor]:
    """Return a rank's fused weights after a step with gradients that equal the weights of another seed."""
    model, before = fused_model(kind), {}
    for name, parameter in model.named_parameters():
        before[name] = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    fully_shard(model)
    optim = SimpleNamespace(**vars(options()), decay="all", lr_of={}, split_fused=True)
    optimizer = built_optimizer(parameter_groups(model, optim), optim)
    for name, parameter in model.named_parameters():
        placed: Any = parameter
        parameter.grad = distribute_tensor(before[name], placed.device_mesh, placed.placements)
    optimizer.step()
    named: dict[str, Any] = dict(model.named_parameters())
    return {name: named[name].full_tensor().detach() for name in named if name.endswith(tuple(FUSED[kind]))}


@pytest.fixture(scope="module")
def fused():
    """Return each rank's fused weights after a step, by kind and number of ranks."""
    return run_cases({(kind, ranks): (ranks, fused_step, kind) for kind in FUSED for ranks in (1, 2, 4)})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", FUSED)
def test_split_projections_step_as_torchs_muon_over_parts_that_are_matrices_of_their_own(kind, ranks, fused):
    model = fused_model(kind)
    named, (mine, *_) = dict(model.named_parameters()), fused[kind, ranks]
    assert mine
    for name, found in mine.items():
        sizes = next(sizes for end, sizes in FUSED[kind].items() if name.endswith(end))(model.config)
        gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(len(name)))
        parts = [nn.Parameter(part.detach().clone()) for part in split_by_hand(kind, named[name], sizes)]
        for part, of_part in zip(parts, split_by_hand(kind, gradient, sizes), strict=True):
            part.grad = of_part.clone()
        torch.optim.Muon(parts, 0.1, 0.2, adjust_lr_fn="match_rms_adamw").step()
        for part, of_part in zip(parts, split_by_hand(kind, found, sizes), strict=True):
            assert torch.equal(part, of_part), name


@pytest.mark.slow
def test_a_run_is_torchs_muon_and_adamw_and_its_resume_is_exact_also_on_another_number_of_ranks(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    more = (MUON, "optim.weight_decay=0.5", "optim.decay=matrices", "optim.lr_of={layers.0: 2}")
    run = small_run(tmp_path, model, [30] * 8, *more, "trainer.total_training_steps=3", "trainer.save_freq=1")
    whole, resumed, alone = (tmp_path / name for name in ("whole", "resumed", "alone"))
    run_cases({"whole": (2, train_twice, run, whole, resumed), "alone": (1, resume_run, run, whole, alone, 1)})
    assert differences(resumed, whole, 3) == []
    for step in (2, 3):
        assert metrics(alone)[step, "train/loss"] == pytest.approx(metrics(whole)[step, "train/loss"], rel=1e-4)
    # The momentum of a checkpoint gives the gradients of its steps, which torch's own optimizers take.
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    named, groups, before = dict(module.named_parameters()), ([], []), {}
    for name, parameter in named.items():
        factor = 2.0 if ".layers.0." in name else 1.0
        is_hidden = parameter.ndim == 2 and ".layers." in name
        decay = 0.5 if parameter.ndim == 2 else 0.0
        groups[is_hidden].append({"params": [parameter], "lr": 1e-2 * factor, "weight_decay": decay})
    optimizers = [torch.optim.AdamW(groups[False]), torch.optim.Muon(groups[True], adjust_lr_fn="match_rms_adamw")]
    for step in (1, 2, 3):
        state = tensors_of(whole / f"global_step_{step}")
        for name, parameter in named.items():
            key, keeps = ("momentum_buffer", 0.95) if ".layers." in name and parameter.ndim == 2 else ("exp_avg", 0.9)
            average = state[f"optimizer.{name}.{key}"]
            parameter.grad = (average - keeps * before.get(name, torch.zeros_like(average))) / (1 - keeps)
            before[name] = average
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in named.items():
            torch.testing.assert_close(parameter.detach(), state[f"model.{name}"], rtol=1e-3, atol=1e-4)


def test_options_that_neither_takes_are_refused_in_one_line(tiny_model, tmp_path):
    run = [*small_run(tmp_path, tiny_model, [30] * 4), into(tmp_path / "run"), MUON]
    given = ["{adjust_lr_fn: none}", "{warmth: 1}", "{momentum: 0.9, eps: 1e-9, ns_steps: 4}"]
    told = refusals(run, [[f"optim.override_optimizer_config={each}"] for each in given])
    assert names(told[0], "optim.override_optimizer_config", "Muon", "{'adjust_lr_fn': 'none'}")
    assert names(told[1], "optim.override_optimizer_config", "Muon", "{'warmth': 1}")
    assert told[2] == ""


@pytest.mark.slow
def test_a_run_with_split_projections_resumes_exactly_also_on_another_number_of_ranks(tmp_path):
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = write_tiny_model(tmp_path / "model", 0, Phi3Config, **tokens)
    more = (MUON, "optim.split_fused=true", "trainer.total_training_steps=3", "trainer.save_freq=1")
    run = small_run(tmp_path, model, [30] * 8, *more)
    whole, resumed, alone = (tmp_path / name for name in ("whole", "resumed", "alone"))
    other = [word for word in run if not word.startswith("optim.split")]
    cases = {"whole": (2, train_twice, run, whole, resumed), "alone": (1, resume_run, run, whole, alone, 1)}
    run_cases({**cases, "joined": (2, train_alone, [*other, into(tmp_path / "joined")])})
    assert differences(resumed, whole, 3) == []
    losses = [metrics(folder)[3, "train/loss"] for folder in (whole, alone, tmp_path / "joined")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] != pytest.approx(losses[0], rel=1e-6)
    (line,) = refusals([*other, into(tmp_path / "other")], [["optim.split_fused=true", "optim.optimizer=AdamW"]])
    assert names(line, "optim.split_fused", "optim.optimizer=Muon", "true with AdamW")
