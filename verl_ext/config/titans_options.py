"""The keys of `model=qwen_titans`, a Qwen with long-term memory."""

from omegaconf import DictConfig

TARGET = "verl_ext.config.titans_model.QwenTitansModelConfig"
TRAIN = ("all", "memory")
ATTENTION = {"auto": "sdpa", "sdpa": "sdpa", "flash_attn": "flash_attention_2"}  # of attention.backend, inside a chunk


# Below model.memory; a test holds them equal to the fields of MemorySettings, whose import would take seconds.
MEMORY_KEYS = (
    *("chunk_size", "layers", "variant", "heads", "head_dim", "depth", "expansion", "sub_chunk", "max_surprise"),
    *("persistent_tokens", "output_std", "bptt_chunks"),
)


def is_titans(config: DictConfig) -> bool:
    """Whether the model group is qwen_titans."""
    return config.model.get("_target_") == TARGET
