"""The model node of `model=qwen_titans`: verl's, its Hugging Face config wrapped by the memory's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from verl_ext.config.model_node import ModelConfig
from verl_ext.models.qwen_titans import QwenTitansConfig


@dataclass
class QwenTitansModelConfig(ModelConfig):
    """The model node for a Qwen with long-term memory: `hf_config` becomes a :class:`QwenTitansConfig`."""

    train: str = "all"
    memory_checkpoint: str | None = None
    memory: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hf_config = titans_config(self.hf_config, self.memory)
        self.architectures = self.hf_config.architectures


def titans_config(hf_config: Any, memory: Mapping[str, Any]) -> QwenTitansConfig:
    """The config with memory around a Qwen's, or an exported one with what `memory` sets.

    Raises:
        ValueError: the base is no Qwen2 or Qwen3, or an option cannot be; `model.memory.<name>` is named.
    """
    given = {name: value for name, value in _plain(memory).items() if value is not None}
    if isinstance(hf_config, QwenTitansConfig):
        hf_config, given = hf_config.base_config, {**(hf_config.memory or {}), **given}
    return QwenTitansConfig.from_base(hf_config, **given)


def _plain(memory: Mapping[str, Any]) -> dict[str, Any]:
    if OmegaConf.is_config(memory):
        return OmegaConf.to_container(memory, resolve=True)  # type: ignore[return-value]
    return dict(memory)
