"""A small config with every kind of layer, for quick trials."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

# Sizes by their names in the configs of transformers. Names that a config lacks are left out.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 256),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size", "dim"),
        64,
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "n_head_kv", "num_kv_heads", "num_global_key_value_heads", "kv_n_heads"), 2
    ),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "ffn_hidden_size", "dim_ff"), 96),
    **dict.fromkeys(("intermediate_size_mlp",), 96),
    **dict.fromkeys(
        (
            *("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"),
            *("shared_intermediate_size", "moe_shared_expert_intermediate_size"),
        ),
        32,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts", "num_experts_per_token"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts", "zero_expert_num"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
    **{"qk_head_dim": 16, "index_topk": 8, "index_n_heads": 4, "index_head_dim": 16},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
    **{"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16},
    **{"mamba_dt_rank": 4, "mamba_d_ssm": 128, "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_expand": 2},
    # Heads times their size is the hidden size in Mamba 2, and twice that in Zamba.
    **{"expand": 1, "attention_hidden_size": 128, "attention_head_dim": 32},
    **{"ssm_state_size": 8, "state_size": 8, "time_step_rank": 4, "n_mamba_heads": 8, "mamba_headdim": 16},
    **{"n_groups": 2, "mamba_ngroups": 2, "chunk_size": 16, "lru_width": 64, "block_size": 8},
    **{"hidden_size_per_layer_input": 8, "laurel_rank": 8, "altup_num_inputs": 2},
    # Windows and chunks are shorter than the documents of the trial.
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "n_ctx", "max_sequence_length"), 512),
    **{"floor_scale": 4, "num_nextn_predict_layers": 0, "num_kv_shared_layers": 0},
}
_TOWER_SIZES: dict[str, Any] = {  # of vision and audio towers, which text does not reach
    **{"hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "num_hidden_layers": 2, "depth": 2, "head_dim": 16},
    **{"num_attention_heads": 2, "num_heads": 2, "num_key_value_heads": 2, "patch_size": 4, "image_size": 8},
    **{"out_hidden_size": 64, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
    **{"num_position_embeddings": 16, "position_embedding_size": 16, "deepstack_visual_indexes": [0]},
    **{"fullatt_block_indexes": [0], "window_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2},
    **{"projector_dim": 64, "global_head_dim": 16, "default_output_length": 4, "pooling_kernel_size": 2},
    **{"num_soft_tokens": 4, "layer_types": None, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2},
    **{"encoder_ffn_dim": 48, "output_dim": 64, "downsample_hidden_size": 16},
}
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
_KINDS = ("layer_types", "layers_block_type", "block_types", "no_rope_layers")
_INDICES = ("hybrid_layer_ids", "moe_layers", "attn_layer_indices", "full_attn_idxs", "mlp_only_layers")
_OF_LAYERS = ("attn_config", "ffn_config")  # DBRX's
_MOST_LAYERS = 12


def shrunk(config: Any, **sizes: Any) -> Any:
    """Return a small config with the first layers of each kind.

    Args:
        config: a Hugging Face config, which is not changed.
        sizes: values of the new config by name, which override the table's; those of a nested text config are a dict
            under its name.
    """
    values = copy.deepcopy(config.to_dict())
    parts = {name: getattr(config, name, None) for name in values if name.endswith("_config")}
    parts = {name: part for name, part in parts.items() if hasattr(part, "to_dict")}
    text = config.get_text_config()
    inner = {
        name: (shrunk(part, **sizes.pop(name, {})) if part is text else _small_tower(part)).to_dict()
        for name, part in parts.items()
        if name not in _OF_LAYERS
    }
    if text is not config:
        return type(config).from_dict({**values, **inner, **_small_ids(values), **sizes})
    values |= inner | {name: _small_layer(part) for name, part in parts.items() if name in _OF_LAYERS}
    small = {name: size for name, size in _SIZES.items() if values.get(name) is not None}
    small |= {name: [size] * len(values[name]) for name, size in small.items() if isinstance(values[name], list)}
    layers = _layers_of_each_kind(values)
    for name in _LAYERS:
        if name in values:
            small[name] = layers
    most = next((values[name] for name in _LAYERS if name in values), layers)
    for name, value in values.items():
        if isinstance(value, list) and len(value) == most and (most > layers or name in _KINDS):
            small[name] = (value * layers)[:layers]  # a config may have fewer layers than the trial
        elif name in _INDICES and isinstance(value, list):
            small[name] = [index for index in value if index < layers]
    if "kv_lora_rank" in small or "attention_hidden_size" in small:  # these do not share key heads
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "qk_rope_head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]  # latent attention rotates a part of each head
    ropes = [name for name in ("rope_parameters", "rope_scaling") if isinstance(values.get(name), dict)]
    small |= {name: _unscaled(values[name], small.get("head_dim", 16)) for name in ropes}
    return _rebuilt(config, {**values, **small, **_small_ids(values), **sizes})


def _small_layer(config: Any) -> Any:
    """Return a small copy of a layer part's config, names unchanged."""
    small = copy.deepcopy(config)
    for name, size in _SIZES.items():
        if getattr(small, name, None) is not None:
            setattr(small, name, size)
    return small


