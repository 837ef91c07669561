"""The presets of `verl-ext init-model`, built without memory for their weights."""

import pytest

from tests.checked import support_problems
from verl_ext.engines.router import asks_for_router_loss
from verl_ext.tools.init_model.model import (
    PRESETS,
    changed,
    count_parameters,
    fitted,
    hf_config,
    meta_model,
    random_model,
    read_fields,
)

# Parameters with and without embeddings, at MiniMind's vocabulary of 6,400 if the preset names none.
COUNTS = {
    "tiny": (2_557_536, 1_328_736),
    "small_10m": (9_425_440, 7_377_440),
    "minimind_104m": (104_030_976, 99_115_776),
    "minimind_moe_145m": (145_034_880, 140_938_880),
    "minimind3_64m": (63_912_192, 58_996_992),
    "minimind3_moe_198m": (198_416_640, 193_501_440),
    "qwen3_0.6b": (596_049_920, 440_467_456),
    "gpt2_124m": (124_439_808, 85_056_000),
}


def test_every_preset_has_its_counts_here():
    assert set(COUNTS) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_that_it_claims(name):
    config = hf_config(fitted(read_fields(name), 6400, {"eos_token_id": 2, "pad_token_id": 0}))
    assert count_parameters(meta_model(config)) == COUNTS[name]
    assert support_problems(config) == []


def test_minimind_is_as_wide_and_deep_as_minimind():
    config = hf_config(fitted(read_fields("minimind_104m"), 6400, {}))
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (768, 16, 2048)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 2, 96)
    assert (config.rope_parameters["rope_theta"], config.tie_word_embeddings) == (1e6, True)


def test_minimind_3_is_as_its_authors_convert_it():
    # scripts/convert_model.py of MiniMind-3 with the defaults of MiniMindConfig.
    both = {"hidden_size": 768, "intermediate_size": 2432, "num_hidden_layers": 8, "num_attention_heads": 8}
    both |= {"num_key_value_heads": 4, "head_dim": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 2432, "norm_topk_prob": True}
    for name, expected in {"minimind3_64m": both, "minimind3_moe_198m": {**both, **experts}}.items():
        config = hf_config(fitted(read_fields(name), 6400, {}))
        assert {key: getattr(config, key) for key in expected} == expected
        assert (config.rope_parameters["rope_theta"], config.tie_word_embeddings) == (1e6, True)
    moe = meta_model(config)
    unused = sum(x.numel() for name, x in moe.named_parameters() if ".mlp.experts." in name) * 3 // 4
    assert moe.num_parameters() - unused == 63_936_768  # per token: the A64M of 198M-A64M
    assert asks_for_router_loss(config)


def test_gpt2_has_learned_positions_and_dropout():
    config = hf_config(fitted(read_fields("gpt2_124m"), 6400, {}))
    assert (config.n_positions, config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (1024, 0.1, 0.1, 0.1)


def test_gpt2s_residual_outputs_start_smaller_by_the_root_of_their_number():
    config = hf_config(fitted(changed(read_fields("gpt2_124m"), {"n_embd": 192, "n_layer": 8}), 300, {}))
    spread = {name: float(weight.std()) for name, weight in random_model(config, 0, "float32").named_parameters()}
    for layer in range(8):
        for name, size in {"attn.c_attn": 1, "attn.c_proj": 4, "mlp.c_fc": 1, "mlp.c_proj": 4}.items():  # √(2·8)
            assert spread[f"transformer.h.{layer}.{name}.weight"] == pytest.approx(0.02 / size, rel=0.03)


def test_the_mixture_of_experts_is_minimind_s_and_has_its_router_loss():
    config = hf_config(fitted(read_fields("minimind_moe_145m"), 6400, {}))
    assert (config.num_experts, config.num_experts_per_tok, config.shared_expert_intermediate_size) == (4, 2, 1728)
    assert asks_for_router_loss(config)


def test_head_size_and_layer_types_follow_where_they_followed():
    tiny = read_fields("tiny")
    saved = hf_config(
        fitted(tiny, 300, {})
    ).to_dict()  # with a head_dim and a layer_types of 3, as a config.json has them
    config = hf_config(fitted(changed(saved, {"hidden_size": 64, "num_hidden_layers": 5}), 300, {}))
    assert (config.head_dim, len(config.layer_types)) == (16, 5)
    config = hf_config(fitted(changed(tiny, {"hidden_size": 64, "head_dim": 32}), 300, {}))
    assert config.head_dim == 32
    config = hf_config(fitted(changed(read_fields("qwen3_0.6b"), {"hidden_size": 512}), 300, {}))
    assert config.head_dim == 128  # not hidden_size / heads in the preset either


def test_rope_theta_is_known_by_its_old_name_and_inside_rope_parameters():
    fields = read_fields("minimind_104m")
    for changes in {"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}:
        config = hf_config(fitted(changed(fields, changes), 300, {}))
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_a_key_may_be_named_as_other_architectures_name_it():
    config = hf_config(fitted(changed(read_fields("gpt2_124m"), {"num_hidden_layers": 2}), 300, {}))
    assert config.n_layer == 2
