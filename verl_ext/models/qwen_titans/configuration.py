"""The Hugging Face configuration: the base model's own, nested, and the memory's settings beside it.

What `model.memory` says, checked: one field a key, under the same name.
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.auto import CONFIG_MAPPING

from verl_ext.attention.rope import same_frequencies_up_to

VARIANTS = ("residual", "mac", "mag", "mal")


@dataclass(frozen=True)
class MemorySettings:
    """Settings of the memory; a mistake is a ValueError that names its key as ``model.memory.<field>``.

    Attributes:
        chunk_size: tokens that attend to each other; what lies before reaches a chunk through the memory alone.
        layers: indices of the decoder layers with a memory; None: up to four, spread over the upper half.
        variant: how a memory joins its layer, one of :data:`VARIANTS` (see ``memory_layer``).
        heads: independent memories of a layer.
        head_dim: size of a head's keys and values.
        depth: layers of a head's memory: 1 is a matrix (quick to learn), 2 a network with more room.
        expansion: hidden size of a head's memory network, in units of ``head_dim`` (depth 2 alone has one).
        sub_chunk: tokens that read, and are measured against, the same weights; divides ``chunk_size``.
        max_surprise: largest norm of one token's gradient; a larger one is scaled down to it.
        persistent_tokens: learned tokens before every chunk (variant mac alone reads them).
        output_std: standard deviation of W_o at the start. 0 equals the base model exactly (mac has its own start, see
            ``LongTermMemory``); a base of random weights learns to recall sooner with about 0.1.
        bptt_chunks: gradients flow back through at most so many chunks; None: through all.
    """

    chunk_size: int = 4096
    layers: tuple[int, ...] | None = None
    variant: str = "residual"
    heads: int = 4
    head_dim: int = 64
    depth: int = 2
    expansion: int = 2
    sub_chunk: int = 64
    max_surprise: float = 4.0
    persistent_tokens: int = 4
    output_std: float = 0.0
    bptt_chunks: int | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_size", "heads", "head_dim", "expansion", "sub_chunk"):
            _require_whole(name, getattr(self, name), 1)
        _require_whole("persistent_tokens", self.persistent_tokens, 0)
        if self.bptt_chunks is not None:
            _require_whole("bptt_chunks", self.bptt_chunks, 1)
        if self.depth not in (1, 2):
            raise ValueError(f"model.memory.depth must be 1 or 2; got {self.depth!r}")
        if self.variant not in VARIANTS:
            raise ValueError(f"model.memory.variant must be one of {', '.join(VARIANTS)}; got {self.variant}")
        _require_number("max_surprise", self.max_surprise)
        if self.max_surprise == 0:
            raise ValueError("model.memory.max_surprise must be above 0; got 0")
        _require_number("output_std", self.output_std)
        if self.chunk_size % self.sub_chunk:
            raise ValueError(
                f"model.memory.chunk_size must be a multiple of model.memory.sub_chunk ({self.sub_chunk}); "
                f"got {self.chunk_size}"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any], num_layers: int) -> "MemorySettings":
        """Settings for a base model of ``num_layers`` layers, its memory layers resolved and sorted."""
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(f"model.memory has the keys {', '.join(names)}; got {name}")
        layers = _resolved_layers(values.get("layers"), num_layers)
        return cls(**{**values, "layers": layers})


def _require_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"model.memory.{name} must be a whole number of at least {least}; got {value!r}")


def _require_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"model.memory.{name} must be a finite number of at least 0; got {value!r}")


def _resolved_layers(layers: Any, num_layers: int) -> tuple[int, ...]:
    if layers is None:
        first = num_layers // 2
        count = max(1, min(4, num_layers // 6))
        return tuple(first + index * (num_layers - first) // count for index in range(count))
    wrong = isinstance(layers, str | bytes) or not hasattr(layers, "__iter__")
    if wrong or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers):
        raise ValueError(f"model.memory.layers must be a list of layer indices or null; got {layers!r}")
    chosen = tuple(sorted(layers))
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"model.memory.layers must name each layer once; got {list(layers)}")
    if any(not 0 <= layer < num_layers for layer in chosen):
        raise ValueError(
            f"model.memory.layers must lie in 0..{num_layers - 1} for a base model of {num_layers} layers; "
            f"got {list(layers)}"
        )
    return chosen


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