def _small_tower(config: Any) -> Any:
    """Return a small config of a tower that fits `_SIZES`."""
    values = config.to_dict()
    small = {name: size for name, size in _TOWER_SIZES.items() if values.get(name) is not None}
    pairs = {name: [size] * 2 for name, size in small.items() if isinstance(values[name], list) and size != [0]}
    return _rebuilt(config, {**values, **small, **pairs})


def _rebuilt(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a config of the same class, with defaults for None."""
    return type(config).from_dict({name: value for name, value in values.items() if value is not None})


def _small_ids(values: Mapping[str, Any]) -> dict[str, int]:
    """Return distinct ids of special tokens inside the small vocabulary."""
    ids = [name for name in values if name.endswith(("token_id", "token_index")) and isinstance(values[name], int)]
    return {name: 200 + place for place, name in enumerate(ids)}


def _layers_of_each_kind(values: Mapping[str, Any]) -> int:
    """Return how many first layers have every kind, at least 2."""
    layers = 2
    for name in _KINDS:
        kinds: Sequence[Any] = values.get(name) or ()
        layers = max([layers, *(kinds.index(kind) + 1 for kind in set(kinds))])
        shared = [place for place, kind in enumerate(kinds) if kind == "hybrid"]  # Zamba's, two of which tie weights
        layers = max([layers, *(place + 1 for place in shared[:2])])
    for name in _INDICES:
        layers = max([layers, *(values.get(name) or ())[:1]]) if isinstance(values.get(name), list) else layers
    return min(layers, _MOST_LAYERS)


def _unscaled(rope: dict[str, Any], head_size: int) -> dict[str, Any]:
    """Return rotary parameters without their scaling, whose lengths suit other sizes."""
    if any(isinstance(value, dict) for value in rope.values()):  # one for each kind of layer
        return {kind: _unscaled(value, head_size) for kind, value in rope.items() if isinstance(value, dict)}
    small: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.get("rope_theta") or 10_000.0}
    if (part := rope.get("partial_rotary_factor")) is not None:
        small["partial_rotary_factor"] = part
    if "llama_4_scaling_beta" in rope:  # a factor on the queries that grows by place beyond the original positions
        small |= {"llama_4_scaling_beta": rope["llama_4_scaling_beta"], "original_max_position_embeddings": 8}
    if "mrope_section" in rope:  # pairs of time, height and width; texts have the same position in all three
        pairs = int(head_size * (part or 1)) // 2
        small["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        if rope["mrope_section"][0] == rope["mrope_section"][1]:  # Ernie's, of height, width and time
            small["mrope_section"].reverse()
    return small
