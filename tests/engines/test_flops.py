"""Model FLOPs against the operations that torch counts in a real model, and the peaks of GPUs."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.lib.tensor_calls import counted
from verl_ext.flops import GPUS, peak_flops, train_flops
from verl_ext.layers import mixers_of

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512}
HEADS = {"num_key_value_heads": 2, "head_dim": 32}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "num_experts": 8}
LENGTHS = (40, 130, 250)  # documents of a pack
MODELS = {
    "llama": LlamaConfig(**SIZES, intermediate_size=160, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZES, **HEADS, intermediate_size=160, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=512),
    "mixture of experts": Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, intermediate_size=99),
    "dense and sparse layers": Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, intermediate_size=160, mlp_only_layers=[0]),
}


def built(config):
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # one product for each expert, which the counter knows
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("kind", MODELS)
def test_flops_are_those_that_torch_counts_document_by_document(kind):
    model = built(MODELS[kind])
    flops = train_flops(model, model.config)
    assert flops.documents(LENGTHS).sum() == pytest.approx(counted(model, LENGTHS), rel=0.02)


@pytest.mark.parametrize("kind", MODELS)
def test_what_checkpointing_computes_again_is_counted_on_request(kind):
    model = built(MODELS[kind]).train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    model.gradient_checkpointing_enable()
    flops = train_flops(model, model.config, recomputes=True).documents(LENGTHS).sum()
    assert 0.99 < flops / counted(model, LENGTHS) < 1.07  # torch leaves out the last matrix of each layer


def test_a_matrix_that_is_not_trained_has_no_gradient_of_its_own():
    model = built(MODELS["qwen3"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "embed" in name)
    whole = train_flops(built(MODELS["qwen3"]), model.config)
    flops = train_flops(model, model.config)
    assert flops.documents(LENGTHS).sum() == pytest.approx(counted(model, LENGTHS), rel=0.02)
    assert flops.linear < 0.9 * whole.linear


def test_latent_attention_has_the_sizes_of_its_keys_and_values():
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 32, "q_lora_rank": 24, "kv_lora_rank": 20}
    config = DeepseekV3Config(
        **SIZES, **sizes, num_key_value_heads=4, intermediate_size=160, first_k_dense_replace=3, n_routed_experts=8
    )
    model = built(config)
    flops = train_flops(model, config)
    assert flops.documents(LENGTHS).sum() == pytest.approx(counted(model, LENGTHS), rel=0.02)


def test_a_recurrent_layer_has_a_state_and_no_square():
    linear = {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8}
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    config = Qwen3NextConfig(
        **SIZES, **HEADS, **EXPERTS, **linear, linear_num_key_heads=2, layer_types=kinds, intermediate_size=160
    )
    model = built(config)
    states = sum(mixer.state_flops(layer) for layer, mixer in mixers_of(model))
    assert states == 2 * 6 * 4 * 16 * 8
    flops, without = train_flops(model, config, states), train_flops(model, config)
    assert flops.linear - without.linear == 3 * states
    assert flops.quadratic == 3 * 4 * 2 * 32  # of one layer


def test_a_window_counts_what_it_covers():
    config = LlamaConfig(**SIZES, intermediate_size=160)
    config.sliding_window = 16
    model = built(config)
    flops = train_flops(model, config)
    assert (flops.quadratic, flops.windowed, flops.window) == (0, 3 * 3 * 4 * 2 * 16, 16)


def test_experts_that_the_config_does_not_describe_have_no_flops():
    config = Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, intermediate_size=99)
    model = built(config)
    config.num_experts = 7
    assert train_flops(model, config) is None


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A40-48Q", 149.7e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H800 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA RTX A1000", None),
        ("RTX A3000", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA L400", None),
        ("AMD Radeon", None),
    ],
)
def test_a_device_has_the_peak_of_its_data_sheet_or_none(device, peak):
    assert peak_flops(device) == peak


def test_each_gpu_that_a_plan_knows_has_a_peak():
    assert [name for name in GPUS if peak_flops(name) is None] == []
    assert (peak_flops("H20-96G"), peak_flops("H200-141G"), peak_flops("A800-80G")) == (148e12, 989e12, 312e12)
