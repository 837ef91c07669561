"""The Hugging Face configuration: the base model's own, nested, and the memory's settings beside it."""

import copy
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.auto import CONFIG_MAPPING

from verl_ext.attention.rope import same_frequencies_up_to
from verl_ext.models.qwen_titans.memory_settings import MemorySettings

BASE_TYPES = (Qwen2Config.model_type, Qwen3Config.model_type)


def _of_base(name: str) -> property:
    """The base configuration's attribute of that name, read and written there."""
    return property(
        lambda self: getattr(self.base_config, name), lambda self, value: setattr(self.base_config, name, value)
    )


class QwenTitansConfig(PreTrainedConfig):
    """A Qwen2 or Qwen3 configuration with a memory.

    Attributes:
        base_config: the base model's configuration, or its dict; what callers read (``vocab_size``, ``hidden_size``,
            …) is passed through to it.
        memory: the settings as a plain dict, with every key of :class:`MemorySettings`; read ``memory_settings``.
    """

    model_type = "qwen_titans"
    sub_configs = {"base_config": AutoConfig}  # type: ignore[dict-item]  # noqa: RUF012 - as transformers' own

    base_config: Any = None
    memory: dict[str, Any] | None = None

    vocab_size = _of_base("vocab_size")
    hidden_size = _of_base("hidden_size")
    intermediate_size = _of_base("intermediate_size")
    num_hidden_layers = _of_base("num_hidden_layers")
    num_attention_heads = _of_base("num_attention_heads")
    num_key_value_heads = _of_base("num_key_value_heads")
    head_dim = _of_base("head_dim")
    max_position_embeddings = _of_base("max_position_embeddings")
    initializer_range = _of_base("initializer_range")
    rms_norm_eps = _of_base("rms_norm_eps")
    rope_parameters = _of_base("rope_parameters")
    tie_word_embeddings = _of_base("tie_word_embeddings")
    pad_token_id = _of_base("pad_token_id")
    bos_token_id = _of_base("bos_token_id")
    eos_token_id = _of_base("eos_token_id")

    def __post_init__(self, **kwargs: Any) -> None:
        self.base_config = _base_config(self.base_config)
        settings = MemorySettings.of(self.memory or {}, self.base_config.num_hidden_layers)
        _require_windows(self.base_config, settings)
        self.memory = {**asdict(settings), "layers": list(settings.layers or ())}
        self.architectures = ["QwenTitansForCausalLM"]
        super().__post_init__(**kwargs)

    @classmethod
    def from_base(cls, base_config: PreTrainedConfig, **memory: Any) -> "QwenTitansConfig":
        """A configuration around ``base_config``; ``memory`` are fields of :class:`MemorySettings`.

        Raises ValueError for a base that is neither Qwen2 nor Qwen3, and for settings that do not fit it.
        """
        config = cls(base_config=base_config, memory=memory)
        config.dtype = base_config.dtype
        return config

    @property
    def memory_settings(self) -> MemorySettings:
        """The settings as a checked, frozen object."""
        return MemorySettings.of(self.memory or {}, self.base_config.num_hidden_layers)

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk."""
        return self.memory_settings.chunk_size

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> PreTrainedConfig:
        """The base configuration, for callers that look for the language model's own."""
        return self.base_config


def _base_config(value: Any) -> PreTrainedConfig:
    """A config of this one's own: transformers sets the attention of a nested one, under a model that may use it."""
    if value is None:
        return Qwen3Config()
    model_type = value.get("model_type") if isinstance(value, Mapping) else getattr(value, "model_type", None)
    if model_type not in BASE_TYPES:
        raise ValueError(f"model.path must hold a {' or '.join(BASE_TYPES)} model for model.memory; got {model_type}")
    return CONFIG_MAPPING[model_type](**value) if isinstance(value, Mapping) else copy.deepcopy(value)


def _require_windows(base: PreTrainedConfig, settings: MemorySettings) -> None:
    """Every layer must see the whole of what is put before it; mac puts a memory token beside each token.

    Nor may a chunk's rotary frequencies depend on how many tokens it holds: the last one of a text has fewer.
    """
    positions = settings.chunk_size + (settings.persistent_tokens if settings.variant == "mac" else 0)
    limit = same_frequencies_up_to(base)
    if limit is not None and limit < positions:
        raise ValueError(
            f"model.memory.chunk_size needs {positions} positions of the same rotary frequencies, which the model's "
            f"rope_type={base.rope_parameters['rope_type']} has up to {limit}; got {settings.chunk_size}"
        )
    for layer, layer_type in enumerate(base.layer_types):
        seen = settings.chunk_size
        if settings.variant == "mac" and layer in (settings.layers or ()):
            seen = 2 * settings.chunk_size + settings.persistent_tokens
        if layer_type == "sliding_attention" and base.sliding_window < seen:
            raise ValueError(
                f"model.memory.chunk_size needs {seen} tokens seen by layer {layer}, whose sliding window is "
                f"{base.sliding_window}; got {settings.chunk_size}"
            )
