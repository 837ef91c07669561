"""The cells of the GPU's tables: shapes, contestants, FLOPs and peaks; no import of verl beside TRL."""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.documents import Document, long_tailed_lengths, make_documents, random_document, write_documents
from benchmarks.harness import words_of
from benchmarks.meters import on_gpu, seconds
from benchmarks.models import config_of
from verl_ext.flops import peak_flops, train_flops

POSITIONS = 2**23
_QWEN3 = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
_TINY = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024}
SHAPES = {
    "0.6B": {"hidden": 1024, "intermediate_size": 3072, "layers": 28, **_QWEN3},
    "1.7B": {"hidden": 2048, "intermediate_size": 6144, "layers": 28, **_QWEN3},
    "tiny": {"hidden": 64, "intermediate_size": 128, "layers": 2, **_TINY},
}
OWN = {"ours_liger": ("model.use_liger=true",), "ours_fa3": ("attention.backend=fa3",)}
KERNELS = {  # names of kernels on a GPU, or of operations on a CPU
    "attention": "flash|fmha|sdpa|dot_product",
    "products": "gemm|nvjet|cutlass|xmma|::(add|b)?mm",
    "optimizer": "multi_tensor|adam",
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
    def vocabulary(self) -> int:
        return SHAPES[self.shape]["vocab_size"]

    def documents(self, steps: int) -> list[list[Document]]:
        """Make the documents of each step; the first step is not measured."""
        rng = np.random.default_rng(0)
        mean = long_tailed_lengths(10_000, self.pack, rng)[0].mean()
        count = max(round(self.options.step_tokens / mean), 10)
        return [make_documents(count, self.pack, self.vocabulary, rng) for _ in range(steps)]

    def build(self, budget: int, documents: Sequence[Document], steps: int) -> Any:
        """Build the contestant; a run on `documents` gives the options of ours and verl's."""
        model = self.folder / self.shape
        if self.contestant == "trl":
            from benchmarks.trl_trainers import TRLContestant

            return TRLContestant(model, budget)
        from benchmarks.contestants import Setting

        data = self.folder / f"data-{self.shape}-{budget}"
        if not data.is_dir():
            write_documents(documents, data)
        shared = ["model.enable_gradient_checkpointing=true", "optim.lr=1e-5"]
        if on_gpu():
            shared.append("engine.mixed_precision={param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}")
        setting = Setting(model, data, self.folder / "runs", budget, steps, tuple(shared))
        name = f"{self.contestant}-{self.shape}-{budget}"
        if self.contestant == "verl":
            return setting.stock(name, None)
        return setting.packed(name, *OWN.get(self.contestant, ()), *words_of(self.options.overrides))

    def load(self, built: Any, steps: Sequence[Sequence[Document]], name: object) -> list[Any]:
        """Load documents as the contestant does; ours reads them from a folder."""
        folder = self.folder / f"steps-{self.contestant}-{self.shape}-{name}"
        return [built.load(documents, folder / str(number)) for number, documents in enumerate(steps)]


def throughput(cell: Cell) -> Iterator[dict[str, Any]]:
    steps = cell.documents(cell.options.steps + 1)
    built = cell.build(cell.pack, steps[0], len(steps) + 1)
    yield (ran := built.implementations(packed=True))
    warm, *batches = cell.load(built, steps, cell.pack)
    built.train(warm)
    peak_memory()
    took = sum(seconds(lambda batch=batch: built.train(batch)) for batch in batches)
    documents = [*chain(*steps[1:])]
    lengths = [len(document["input_ids"]) for document in documents]
    yield {"tokens_per_second": sum(lengths) / took, **peak_memory()}
    if peak := peak_flops(torch.cuda.get_device_name()) if on_gpu() else None:
        targets = sum(int(document["loss_mask"].sum()) for document in documents)
        computed = targets if ran["targets_only"] else sum(lengths)
        for name, head_tokens in (("mfu", sum(lengths)), ("computed_mfu", computed)):
            yield {name: flops(cell.shape, lengths, head_tokens) / took / peak}


def longest(cell: Cell) -> Iterator[dict[str, Any]]:
    """Find the longest document that fits, and the longest in 80 GB.

    Lengths grow by a quarter until memory ends; on a CPU to four times the first.
    """
    rng = np.random.default_rng(0)
    built = cell.build(POSITIONS, [random_document(512, cell.vocabulary, rng)], 1000)
    yield {**built.implementations(packed=False), "longest": 0, "in_80_gb": 0, "tokens_per_second": 0.0}
    length = cell.options.first
    while length <= (2**22 if on_gpu() else 4 * cell.options.first):
        (batch,) = cell.load(built, [[random_document(length, cell.vocabulary, rng)]], f"document-{length}")
        if on_gpu():
            torch.cuda.empty_cache()  # else memory cached for shorter documents would count
        try:
            built.train(batch)
            peak_memory()
            took = seconds(lambda batch=batch: built.train(batch))
        except torch.cuda.OutOfMemoryError:
            break
        yield {"longest": length, "tokens_per_second": length / took}
        if peak_memory()["reserved"] <= 80:
            yield {"in_80_gb": length}
        length = -(-length * 5 // 4 // 256) * 256


def shares(cell: Cell) -> dict[str, Any]:
    """Return the shares of our step's time in which kernels of a kind ran."""
    steps = cell.documents(2)
    built = cell.build(cell.pack, steps[0], 4)
    warm, batch = cell.load(built, steps, cell.pack)
    built.train(warm)
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu() else activity.CPU]) as profile:
        took = seconds(lambda: built.train(batch))
    found = dict.fromkeys((*KERNELS, "other"), 0.0)
    for event in profile.key_averages():
        kind = next((kind for kind, names in KERNELS.items() if re.search(names, event.key, re.IGNORECASE)), "other")
        found[kind] += (event.self_device_time_total if on_gpu() else event.self_cpu_time_total) / 1e6 / took
    return {**found, "waiting": max(1 - sum(found.values()), 0.0)}


def config_of_shape(shape: str) -> Any:
    return config_of("qwen3", **SHAPES[shape], max_position_embeddings=POSITIONS, tie_word_embeddings=True)


def flops(shape: str, lengths: Sequence[int], head_tokens: int) -> float:
    """Count the operations of forward and backward, without recomputation.

    lengths: those of the documents. head_tokens: the tokens whose logits are computed; model FLOPs count all tokens.
    """
    left_out = 6.0 * SHAPES[shape]["hidden"] * SHAPES[shape]["vocab_size"] * (sum(lengths) - head_tokens)
    return float(_model_flops(shape).documents(lengths).sum()) - left_out


@functools.cache
def _model_flops(shape: str) -> Any:
    config = config_of_shape(shape)
    with torch.device("meta"):
        return train_flops(AutoModelForCausalLM.from_config(config), config)


def peak_memory() -> dict[str, float]:
    """Return the peak GB since the last call, reserved and allocated."""
    if not on_gpu():
        return {"reserved": 0.0, "allocated": 0.0}
    peak = {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
    torch.cuda.reset_peak_memory_stats()
    return {name: size / 1e9 for name, size in peak.items()}
