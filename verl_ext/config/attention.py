"""Whether the attention kernels run on this GPU with this model, told before weights are read."""

from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from verl_ext.attention import BACKENDS, choose_backend, flash_limit
from verl_ext.config.model import is_titans

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")


def attention_problems(
    config: DictConfig, hf_config: Any, accelerator: str | None, capability: tuple[int, int] | None
) -> list[str]:
    """Why the kernel that `attention.backend` asks for cannot run.

    hf_config: the model's, None where it could not be read; capability: the GPU's, None where it is not known.
    """
    if config.attention.backend not in BACKENDS or is_titans(config):
        return []  # auto, told by the attention node, or a model whose attention is transformers' own
    try:
        _chosen(config, hf_config, _device(config, accelerator), capability)
    except ValueError as error:
        return [str(error)]
    return []


def attention_notices(
    config: DictConfig, hf_config: Any, accelerator: str | None, capability: tuple[int, int] | None
) -> list[str]:
    """Where sdpa on a GPU may hold scores or a mask of ``[l, l]`` for a document of l tokens.

    The flash kernel inside sdpa takes no mask, and what no fused kernel takes is computed with all scores in memory.
    """
    if is_titans(config) or _device(config, accelerator) != "cuda":
        return []
    backend, limit = _chosen(config, hf_config, "cuda", capability)
    if backend != "sdpa":
        return []
    reasons = [f"flash attention needs {limit}"] if limit else []
    layers, window = windowed_layers(hf_config.get_text_config())
    if window is not None and window < config.data.max_tokens:
        reasons.append(f"{layers} layers with a sliding window of {window} tokens need a mask")
    if not reasons:
        return []
    return [
        f"attention.backend={config.attention.backend} uses sdpa, whose memory may grow here with the square of a "
        f"document's length: {'; '.join(reasons)}"
    ]


def attention_dropout(hf_config: Any) -> float:
    """Dropout of attention weights in training, which model configs have under several names."""
    text = hf_config.get_text_config()
    given = [getattr(text, name, None) for name in _DROPOUT]
    given.append(getattr(getattr(text, "attn_config", None), "attn_pdrop", None))  # DBRX
    return max(float(value or 0) for value in given)


def windowed_layers(text: Any) -> tuple[int, int | None]:
    """(layers with sliding-window attention, its width in tokens) of a Hugging Face text config."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers  # Mistral: every layer
    layers = sum(kind == "sliding_attention" for kind in kinds)
    return (layers, int(window)) if window and layers else (0, None)


def _chosen(
    config: DictConfig, hf_config: Any, device: str, capability: tuple[int, int] | None
) -> tuple[str, str | None]:
    """The backend that runs, and what flash attention lacks; ValueError where the one that is asked for cannot."""
    dtype = _DTYPES.get(OmegaConf.select(config, "engine.mixed_precision.param_dtype"), torch.bfloat16)
    model = {} if hf_config is None else {"head_size": _head_size(hf_config.get_text_config())}
    dropout = 0.0 if hf_config is None else attention_dropout(hf_config)
    limit = flash_limit(dtype, capability=capability, **model)
    return choose_backend(config.attention.backend, device, limit, dropout), limit


def _device(config: DictConfig, accelerator: str | None) -> str:
    return "cpu" if accelerator is None or config.trainer.device == "cpu" else accelerator


def _head_size(text: Any) -> int:
    """Of queries and keys; latent attention has it in two parts."""
    if rotated := getattr(text, "qk_rope_head_dim", None):
        return text.qk_nope_head_dim + rotated
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
