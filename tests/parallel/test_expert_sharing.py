"""Experts shared among ranks: which models can, what is refused before weights, and the exchange by itself."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh
from transformers import Qwen3Config, Qwen3MoeConfig

from tests.lib.checked import checked
from tests.lib.errors import refused
from tests.lib.model_types import each_tried
from tests.lib.ranks import run_cases
from tests.lib.small_models import KINDS, model_class, model_config
from verl_ext.config.compose import compose
from verl_ext.layers.experts import has_experts
from verl_ext.layers.trial import shrunk, trial_model
from verl_ext.parallel.experts import choose_exchange, expert_layers, own_code_layers, share_experts

RANKS = 2
ATTENTION = {"deepseek_ocr2", "deepseek_v4", "glm_moe_dsa"}  # refused for their attention
SPARSE = {  # fields of types whose default config, or its first layers, are dense
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    "glm_moe_dsa": {"mlp_layer_types": ["sparse"] * 78},
}
OTHER_TASKS = {"OpenAIPrivacyFilterExperts", "Qwen3OmniMoeTalkerTextExperts"}  # of classes for labels, and for speech
OWN_CODE = {"aria_text", "granitemoe", "granitemoehybrid", "jetmoe", "llama4_text", "longcat_flash"}


def config_of(kind):
    """Return a type's config with experts in its first layers, if the type has them."""
    config = model_config(kind)
    config.update(SPARSE.get(kind, {}))
    return config


def decorated():
    """Return the classes whose experts transformers calls through its table of functions."""
    folder, found = Path(transformers.__file__).parent / "models", set()
    for file in folder.glob("*/modeling_*.py"):
        found |= {*re.findall(r"^@use_experts_implementation.*\n(?:@.*\n)*class (\w+)", file.read_text(), re.MULTILINE)}
    return found


def small(kind):
    """Build a small model of a type without weights; None if transformers builds none of its defaults."""
    try:
        with torch.device("meta"):
            return model_class(kind)(shrunk(config_of(kind)))
    except Exception:
        return None


def off(kind):
    """Return the largest error of a model's first forward with shared experts; raise if a layer does not exchange."""
    model = trial_model(config_of(kind), model_class(kind)).float().eval()
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(3, 60, (1, 7 + 4 * dist.get_rank()))
    arguments = {"input_ids": ids, "attention_mask": None, "use_cache": False}
    mesh = DeviceMesh("cpu", torch.arange(RANKS), mesh_dim_names=("ep",))
    with torch.no_grad():
        expected = model(**arguments).logits
        for layer in expert_layers(model):
            share_experts(layer, mesh)
        choose_exchange(model)
        found = model(**arguments).logits
    assert any(layer.expert_share.is_met for layer in expert_layers(model))  # not all: some are of images alone
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
def test_every_type_whose_experts_are_stacked_exchanges_in_its_first_forward():
    models = {kind: model for kind in KINDS if (model := small(kind)) is not None and has_experts(model)}
    stacked = [kind for kind, model in models.items() if any(expert_layers(model)) and not own_code_layers(model)]
    assert len(stacked) >= 35
    assert not OWN_CODE & {*stacked}
    classes = {type(layer).__name__ for kind in stacked for layer in expert_layers(models[kind])}
    assert decorated() - classes == OTHER_TASKS
    for found in run_cases({"all": (RANKS, each_tried, off, sorted({*stacked} - ATTENTION))})["all"]:
        assert not {kind: off for kind, off in found.items() if isinstance(off, str) or off > 1e-5}


def replaced():
    """Return the refusal of a layer whose forward another library has replaced."""
    model = trial_model(model_config("qwen3_moe"), model_class("qwen3_moe")).eval()
    for layer in expert_layers(model):
        share_experts(layer, DeviceMesh("cpu", torch.arange(RANKS), mesh_dim_names=("ep",)))
        layer.forward = lambda hidden, *_: hidden
    choose_exchange(model)
    with refused("parallel.expert_parallel", "Qwen3MoeExperts", "forward", 2):
        model(input_ids=torch.arange(3, 9)[None], use_cache=False)


def test_a_layer_whose_forward_is_replaced_is_refused():
    run_cases({"replaced": (RANKS, replaced)})


MOE = Qwen3MoeConfig(
    num_experts=6, num_hidden_layers=2, moe_intermediate_size=24, hidden_size=64, num_attention_heads=4
)
DENSE = Qwen3Config(num_hidden_layers=1)
REFUSED = [  # value, other overrides, ranks, config, what the line names
    (2, "", 1, MOE, ("ranks", "2 with 1")),
    (4, "", 6, MOE, ("ranks", "4 with 6")),
    (4, "engine.fsdp_size=2", 4, MOE, ("engine.fsdp_size", "4 with 2")),
    (4, "", 4, MOE, ("6 experts", "Qwen3MoeConfig", "got 4")),
    (2, "", 2, DENSE, ("Qwen3Config", "got 2")),
    (2, "model=qwen_titans", 2, DENSE, ("model=qwen_titans", "got 2")),
    (2, "", 20, MOE, ("48 rows", "2 of 20 ranks")),
]


@pytest.mark.parametrize(("ranks", "more", "world_size", "hf_config", "things"), REFUSED)
def test_a_number_that_does_not_fit_is_refused_in_one_line_before_weights_are_read(
    ranks, more, world_size, hf_config, things
):
    overrides = [f"parallel.expert_parallel={ranks}", *more.split(), f"data.train_batch_size={world_size}"]
    config = compose(["model.path=unused", "data.train_dir=unused", *overrides])
    with refused("parallel.expert_parallel", *things, alone=False):
        checked(config, world_size, hf_config=hf_config)


@pytest.mark.parametrize("kind", sorted(OWN_CODE))
def test_experts_that_run_their_own_code_are_refused_by_name(kind):
    config = compose(["model.path=unused", "data.train_dir=unused", "parallel.expert_parallel=2"])
    hf_config = shrunk(model_config(kind))
    with refused("parallel.expert_parallel", type(hf_config).__name__, alone=False):
        checked(config, 2, hf_config=hf_config)


def test_muon_is_refused_where_ranks_cut_experts():
    words = ["parallel.expert_parallel=2", "optim.optimizer=Muon", "data.train_batch_size=8", "optim.lr=1e-4"]
    config = compose(["model.path=unused", "data.train_dir=unused", *words])
    with refused("optim.optimizer", "4 ranks", "3 experts", "Muon", alone=False):
        checked(config, 8, hf_config=MOE)
