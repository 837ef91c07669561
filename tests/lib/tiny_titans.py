"""Small Qwens with a memory, also with an active memory, all of whose parameters are moved from their start."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, Qwen2Config, Qwen3Config

from verl_ext.titans import QwenTitansConfig, QwenTitansForCausalLM

VOCABULARY = 48
CHUNK = 16
FORMS = [{}, {"depth": 1}, {"conv_tokens": 1}, {"conv_tokens": CHUNK + 3}]  # convolutions of one token, and over chunks
each_form = pytest.mark.parametrize("form", FORMS, ids=str)
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
_MEMORY = {"chunk_size": CHUNK, "sub_chunk": 8, "layers": [1], "heads": 2, "head_dim": 6, "depth": 2}


def tiny_base(name: str = "qwen3", **fields: Any) -> PreTrainedConfig:
    """Return the configuration of a three-layer Qwen2 or Qwen3."""
    if name == "qwen2":
        return Qwen2Config(**{**_BASE, **fields})
    return Qwen3Config(**{**_BASE, "head_dim": 8, **fields})


def tiny_config(base: PreTrainedConfig | None = None, **memory: Any) -> QwenTitansConfig:
    """Return a configuration with chunks of 16 tokens and a memory of two heads in the middle layer."""
    return QwenTitansConfig.from_base(base or tiny_base(), **{**_MEMORY, **memory})


def tiny_titans(seed: int = 0, perturbed: bool = True, attention: str = "sdpa", **memory: Any) -> QwenTitansForCausalLM:
    """Build a model in eval mode; ``perturbed`` moves the memory's parameters, so that it changes the logits."""
    torch.manual_seed(seed)
    config = tiny_config(**memory)
    config._attn_implementation = attention
    model = QwenTitansForCausalLM(config).eval()
    return perturb(model) if perturbed else model


def perturb(model: QwenTitansForCausalLM, scale: float = 0.3) -> QwenTitansForCausalLM:
    """Add normal noise to every memory parameter."""
    with torch.no_grad():
        for memory in model.memory.values():
            for parameter in memory.parameters():
                parameter += scale * torch.randn_like(parameter)
    return model


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draw token ids of the small vocabulary."""
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
