"""The common parts of every cell on a GPU, with or without verl in its process: shapes, documents, FLOPs, peaks."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from benchmarks.documents import Document, long_tailed_lengths, make_documents
from benchmarks.meters import on_gpu, seconds
from verl_ext.flops import peak_flops, train_flops

POSITIONS = 2**23
_TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
_SMALL: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16}
_LINEAR, _FULL = "linear_attention", "full_attention"
_QWEN3_5 = {"model_type": "qwen3_5_text", "layer_types": [*[_LINEAR] * 3, _FULL] * 6, "num_hidden_layers": 24}
_NEMOTRON_H = {"model_type": "nemotron_h", "layers_block_type": [*["mamba", "mlp"] * 5, "attention", "mlp"] * 3}
_GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4}
SHAPES: dict[str, dict[str, Any]] = {  # a Qwen3 unless it names another type; tied embeddings, heads of 128
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3_5": {**_SMALL, **_QWEN3_5},
    "nemotron_h": {**_SMALL, **_NEMOTRON_H},
    "gpt_oss": {**_SMALL, **_GPT_OSS, "intermediate_size": 1024, "num_hidden_layers": 16},
    "tiny": {**_TINY, "num_hidden_layers": 2},
    "tiny_qwen3_5": {**_TINY, **_QWEN3_5, "layer_types": [_LINEAR, _FULL], "num_hidden_layers": 2},
    "tiny_nemotron_h": {**_TINY, **_NEMOTRON_H, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
    "tiny_gpt_oss": {**_TINY, **_GPT_OSS, "num_hidden_layers": 2},
}


@dataclass(frozen=True)
class Cell:
    """A contestant on a shape, with packs of `pack` tokens; `folder` holds the models."""

    contestant: str
    shape: str
    pack: int
    step_tokens: int
    steps: int
    first: int
    overrides: tuple[str, ...]
    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / self.shape

    def documents(self) -> list[list[Document]]:
        """Make the documents of each step; the first step is not measured."""
        rng = np.random.default_rng(0)
        mean = long_tailed_lengths(10_000, self.pack, rng)[0].mean()
        count = max(round(self.step_tokens / mean), 10)
        return [make_documents(count, self.pack, vocabulary(self.shape), rng) for _ in range(self.steps + 1)]

    def few_documents(self) -> list[Document]:
        """Make documents with which a contestant can be built."""
        return replace(self, pack=512, step_tokens=2048, steps=0).documents()[0]

    def figures(self, lengths: Sequence[int], targets: int, targets_only: bool, took: float) -> dict[str, Any]:
        """Return tokens per second, MFU by model FLOPs and by computed FLOPs, and the peaks since the last call."""
        tokens = sum(lengths)
        computed = targets if targets_only else tokens
        mfus = {
            "mfu": mfu(flops(self.shape, lengths, tokens), took),
            "computed_mfu": mfu(flops(self.shape, lengths, computed), took),
        }
        return {"tokens_per_second": tokens / took, **mfus, **peak_memory()}


def vocabulary(shape: str) -> int:
    """Return the vocabulary size of a shape's model."""
    return 1024 if shape.startswith("tiny") else 151_936


def config_of(shape: str) -> Any:
    """Return a shape's config: half as many key/value heads as query heads, tied embeddings."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        **{"model_type": "qwen3", **SHAPES[shape]},
        num_key_value_heads=SHAPES[shape]["num_attention_heads"] // 2,
        head_dim=16 if shape.startswith("tiny") else 128,
        vocab_size=vocabulary(shape),
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
    )


def flops(shape: str, lengths: Sequence[int], head_tokens: int) -> float:
    """Count the operations of forward and backward over documents of these lengths, without recomputation.

    Args:
        head_tokens: the number of tokens whose logits are computed. Model FLOPs count all tokens.
    """
    left_out = 6.0 * SHAPES[shape]["hidden_size"] * vocabulary(shape) * (sum(lengths) - head_tokens)
    return float(_model_flops(shape).documents(lengths).sum()) - left_out


@functools.cache
def _model_flops(shape: str) -> Any:
    """Return the FLOPs of a shape's model as a function of document lengths."""
    from transformers import AutoModelForCausalLM

    from verl_ext.layers import mixers_of

    config = config_of(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = train_flops(model, config, sum(mixer.state_flops(layer) for layer, mixer in mixers_of(model)))
    assert found is not None
    return found


def mfu(floating: float, took: float) -> float | None:
    """Return the share of the GPU's dense bf16 peak, or None if the peak is not known."""
    peak = peak_flops(torch.cuda.get_device_name()) if on_gpu() else None
    return None if peak is None else floating / took / peak


def peak_memory() -> dict[str, float]:
    """Return the most GB since the last call: reserved by the caching allocator, and allocated to tensors."""
    if not on_gpu():
        return {"reserved": 0.0, "allocated": 0.0}
    peak = {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
    torch.cuda.reset_peak_memory_stats()
    return {name: size / 1e9 for name, size in peak.items()}


def kernel_of(model: Any, packed: bool) -> dict[str, Any]:
    """Name the attention of a Hugging Face model, and say whether its mask is quadratic in the pack.

    transformers gives sdpa a mask of all tokens by all tokens if a row holds several documents.
    """
    name = model.config._attn_implementation
    quadratic = packed and name == "sdpa"
    return {"kernel": f"{name}, T × T mask" if quadratic else name, "quadratic": quadratic}


def optimizer_of(optimizer: Any) -> str:
    """Name an optimizer and its implementation: the one that its options set, else torch's default."""
    group = optimizer.param_groups[0]
    fused, foreach = group.get("fused"), group.get("foreach")
    if fused is None and foreach is None:
        fused, foreach = _default_to_fused_or_foreach(group["params"], differentiable=False)
    form = "fused" if fused else "foreach" if foreach else "loop"
    return f"{type(getattr(optimizer, 'optimizer', optimizer)).__name__} {form}"


def longest_of(train: Callable[[int], Any], first: int, limit: int = 2**22) -> Iterator[dict[str, Any]]:
    """Find the longest document that fits, and the longest in 80 GB; lengths grow by a quarter until memory ends."""
    yield {"longest": 0, "in_80_gb": 0, "tokens_per_second": 0.0}
    length, limit = first, limit if on_gpu() else 4 * first
    while length <= limit:
        if on_gpu():
            torch.cuda.empty_cache()  # else memory cached for shorter documents would count
        try:
            train(length)
            peak_memory()
            took = seconds(lambda length=length: train(length))
        except torch.cuda.OutOfMemoryError:
            break
        yield {"longest": length, "tokens_per_second": length / took}
        if peak_memory()["reserved"] <= 80:
            yield {"in_80_gb": length}
        length = -(-length * 5 // 4 // 256) * 256
