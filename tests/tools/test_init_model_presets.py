"""The presets of `verl-ext init-model`, built without memory for their weights."""

from typing import Any

import pytest

from tests.lib.checked import support_problems
from verl_ext.engines.router import asks_for_router_loss
from verl_ext.tools.init_model.model import PRESETS, count_parameters, meta_model, random_model

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


def config_of(model: str, **changes: object) -> Any:
    return meta_model(model, changes, "float32", 300).config


def test_a_preset_has_the_parameters_that_it_claims():
    models = {name: meta_model(name, {}, "float32", 6400, eos_token_id=2, pad_token_id=0) for name in PRESETS}
    assert {name: count_parameters(model) for name, model in models.items()} == COUNTS
    assert not any(support_problems(model.config) for model in models.values())


def test_minimind_is_as_its_authors_make_it():
    # MiniMind, and scripts/convert_model.py of MiniMind-3 with the defaults of MiniMindConfig.
    both = {"hidden_size": 768, "intermediate_size": 2432, "num_hidden_layers": 8, "num_attention_heads": 8}
    both |= {"num_key_value_heads": 4, "head_dim": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 2432, "norm_topk_prob": True}
    first = {"num_hidden_layers": 16, "intermediate_size": 2048, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    presets = {"minimind_104m": {**both, **first}, "minimind3_64m": both, "minimind3_moe_198m": {**both, **experts}}
    for name, expected in presets.items():
        config = config_of(name)
        assert {key: getattr(config, key) for key in expected} == expected
        assert (config.rope_parameters["rope_theta"], config.tie_word_embeddings) == (1e6, True)
    moe = meta_model("minimind3_moe_198m", {}, "float32", 6400)
    unused = sum(x.numel() for name, x in moe.named_parameters() if ".mlp.experts." in name) * 3 // 4
    assert moe.num_parameters() - unused == 63_936_768  # per token: the A64M of 198M-A64M
    assert asks_for_router_loss(config)
    config = config_of("minimind_moe_145m")
    assert (config.num_experts, config.num_experts_per_tok, config.shared_expert_intermediate_size) == (4, 2, 1728)
    assert asks_for_router_loss(config)


def test_gpt2_has_learned_positions_and_dropout_and_residual_outputs_smaller_by_the_root_of_their_number():
    config = config_of("gpt2_124m")
    assert (config.n_positions, config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (1024, 0.1, 0.1, 0.1)
    model = random_model(config_of("gpt2_124m", n_embd=192, n_layer=8, vocab_size=None), 0, "float32")
    spread = {name: float(weight.std()) for name, weight in model.named_parameters()}
    for layer in range(8):
        for name, size in {"attn.c_attn": 1, "attn.c_proj": 4, "mlp.c_fc": 1, "mlp.c_proj": 4}.items():  # √(2·8)
            assert spread[f"transformer.h.{layer}.{name}.weight"] == pytest.approx(0.02 / size, rel=0.03)


@pytest.mark.parametrize(
    ("model", "changes", "expected"),
    [
        ("saved", {"hidden_size": 64, "num_hidden_layers": 5}, {"head_dim": 16, "layer_types": ["full_attention"] * 5}),
        ("saved", {"num_attention_heads": 8}, {"head_dim": 24}),
        ("tiny", {"hidden_size": 64, "head_dim": 32}, {"head_dim": 32}),
        ("qwen3_0.6b", {"hidden_size": 512}, {"head_dim": 128}),  # not hidden_size / heads in the preset either
        ("minimind_104m", {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            "minimind_104m",
            {"rope_parameters": {"rope_theta": 5e5}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        ),
        ("gpt2_124m", {"num_hidden_layers": 2}, {"n_layer": 2}),  # as other architectures name it
    ],
)
def test_what_followed_from_a_changed_size_follows_it_and_a_key_has_its_other_names(model, changes, expected, tmp_path):
    if model == "saved":  # a config.json has head_dim and layer_types
        config_of("tiny").save_pretrained(model := str(tmp_path))
    config = config_of(model, **{"vocab_size": None, **changes})
    assert {key: getattr(config, key) for key in expected} == expected
