"""What every cell has in common, with or without verl in its process: shapes, documents, FLOPs, the clock."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.run import SHAPES
from benchmarks.lengths import Document, long_tailed_lengths, make_documents

VOCABULARY = 151_936
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "H800": 989e12, "L40S": 362e12, "A100": 312e12}


def vocabulary(shape: str) -> int:
    """Of a shape's model."""
    return 1024 if shape == "tiny" else VOCABULARY


def steps_of_documents(shape: str, pack: int, step_tokens: int, steps: int) -> list[list[Document]]:
    """The documents of each step; the first is not measured."""
    rng = np.random.default_rng(0)
    mean = long_tailed_lengths(10_000, pack, rng)[0].mean()
    count = max(round(step_tokens / mean), 10)
    return [make_documents(count, pack, vocabulary(shape), rng) for _ in range(steps + 1)]


def flops(shape: str, lengths: Sequence[int], head_tokens: int) -> float:
    """Count the operations of forward and backward over documents of these lengths, without recomputation.

    Every token costs 6 for each parameter of a matrix, every document of length l costs 6·l²·width in each layer's
    causal attention.

    Args:
        head_tokens: tokens whose logits are computed. Model FLOPs take all of them.
    """
    given = SHAPES[shape]
    hidden, heads = given["hidden_size"], given["num_attention_heads"]
    size, kv_heads = head_size(shape), heads // 2
    layer = hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * given["intermediate_size"]
    attention = sum(float(length) ** 2 for length in lengths) * heads * size
    in_layers = given["num_hidden_layers"] * (float(layer) * sum(lengths) + attention)
    return 6.0 * (in_layers + float(hidden) * vocabulary(shape) * head_tokens)


def head_size(shape: str) -> int:
    """Of a shape's attention heads."""
    return 16 if shape == "tiny" else 128


def mfu(floating: float, seconds: float) -> float | None:
    """Share of the GPU's dense bf16 peak; None where that is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((value for key, value in PEAK_FLOPS.items() if key in name), None)
    return None if peak is None else floating / seconds / peak


def timed(train: Callable[[], Any]) -> float:
    """Seconds, the GPU's work included."""
    synchronize()
    began = time.perf_counter()
    train()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
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
    """Print what a contestant runs before it trains, so that a row without figures has it too."""
    print(json.dumps(implementations), flush=True)


def kernel_of(model: Any, packed: bool) -> dict[str, Any]:
    """Name the attention of a Hugging Face model, and say whether its mask is quadratic in the pack.

    transformers gives sdpa a mask of all tokens by all tokens wherever a row holds several documents.
    """
    name = model.config._attn_implementation
    quadratic = packed and name == "sdpa"
    return {"kernel": f"{name}, T × T mask" if quadratic else name, "quadratic": quadratic}


def optimizer_of(optimizer: Any) -> str:
    """Name an optimizer and its implementation: its options', else the one that torch takes by default."""
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
    """Return tokens per second, MFU by model FLOPs and by computed FLOPs, and the peaks of memory in bytes."""
    return {
        "tokens_per_second": sum(lengths) / seconds,
        "mfu": mfu(flops(shape, lengths, sum(lengths)), seconds),
        "computed_mfu": mfu(flops(shape, lengths, head_tokens), seconds),
        **peak_memory(),
    }


def longest(train: Callable[[int], Any], first: int, limit: int = 2**22) -> dict[str, Any]:
    """The longest document that is trained on, growing by a quarter until memory ends; and that within 80 GB."""
    found = {"longest": 0, "in_80_gb": 0, "tokens_per_second": 0.0}
    length, limit = first, limit if torch.cuda.is_available() else 4 * first
    while length <= limit:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what shorter documents left would count as this one's
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
    """The cell that this process is to measure."""
    return json.loads(sys.argv[1])
