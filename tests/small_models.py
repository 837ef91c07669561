"""Small random models of transformers' types, with configs as released checkpoints have them where defaults do not."""

from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from verl_ext.layers.probe import trial_model
from verl_ext.layers.shrink import shrunk

_HYBRID = ["linear_attention", "full_attention"] * 2
# What released checkpoints have and default configs lack, or what a trial must have to show a leak.
SIZES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4, "mamba_d_head": 16},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "minimax": {"layer_types": _HYBRID, "num_hidden_layers": 4},
    # On a CPU transformers' own forward is wrong for documents longer than a chunk, and clamps by time_step_min.
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "attention", "mamba", "moe"], "chunk_size": 64, "time_step_min": 1e-30},
    },
    "qwen3_5_moe_text": {"layer_types": _HYBRID, "num_hidden_layers": 4},
    "qwen3_5_text": {"layer_types": _HYBRID, "num_hidden_layers": 4},
    "qwen3_next": {"layer_types": _HYBRID, "num_hidden_layers": 4},
    "zamba": {
        **{"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2, "use_mamba_kernels": False},
        **{"num_key_value_heads": 4, "attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 2},
    },
    "zamba2": {
        **{"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1},
        **{"chunk_size": 64, "hybrid_layer_ids": [1, 3], "time_step_min": 1e-30},
        **{"num_key_value_heads": 4, "attention_head_dim": 32, "attention_hidden_size": 128},
    },
}


def model_class(kind: str) -> type:
    """The class of a model type that verl loads: of images and text if there is one."""
    config = CONFIG_MAPPING[kind]
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else None
    cls = (mapping or MODEL_FOR_CAUSAL_LM_MAPPING)[config]
    return cls[0] if isinstance(cls, tuple) else cls


def packed_and_plain(kind: str) -> tuple[nn.Module, nn.Module]:
    """A small model of a type that computes packs, and transformers' own with the same weights and eager attention."""
    cls, config, sizes = model_class(kind), CONFIG_MAPPING[kind](), SIZES.get(kind, {})
    packed = trial_model(config, cls, **sizes)
    plain = cls._from_config(shrunk(config, **sizes), attn_implementation="eager")
    plain.load_state_dict(packed.state_dict())
    return packed, plain.eval()


def in_float64(*models: nn.Module) -> None:
    """Let this process compute in fp64, code that asks for fp32 included: differences are no rounding then."""
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign,assignment]
    torch.float32 = torch.float64  # type: ignore[misc]
    for model in models:
        model.double()
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "eager"  # grouped products have no fp64
