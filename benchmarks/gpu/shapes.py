"""Shapes, documents, FLOPs and peaks of cells; no import of verl."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import _default_to_fused_or_foreach
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.documents import Document, long_tailed_lengths, make_documents
from benchmarks.meters import on_gpu, seconds
from verl_ext.flops import peak_flops, train_flops

POSITIONS = 2**23
SHAPES: dict[str, dict[str, int]] = {  # of a Qwen3 with tied embeddings
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}


@dataclass(frozen=True)
class Cell:
    """A contestant on a shape and pack; `folder` holds the models."""

    contestant: str
    shape: str
    pack: int
    options: Any
    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / self.shape

    def documents(self) -> list[list[Document]]:
        """Make the documents of each step; the first step is not measured."""
        return step_documents(self.shape, self.pack, self.options.step_tokens, self.options.steps + 1)

    def few_documents(self) -> list[Document]:
        return step_documents(self.shape, 512, 2048, 1)[0]

    def figures(self, lengths: Sequence[int], targets: int, targets_only: bool, took: float) -> dict[str, Any]:
        """Return tokens per second, MFU by model and computed FLOPs, peaks."""
        figures = {"tokens_per_second": sum(lengths) / took, **peak_memory()}
        if peak := peak_flops(torch.cuda.get_device_name()) if on_gpu() else None:
            computed = targets if targets_only else sum(lengths)
            for name, head_tokens in (("mfu", sum(lengths)), ("computed_mfu", computed)):
                figures[name] = flops(self.shape, lengths, head_tokens) / took / peak
        return figures


def step_documents(shape: str, pack: int, step_tokens: int, steps: int) -> list[list[Document]]:
    rng = np.random.default_rng(0)
    mean = long_tailed_lengths(10_000, pack, rng)[0].mean()
    count = max(round(step_tokens / mean), 10)
    return [make_documents(count, pack, vocabulary(shape), rng) for _ in range(steps)]


def vocabulary(shape: str) -> int:
    return 1024 if shape == "tiny" else 151_936


def config_of(shape: str) -> Any:
    sizes = {**SHAPES[shape], "num_key_value_heads": SHAPES[shape]["num_attention_heads"] // 2}
    sizes |= {"head_dim": 16 if shape == "tiny" else 128, "vocab_size": vocabulary(shape)}
    return AutoConfig.for_model("qwen3", **sizes, max_position_embeddings=POSITIONS, tie_word_embeddings=True)


def flops(shape: str, lengths: Sequence[int], head_tokens: int) -> float:
    """Count the operations of forward and backward, without recomputation.

    lengths: those of the documents. head_tokens: the tokens whose logits are computed; model FLOPs count all tokens.
    """
    left_out = 6.0 * SHAPES[shape]["hidden_size"] * vocabulary(shape) * (sum(lengths) - head_tokens)
    return float(_model_flops(shape).documents(lengths).sum()) - left_out


@functools.cache
def _model_flops(shape: str) -> Any:
    config = config_of(shape)
    with torch.device("meta"):
        return train_flops(AutoModelForCausalLM.from_config(config), config)


def peak_memory() -> dict[str, float]:
    """Return the peak GB since the last call, reserved and allocated."""
    if not on_gpu():
        return {"reserved": 0.0, "allocated": 0.0}
    peak = {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
    torch.cuda.reset_peak_memory_stats()
    return {name: size / 1e9 for name, size in peak.items()}


def kernel_of(model: Any, packed: bool) -> dict[str, Any]:
    """Name a model's attention; tell whether its mask is quadratic.

    transformers gives sdpa a mask of all tokens by all tokens if a row holds several documents.
    """
    name = model.config._attn_implementation
    quadratic = packed and name == "sdpa"
    return {"kernel": f"{name}, T × T mask" if quadratic else name, "quadratic": quadratic}


def optimizer_of(optimizer: Any) -> str:
    """Name an optimizer and its implementation, by options or torch's default."""
    group = optimizer.param_groups[0]
    fused, foreach = group.get("fused"), group.get("foreach")
    if fused is None and foreach is None:
        fused, foreach = _default_to_fused_or_foreach(group["params"], differentiable=False)
    form = "fused" if fused else "foreach" if foreach else "loop"
    return f"{type(getattr(optimizer, 'optimizer', optimizer)).__name__} {form}"


def longest_of(train: Callable[[int], Any], first: int) -> Iterator[dict[str, Any]]:
    """Find the longest document that fits, and the longest in 80 GB.

    Lengths grow by a quarter until memory ends; on a CPU to four times the first.
    """
    yield {"longest": 0, "in_80_gb": 0, "tokens_per_second": 0.0}
    length, limit = first, 2**22 if on_gpu() else 4 * first
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
