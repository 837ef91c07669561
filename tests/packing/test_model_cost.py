"""The cost model of data.cost=flops against the operations that torch counts in a real forward pass."""

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from verl_ext.engines.cost import balancing_cost

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
HEADS = {"num_key_value_heads": 2, "head_dim": 32}


def cost_of(config, ranks=1):
    with torch.device("meta"):
        return balancing_cost(transformers.AutoModelForCausalLM.from_config(config), config, ranks)


def counted(model, tokens):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.int64))
    return counter.get_total_flops()


def test_the_ratio_is_that_of_the_operations_that_torch_counts():
    config = transformers.Qwen3Config(**SIZES, **HEADS, intermediate_size=160, attn_implementation="eager")
    model = transformers.Qwen3ForCausalLM(config)
    short, long = counted(model, 32), counted(model, 64)
    quadratic = (long - 2 * short) / (64**2 - 2 * 32**2)  # of eager attention, which also computes masked scores
    linear = short / 32 - quadratic * 32
    cost = cost_of(config)
    unit = 2 * 4 * 32
    assert cost.quadratic * unit * 2 == quadratic
    assert cost.linear * unit == pytest.approx(linear, abs=unit / 2)


def test_without_attention_every_token_costs_the_same():
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=96)
    assert cost_of(config).documents([5, 7]).tolist() == [5, 7]


def test_sequence_parallelism_adds_its_communication_to_every_token_and_its_zero_heads_what_they_compute():
    config = transformers.Qwen3Config(**SIZES, **HEADS, intermediate_size=160)
    alone, shared, wide = (cost_of(config, ranks) for ranks in (1, 2, 4))
    assert alone.linear < shared.linear < wide.linear
    assert alone.quadratic == shared.quadratic == wide.quadratic
    config = transformers.LlamaConfig(hidden_size=100, num_attention_heads=25, intermediate_size=10**6, vocab_size=2)
    alone, shared = (cost_of(config, ranks).linear for ranks in (1, 8))
    assert shared / alone == pytest.approx(25 / 32, rel=0.01)  # in units of one layer's attention


def test_a_token_costs_the_experts_that_it_visits():
    dense = transformers.Qwen3Config(**SIZES, **HEADS, intermediate_size=160)
    sparse = transformers.Qwen3MoeConfig(
        **SIZES, **HEADS, intermediate_size=999, moe_intermediate_size=40, num_experts_per_tok=4, num_experts=64
    )
    found, expected = cost_of(sparse), cost_of(dense)
    assert found.quadratic == expected.quadratic
    router = 3 * 64 * 64 * 2 / (2 * 4 * 32)  # in units of one layer's attention
    assert found.linear == pytest.approx(expected.linear + router, abs=1)


def test_a_window_costs_its_width_in_layers_of_its_kind_or_in_every_layer():
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    windows = {"use_sliding_window": True, "sliding_window": 16, "layer_types": kinds}
    cost = cost_of(transformers.Qwen3Config(**SIZES, **HEADS, intermediate_size=160, **windows))
    assert (cost.quadratic, cost.windowed, cost.window) == (1, 2, 16)
    cost = cost_of(transformers.MistralConfig(**SIZES, **HEADS, sliding_window=16))
    assert (cost.quadratic, cost.windowed, cost.window) == (0, 3, 16)


@pytest.mark.parametrize("config", [transformers.GPT2Config(), transformers.LlamaConfig()])
def test_configs_without_head_or_mlp_sizes_have_a_cost(config):
    assert cost_of(config).linear > 0


def test_a_model_of_unknown_flops_has_no_cost():
    config = transformers.Qwen3MoeConfig(**SIZES, **HEADS, num_experts=8, num_experts_per_tok=2, intermediate_size=9)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert balancing_cost(model, config, 1) is not None
    config.num_experts = 7  # not what the matrices show
    assert balancing_cost(model, config, 1) is None
