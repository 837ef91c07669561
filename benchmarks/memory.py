"""The peak memory that `verl-ext plan` predicts, beside that of real ranks.

Both are above what is held between steps, for the kernel and type of the real ranks, each in a fresh process.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import ROOT, on_ranks
from benchmarks.harness import Row, Sizes, option, table, words_of
from benchmarks.meters import MIB, measured
from benchmarks.models import config_of, write_model
from verl_ext.config.compose import compose
from verl_ext.config.resolve import resolve_run
from verl_ext.config.run import Machine
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.plugin import PACKED
from verl_ext.tools.plan.report import Predictor
from verl_ext.tools.plan.run import Job, build_engine, fill_optimizer, take_step
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.collator import StepCollator

os.environ.setdefault("VERL_PLATFORM", "cpu")  # of the processes that are started
_MODELS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "qwen3"},
    "tied": {"kind": "qwen3", "tie_word_embeddings": True},
    "experts": {"kind": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
}
_VOCABULARY = 32_000
_RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # once it is freed
QUICK = ["cases=[0]"]


@dataclass(frozen=True)
class Case:
    """A run whose steps have `micro_batches` micro-batches of `tokens` tokens."""

    name: str
    overrides: tuple[str, ...] = ()
    model: str = "dense"
    ranks: int = 1
    tokens: int = 4096
    micro_batches: int = 1


_CHECKPOINTING = "model.enable_gradient_checkpointing=true"
_SMALL_BLOCK = "loss.head_block_mib=16"  # of logits, so that the peak is in the backward pass of a layer
_TILES = (_SMALL_BLOCK, "model.tile_tokens=512", _CHECKPOINTING)
_NO_SYNC = "engine.use_no_sync_for_gradient_accumulation=true"
CASES = (
    Case("dense"),
    Case("dense, checkpointing, plain head", ("loss.head=plain", _CHECKPOINTING)),
    Case("LoRA, head of targets", ("model=lora", "loss.head=targets")),
    Case("dense, checkpointing, small block of the head", (_SMALL_BLOCK, _CHECKPOINTING), tokens=8192),
    Case("the same over tiles of 512 tokens", _TILES, tokens=8192),
    Case("experts, checkpointing, 2 ranks", (_CHECKPOINTING,), model="experts", ranks=2),
    Case("tied, sequence parallel over 2 ranks", ("parallel=ulysses2",), model="tied", ranks=2, tokens=8192),
    Case("dense, 2 ranks, 3 micro-batches, no_sync", (_NO_SYNC,), ranks=2, tokens=2048, micro_batches=3),
    Case("LoRA on NF4, checkpointing", ("model=lora", "model.quantization=nf4", _SMALL_BLOCK, _CHECKPOINTING)),
)
_BASES = {"fp32": "model.frozen_dtype=fp32", "bf16": "model.frozen_dtype=compute", "NF4": "model.quantization=nf4"}


class Options(Sizes):
    cases: list[int] = option(list(range(len(CASES))), "cases by number, from 0")
    lengths: list[int] = option([1_048_576, 4_194_304], "tokens of a pack, for --table lengths and adapters")
    overrides: dict[str, Any] = option({}, "options of those plans, such as data.max_tokens:65536")

    def problems(self) -> Iterable[str]:
        return (f"cases must be 0 to {len(CASES) - 1}; got {n}" for n in self.cases if not 0 <= n < len(CASES))


@table("case {case} | predicted {predicted:,.0f} MiB | measured {measured:,.0f} MiB | ratio {ratio:.3f}")
def cases(options: Options, folder: Path) -> Iterable[Row]:
    """The peak above the memory before a step, on rank 0."""
    with Predictor() as predictor:
        for case in (CASES[number] for number in options.cases):
            model = folder / case.model
            if not model.is_dir():
                sizes = {"vocab_size": _VOCABULARY, "intermediate_size": 1536, **_MODELS[case.model]}
                write_model(model, config_of(hidden=512, layers=4, groups=2, **sizes), _VOCABULARY)
            overrides = (f"model.path={model}", "model.enable_gradient_checkpointing=false", *case.overrides)
            job = job_of(overrides, [batch_of(case.tokens)] * case.micro_batches, case.ranks)
            prediction = predictor.predict(job)
            predicted = (prediction.peak - prediction.standing) / MIB
            measured_mib = on_ranks(case.ranks, measure, job, **_RETURN_MEMORY)[0]["peak_mib"]
            ratio = predicted / measured_mib
            yield {"case": case.name, "predicted": predicted, "measured": measured_mib, "ratio": ratio}


@table(
    "tokens of a pack {tokens:,} | peak of one GPU {gpu:.1f} GiB | host memory of one rank {host:.1f} GiB",
    on_request=True,
)
def lengths(options: Options, folder: Path) -> Iterable[Row]:
    """Plans of a Qwen3-8B on 8 GPUs, by length of packs."""
    model = f"model.path={ROOT / 'recipes/papers/glm_long/qwen3_8b'}"
    memory = ("parallel=ulysses8", "model.activation_offload=true", "model.tile_tokens=4096")
    with Predictor() as predictor:
        for tokens in options.lengths:
            data = (f"data.max_tokens={tokens}", "data.train_batch_size=1")
            positions = f"model.override_config.max_position_embeddings={tokens}"
            overrides = (model, positions, *data, *memory, *words_of(options.overrides))
            prediction = predictor.predict(job_of(overrides, [batch_of(tokens)], 8, "cuda"))
            yield {"tokens": tokens, "gpu": prediction.peak / 2**30, "host": prediction.host / 2**30}


@table("base {base} | tokens of a pack {tokens:,} | peak of one GPU {gpu:.1f} GiB", on_request=True)
def adapters(options: Options, folder: Path) -> Iterable[Row]:
    """Plans of a Qwen3-8B under adapters of rank 32 on one GPU: of two and three layers, and 33 more like the third."""
    model = ("model=lora", f"model.path={ROOT / 'recipes/papers/glm_long/qwen3_8b'}", "model.tile_tokens=4096")
    with Predictor() as predictor:
        for (base, override), tokens in product(_BASES.items(), options.lengths):
            sizes = (f"data.max_tokens={tokens}", f"model.override_config.max_position_embeddings={tokens}")
            words = (*model, override, *sizes, "model.activation_offload=true", *words_of(options.overrides))
            layers = [(*words, f"model.override_config.num_hidden_layers={number}") for number in (2, 3)]
            two, three = (predictor.predict(job_of(of, [batch_of(tokens)], 1, "cuda")).peak for of in layers)
            yield {"base": base, "tokens": tokens, "gpu": (three + 33 * (three - two)) / 2**30}


def job_of(overrides: Sequence[str], step: Sequence[StepBatch], ranks: int, device: str | None = None) -> Job:
    """Return the job of one step, on CPU ranks by default."""
    config = resolve_run(compose(["data.train_dir=unused", "optim.lr=1e-5", *overrides]), Machine(ranks, device))
    return Job(config.values, [step], ranks, 0, "varlen" if device else "sdpa", PACKED, on_gpu=device is not None)


def batch_of(tokens: int) -> StepBatch:
    """Return a pack of two documents, every second token a target."""
    pack = {
        "input_ids": torch.arange(tokens) % 1000,
        "position_ids": torch.arange(tokens // 2).repeat(2),
        "loss_mask": torch.arange(tokens) % 2,
        "category_ids": torch.zeros(tokens, dtype=torch.int64),
    }
    return StepCollator(LossSpec("token"), CategoryTable((), ()))([pack])


def measure(job: Job) -> Row:
    """Return how far a step's peak exceeds this rank's memory before it."""
    from verl_ext.tools.plan.fake_gpu import MemoryTracker

    idle = MemoryTracker("cpu", fake=False)  # counts nothing, as it is never entered
    engine = build_engine(job)
    fill_optimizer(engine, idle)
    take_step(engine, job, job.steps[0], idle)  # creates the lasting buffers and threads
    with measured() as figures:
        take_step(engine, job, job.steps[0], idle)
    return figures
