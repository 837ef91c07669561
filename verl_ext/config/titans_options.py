"""The keys of `model=qwen_titans`, a Qwen with long-term memory."""

from dataclasses import dataclass

from omegaconf import DictConfig

TARGET = "verl_ext.config.titans_model.QwenTitansModelConfig"
TRAIN = ("all", "memory")
ATTENTION = {"auto": "sdpa", "sdpa": "sdpa", "flash_attn": "flash_attention_2"}  # of attention.backend, inside a chunk


@dataclass
class MemoryOptions:
    """`model.memory`; what is None is the folder's own, or else the default of ``QwenTitansConfig``.

    chunk_size and sub_chunk are in tokens, bptt_chunks in chunks."""

    chunk_size: int | None = None
    layers: list[int] | None = None
    variant: str | None = None
    heads: int | None = None
    head_dim: int | None = None
    depth: int | None = None
    expansion: int | None = None
    sub_chunk: int | None = None
    max_surprise: float | None = None
    persistent_tokens: int | None = None
    bptt_chunks: int | None = None
    output_std: float | None = None


def is_titans(config: DictConfig) -> bool:
    """Whether the model group is qwen_titans."""
    return config.model.get("_target_") == TARGET
