"""The Hugging Face configuration of a base model with a memory."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.auto import CONFIG_MAPPING

from verl_ext.attention.rope import same_frequencies_up_to
from verl_ext.options import Options, must, option, options_of, unknown

BASE_TYPES = (Qwen2Config.model_type, Qwen3Config.model_type)


@dataclass(frozen=True)
class MemoryOptions(Options):
    """The keys below `model.memory`."""

    prefix: ClassVar[str] = "model.memory"

    chunk_size: int = option(4096, "tokens of a chunk; attention stays inside a chunk", least=1)
    layers: tuple[int, ...] | None = option(
        None, "indices of the decoder layers with a memory; null: up to four, spread over the upper half"
    )
    heads: int = option(4, "independent memories of a layer", least=1)
    head_dim: int = option(64, "size of a head's keys and values", least=1)
    depth: int = option(1, "layers of a head's memory; 1: a matrix (learns faster); 2: a network", least=1, most=2)
    expansion: int = option(2, "hidden size of a head's network divided by head_dim, for depth=2", least=1)
    sub_chunk: int = option(64, "tokens between writes: they read and are measured against the same weights", least=1)
    conv_tokens: int = option(8, "tokens that a key, a query and the rates see: their own and earlier ones", least=1)
    max_surprise: float = option(4.0, "largest norm of a token's gradient; larger ones are scaled down to it", above=0)
    output_std: float = option(
        0.0, "initial standard deviation of W_o; 0: equals the base model; 0.1 suits one of random weights", least=0
    )
    bptt_chunks: int | None = option(None, "chunks that gradients flow back through; null: all", least=1)

    def problems(self) -> Iterable[str | None]:
        """Yield a problem if sub-chunks do not divide a chunk."""
        if self.chunk_size % self.sub_chunk:
            needed = f"be a multiple of model.memory.sub_chunk ({self.sub_chunk})"
            yield must("model.memory.chunk_size", needed, self.chunk_size)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], num_layers: int) -> "MemoryOptions":
        """Read the options; resolve and sort the layers, of ``num_layers``."""
        values = settings_of_today(values)
        for name in values:
            if name not in options_of(cls):
                raise ValueError(unknown(name, options_of(cls), node="model.memory"))
        return cls(**{**values, "layers": _resolved_layers(values.get("layers"), num_layers)})


def settings_of_today(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a memory's settings, also an earlier version's, by today's keys.

    Raises ValueError if they are of memory tokens, which earlier versions had.
    """
    if (kind := values.get("kind", "titans")) != "titans":
        raise ValueError(must("model.memory.kind", "be titans, as memory tokens are only in earlier versions", kind))
    return {name: value for name, value in values.items() if name not in ("kind", "tokens")}


def settings_of_weights(config: "QwenTitansConfig") -> dict[str, Any]:
    """Return the settings without which a memory's weights have no meaning."""
    return {name: value for name, value in (config.memory or {}).items() if name != "bptt_chunks"}


def _resolved_layers(layers: Any, num_layers: int) -> tuple[int, ...]:
    if layers is None:
        first, count = num_layers // 2, max(1, min(4, num_layers // 6))
        return tuple(first + index * (num_layers - first) // count for index in range(count))
    wrong = isinstance(layers, str | bytes) or not hasattr(layers, "__iter__")
    if wrong or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers):
        raise ValueError(must("model.memory.layers", "be a list of layer indices or null", repr(layers)))
    chosen = tuple(sorted(layers))
    if len(set(chosen)) < len(chosen):
        raise ValueError(must("model.memory.layers", "name each layer once", list(layers)))
    if any(not 0 <= layer < num_layers for layer in chosen):
        needed = f"lie in 0..{num_layers - 1} for a base model of {num_layers} layers"
        raise ValueError(must("model.memory.layers", needed, list(layers)))
    return chosen


_OF_BASE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("rope_parameters", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
)


class QwenTitansConfig(PreTrainedConfig):
    """A Qwen2 or Qwen3 configuration with a memory.

    Attributes:
        base_config: the base model's configuration or its dict, with ``vocab_size`` and the like.
        memory: the options as a plain dict with every key of :class:`MemoryOptions`; `memory_options` has them typed.
    """

    model_type = "qwen_titans"
    sub_configs = {"base_config": AutoConfig}  # type: ignore[dict-item]  # noqa: RUF012 - as transformers' own

    base_config: Any = None
    memory: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.base_config = _base_config(self.base_config)
        options = self.memory_options
        _check_reach(self.base_config, options)
        self.memory = {**asdict(options), "layers": list(options.layers or ())}
        self.architectures = ["QwenTitansForCausalLM"]
        super().__post_init__(**kwargs)

    @classmethod
    def from_base(cls, base_config: PreTrainedConfig, **memory: Any) -> "QwenTitansConfig":
        """Wrap ``base_config`` in a configuration; ``memory`` has fields of :class:`MemoryOptions`.

        Raises ValueError if the base is neither Qwen2 nor Qwen3, or if the options do not fit it.
        """
        config = cls(base_config=base_config, memory=memory)
        config.dtype = base_config.dtype
        return config

    @property
    def memory_options(self) -> MemoryOptions:
        """The options of the memory, typed."""
        return MemoryOptions.from_mapping(self.memory or {}, self.base_config.num_hidden_layers)

    @property
    def chunk_size(self) -> int:
        """The tokens of a chunk."""
        return self.memory_options.chunk_size

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> PreTrainedConfig:
        """Return the base configuration: it is the language model's."""
        return self.base_config


def _of_base(name: str) -> property:
    return property(
        lambda self: getattr(self.base_config, name), lambda self, value: setattr(self.base_config, name, value)
    )


for _name in _OF_BASE:
    setattr(QwenTitansConfig, _name, _of_base(_name))


def _base_config(value: Any) -> PreTrainedConfig:
    """Copy the base configuration, in which transformers sets the attention."""
    if value is None:
        return Qwen3Config()
    model_type = value.get("model_type") if isinstance(value, Mapping) else getattr(value, "model_type", None)
    if model_type not in BASE_TYPES:
        raise ValueError(must("model.path", f"hold a {' or '.join(BASE_TYPES)} model for model.memory", model_type))
    return CONFIG_MAPPING[model_type](**value) if isinstance(value, Mapping) else copy.deepcopy(value)


def _check_reach(base: PreTrainedConfig, options: MemoryOptions) -> None:
    """Raise ValueError if a layer does not see its whole input.

    Rotary frequencies must not depend on the number of a chunk's tokens either: the last chunk of a text has fewer.
    """
    chunk, limit = options.chunk_size, same_frequencies_up_to(base)
    if limit is not None and limit < chunk:
        raise ValueError(
            f"model.memory.chunk_size needs {chunk} positions of the same rotary frequencies, which the model's "
            f"rope_type={base.rope_parameters['rope_type']} has up to {limit}; got {chunk}"
        )
    for layer, layer_type in enumerate(base.layer_types):
        if layer_type == "sliding_attention" and base.sliding_window < chunk:
            raise ValueError(
                f"model.memory.chunk_size needs {chunk} tokens seen by layer {layer}, whose sliding window is "
                f"{base.sliding_window}; got {chunk}"
            )
