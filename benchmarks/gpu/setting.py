"""What every cell has in common, with or without verl in its process: shapes, documents, FLOPs, the clock."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

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


def tokens_of(documents: list[Document]) -> int:
    """All tokens of the documents."""
    return sum(len(document["input_ids"]) for document in documents)


def flops(shape: str, documents: list[Document]) -> float:
    """Of forward and backward: 6 a token and matrix parameter, 6·l²·width a document and layer in causal attention."""
    given = SHAPES[shape]
    hidden, heads = given["hidden_size"], given["num_attention_heads"]
    size, kv_heads = head_size(shape), heads // 2
    layer = hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * given["intermediate_size"]
    matrices = given["num_hidden_layers"] * layer + hidden * vocabulary(shape)
    squares = sum(float(len(document["input_ids"])) ** 2 for document in documents)
    return 6.0 * matrices * tokens_of(documents) + 6.0 * squares * heads * size * given["num_hidden_layers"]


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


def peak_memory() -> int:
    """Bytes reserved at the most since the last call."""
    if not torch.cuda.is_available():
        return 0
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peak


def throughput(train: Callable[[Any], Any], batches: list[Any], spec: dict[str, Any], documents: list[list[Document]]):
    """Tokens per second, MFU and peak over all steps but the first."""
    train(batches[0])
    peak_memory()
    seconds = sum(timed(lambda batch=batch: train(batch)) for batch in batches[1:])
    measured = documents[1:]
    return {
        "tokens_per_second": sum(map(tokens_of, measured)) / seconds,
        "mfu": mfu(sum(flops(spec["shape"], step) for step in measured), seconds),
        "peak": peak_memory(),
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
        if peak_memory() <= 80e9:
            found["in_80_gb"] = length
        length = -(-length * 5 // 4 // 256) * 256
    return found


def spec_of_this_process() -> dict[str, Any]:
    """The cell that this process is to measure."""
    return json.loads(sys.argv[1])
