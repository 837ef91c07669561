"""The common parts of every cell, with or without verl in its process: shapes, documents, FLOPs, the clock."""

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import _default_to_fused_or_foreach
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.run import SHAPES
from benchmarks.lengths import Document, long_tailed_lengths, make_documents
from verl_ext.flops import peak_flops, train_flops
from verl_ext.layers import mixers_of

VOCABULARY = 151_936
POSITIONS = 2**23


def vocabulary(shape: str) -> int:
    """Return the vocabulary size of a shape's model."""
    return 1024 if shape.startswith("tiny") else VOCABULARY


def steps_of_documents(shape: str, pack: int, step_tokens: int, steps: int) -> list[list[Document]]:
    """Make the documents of each step; the first step is not measured."""
    rng = np.random.default_rng(0)
    mean = long_tailed_lengths(10_000, pack, rng)[0].mean()
    count = max(round(step_tokens / mean), 10)
    return [make_documents(count, pack, vocabulary(shape), rng) for _ in range(steps + 1)]


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
    config = config_of(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    states = sum(mixer.state_flops(layer) for layer, mixer in mixers_of(model))
    found = train_flops(model, config, states)
    assert found is not None
    return found


def config_of(shape: str) -> Any:
    """Return a shape's config: half as many key/value heads as query heads, tied embeddings."""
    return AutoConfig.for_model(
        **{"model_type": "qwen3", **SHAPES[shape]},
        num_key_value_heads=SHAPES[shape]["num_attention_heads"] // 2,
        head_dim=head_size(shape),
        vocab_size=vocabulary(shape),
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
    )


def head_size(shape: str) -> int:
    """Return the size of a shape's attention heads."""
    return 16 if shape.startswith("tiny") else 128


def mfu(floating: float, seconds: float) -> float | None:
    """Return the share of the GPU's dense bf16 peak, or None if the peak is not known."""
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return None if peak is None else floating / seconds / peak


def timed(train: Callable[[], Any]) -> float:
    """Return the seconds of a call, including the GPU's work."""
    synchronize()
    began = time.perf_counter()
    train()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory() -> dict[str, int]:
    """Return the most bytes since the last call: reserved by the caching allocator, and allocated to tensors."""
    if not torch.cuda.is_available():
        return {"reserved": 0, "allocated": 0}
    peak = {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
    torch.cuda.reset_peak_memory_stats()
    return peak


def report(**implementations: Any) -> None:
    """Print a contestant's implementations before it trains, so that a row without figures has them too."""
    print(json.dumps(implementations), flush=True)


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


def throughput(
    train: Callable[[Any], Any],
    batches: list[Any],
    spec: dict[str, Any],
    documents: list[list[Document]],
    targets_only: bool,
) -> dict[str, Any]:
    """Measure all steps but the first; see :func:`figures`."""
    train(batches[0])
    peak_memory()
    seconds = sum(timed(lambda batch=batch: train(batch)) for batch in batches[1:])
    measured = [document for step in documents[1:] for document in step]
    lengths = [len(document["input_ids"]) for document in measured]
    targets = sum(int(document["loss_mask"][1:].sum()) for document in measured)
    return figures(spec["shape"], lengths, targets if targets_only else sum(lengths), seconds)


def figures(shape: str, lengths: Sequence[int], head_tokens: int, seconds: float) -> dict[str, Any]:
    """Return tokens per second, MFU by model FLOPs and by computed FLOPs, and peak memory in bytes."""
    return {
        "tokens_per_second": sum(lengths) / seconds,
        "mfu": mfu(flops(shape, lengths, sum(lengths)), seconds),
        "computed_mfu": mfu(flops(shape, lengths, head_tokens), seconds),
        **peak_memory(),
    }


def longest(train: Callable[[int], Any], first: int, limit: int = 2**22) -> dict[str, Any]:
    """Find the longest document that fits, and the longest in 80 GB; lengths grow by a quarter until memory ends."""
    found = {"longest": 0, "in_80_gb": 0, "tokens_per_second": 0.0}
    length, limit = first, limit if torch.cuda.is_available() else 4 * first
    while length <= limit:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # else memory cached for shorter documents would count
        try:
            train(length)
            peak_memory()
            seconds = timed(lambda length=length: train(length))
        except torch.cuda.OutOfMemoryError:
            break
        found |= {"longest": length, "tokens_per_second": length / seconds}
        if peak_memory()["reserved"] <= 80e9:
            found["in_80_gb"] = length
        length = -(-length * 5 // 4 // 256) * 256
    return found


def spec_of_this_process() -> dict[str, Any]:
    """Return the cell that this process is to measure."""
    return json.loads(sys.argv[1])
