"""Small random models of transformers' types, whose configs follow released checkpoints where defaults differ."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.lib.checked import support_problems
from verl_ext.config.architecture import Architecture
from verl_ext.layers.trial import shrunk, trial_model
from verl_ext.options import first_line

# Every model type that transformers has for text, with images or without.
KINDS = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
_WINDOWS = ("sliding_attention", "full_attention")
_HYBRID = ["linear_attention", "full_attention"] * 2
_LLAMA_TEXT = {"pad_token_id": 2, "text_config": {"model_type": "llama", "pad_token_id": 2}}
_ROPES = {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _WINDOWS}}
_SPARSE = {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2}
_SECTIONS = {  # a head's pairs that rotate by time, height and width, and their share of the head
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga"), ([8, 12, 12], 0.5)),
    **dict.fromkeys(("paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl"), ([16, 24, 24], 1.0)),
    "qwen3_omni_moe_thinker": ([24, 20, 20], 1.0),
    "ernie4_5_vl_moe": ([22, 22, 20], 1.0),
}
# Encoders, and decoders of encoder-decoder pairs, whose classes are causal only with is_decoder.
_ENCODERS = (
    *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert"),
    *("data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp", "pegasus", "plbart"),
    *("prophetnet", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
# Fields that released checkpoints have and default configs lack, or that a test needs to show a leak.
VALUES: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}},
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "cohere_compass": {"text_config": _ROPES},
    "cohere_compass_text": _ROPES,
    "dbrx": {"attn_config": {"rope_theta": 500_000.0, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", *["sparse"] * 11], "num_hidden_layers": 12}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": {"mrope_section": [16, 16, 16, 16]}}},
    **dict.fromkeys(("idefics3", "smolvlm"), _LLAMA_TEXT),
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "minimax": {"layer_types": _HYBRID, "num_hidden_layers": 4},
    "minimax_m3_vl": {"text_config": _SPARSE},
    "minimax_m3_vl_text": _SPARSE,
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mamba", "moe"]},
    "qwen3_5_moe_text": {"layer_types": _HYBRID, "num_hidden_layers": 4},
    "qwen3_5_text": {"layer_types": _HYBRID, "num_hidden_layers": 4},
    "qwen3_next": {"layer_types": _HYBRID, "num_hidden_layers": 4},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
        "use_mamba_kernels": False,
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1},
    **{kind: {"is_decoder": True} for kind in _ENCODERS},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    **{
        kind: {"text_config": {"rope_parameters": {"mrope_section": sections, "partial_rotary_factor": part}}}
        for kind, (sections, part) in _SECTIONS.items()
    },
}
# On a CPU, transformers' own forward of these is wrong for documents longer than a chunk, and clamps by time_step_min.
SIZES: dict[str, dict[str, Any]] = {
    # Heads whose rows flash kernels can align.
    "deepseek_v3": {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "qk_head_dim": 32, "v_head_dim": 16},
    "nemotron_h": {"chunk_size": 128, "time_step_min": 1e-30},
    "zamba2": {"chunk_size": 128, "time_step_min": 1e-30},
}


def model_class(kind: str) -> type:
    """Return the class that verl loads for a model type: the one for images and text, if there is one."""
    config = CONFIG_MAPPING[kind]
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else None
    cls = (mapping or MODEL_FOR_CAUSAL_LM_MAPPING)[config]
    return cls[0] if isinstance(cls, tuple) else cls


def model_config(kind: str) -> Any:
    """Return a model type's config as in released checkpoints, without dropout."""
    config = CONFIG_MAPPING[kind](**VALUES.get(kind, {}))
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)
    return config


def refusal(kind: str) -> str | None:
    """Return the reason why a model type is refused before a model is loaded, or None if it is trained."""
    try:
        config = model_config(kind)
        problems = support_problems(config)
        if not problems:
            _ = Architecture(config).module  # a class that cannot be built is its loader's concern
    except Exception as error:
        return f"transformers builds no model of its defaults: {first_line(error)}"
    return problems[0] if problems else None


def packed_and_plain(kind: str) -> tuple[nn.Module, nn.Module]:
    """Build a small model of a type that computes packs, and transformers' own with its weights and eager attention."""
    cls, config, sizes = model_class(kind), model_config(kind), SIZES.get(kind, {})
    packed = trial_model(config, cls, **sizes)
    plain = cls._from_config(shrunk(config, **sizes), attn_implementation="eager")
    plain.to(next(packed.parameters()).dtype).load_state_dict(packed.state_dict())
    return packed, plain.eval()


def write_small_models(kinds: Iterable[str], folder: Path, tokenizer: Path) -> dict[str, str]:
    """Save a small model of each type with a copy of a folder's tokenizer, and return the folders."""
    for kind in kinds:
        packed_and_plain(kind)[1].save_pretrained(folder / kind)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder / kind)
    return {kind: str(folder / kind) for kind in kinds}


def write_mxfp4(folder: Path) -> None:
    """Store random experts in MXFP4 in a GPT-OSS' folder."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(122, 125, (experts, columns, rows // 32), dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(described))


def in_float64(*models: nn.Module) -> None:
    """Let this process compute in fp64, even code that asks for fp32, so that differences are not rounding."""
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign,assignment]
    torch.float32 = torch.float64  # type: ignore[misc]
    for model in models:
        model.double()
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "eager"  # grouped products do not support fp64
