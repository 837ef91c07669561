"""What `model.memory` says, checked: one field a key, under the same name."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

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
