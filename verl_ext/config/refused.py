"""Options of verl's that a packed run cannot have, or that would do nothing here: refused, not left without effect."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.config.nearest import show

_PACKS_SET_IT = "data.max_tokens and data.micro_batch_size_per_gpu decide what a forward holds"
# key: (the one value it may have, why)
REFUSED: dict[str, tuple[Any, str]] = {
    "model.use_remove_padding": (True, "packs have no padding to keep"),
    "model.use_fused_kernels": (False, "verl 0.9.1's fused head fails under FSDP2"),
    "model.model_type": ("language_model", "packs train language models"),
    "model.mtp.enable": (False, "packs train the next token alone"),
    "model.tiled_mlp.enabled": (False, "verl's SFT engine does not apply it"),
    "model.lora.rank": (0, "it is Megatron's; model.lora_rank is the one that works here"),
    "engine.forward_only": (False, "it would not train"),
    "engine.qat.enable": (False, "it was never run with packs"),
    "engine.use_dynamic_bsz": (True, _PACKS_SET_IT),
    "engine.micro_batch_size_per_gpu": (None, _PACKS_SET_IT),
    "engine.max_token_len_per_gpu": (None, _PACKS_SET_IT),
    "engine.infer_micro_batch_size_per_gpu": (None, _PACKS_SET_IT),
    "engine.infer_max_token_len_per_gpu": (None, _PACKS_SET_IT),
}


def refused_problems(config: DictConfig) -> Iterator[str]:
    """One line for each option of :data:`REFUSED` that has another value than the one it may have."""
    for key, (allowed, why) in REFUSED.items():
        value = OmegaConf.select(config, key, default=allowed)
        if value != allowed:
            yield f"{key} must be {show(allowed)}: {why}; got {show(value)}"
