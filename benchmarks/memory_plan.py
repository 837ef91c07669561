"""Compare peak memory predicted on fake tensors with real ranks' resident memory. README.md explains the table."""
# ruff: noqa: E402 - upstream warns while it is imported

import argparse
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("VERL_PLATFORM", "cpu")
sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]  # verl imports it, with pages of warnings
warnings.simplefilter("ignore")  # of upstream, on every rank
logging.disable(logging.INFO)

from benchmarks.quiet import no_progress_bars, quiet
from verl_ext.config import compose
from verl_ext.config.resolve import resolve_device
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.plugin import PACKED
from verl_ext.tools.plan.report import Predictor
from verl_ext.tools.plan.run import Job, build_engine, fill_optimizer, take_step
from verl_ext.trainer.batch import StepBatch, StepCollator
from verl_ext.values import plain

_MIB = 2**20
_SHAPE = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
_DENSE = {**_SHAPE, "model_type": "qwen3", "vocab_size": 32_000, "intermediate_size": 1536, "head_dim": 64}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
_MODELS: dict[str, dict[str, Any]] = {
    "dense": _DENSE,
    "tied": {**_DENSE, "tie_word_embeddings": True},
    "experts": {**_DENSE, **_EXPERTS, "model_type": "qwen3_moe"},
}
_QWEN3_8B = Path(__file__).resolve().parent.parent / "recipes/glm_long/qwen3_8b"
_CHECKPOINTING = "model.enable_gradient_checkpointing"


@dataclass(frozen=True)
class Case:
    """A run on `ranks` ranks, whose steps have `micro_batches` micro-batches of `tokens` tokens."""

    name: str
    model: str
    ranks: int
    tokens: int
    micro_batches: int
    overrides: tuple[str, ...]


CASES = (
    Case("dense", "dense", 1, 4096, 1, (f"{_CHECKPOINTING}=false",)),
    Case("dense, checkpointing, plain head", "dense", 1, 4096, 1, (f"{_CHECKPOINTING}=true", "loss.head=plain")),
    Case("LoRA", "dense", 1, 4096, 1, (f"{_CHECKPOINTING}=false", "model=lora", "loss.head=targets")),
    # with a small block of logits, the peak is in the backward pass of a layer
    Case("dense, checkpointing, small head", "dense", 1, 8192, 1, (f"{_CHECKPOINTING}=true", "loss.head_block_mib=16")),
    Case(
        "the same over tiles of 512 tokens",
        *("dense", 1, 8192, 1),
        (f"{_CHECKPOINTING}=true", "loss.head_block_mib=16", "model.tile_tokens=512"),
    ),
    Case("experts, checkpointing, 2 ranks", "experts", 2, 4096, 1, (f"{_CHECKPOINTING}=true",)),
    Case("tied, sequence parallel 2", "tied", 2, 8192, 1, (f"{_CHECKPOINTING}=false", "parallel=ulysses2")),
    Case(
        "dense, 2 ranks, 3 micro-batches, no_sync",
        *("dense", 2, 2048, 3),
        (f"{_CHECKPOINTING}=false", "engine.use_no_sync_for_gradient_accumulation=true"),
    ),
)


def job_of(case: Case, folder: str, overrides: Sequence[str] = ()) -> Job:
    """Return the job of a case on CPU ranks."""
    config = compose([f"model.path={folder}", "data.train_dir=unused", *case.overrides, *overrides])
    resolve_device(config, None)
    batch = batch_of(case.tokens)
    return Job(plain(config), [[batch] * case.micro_batches], case.ranks, 0, "sdpa", PACKED, on_gpu=False)


def batch_of(tokens: int) -> StepBatch:
    """Return a pack of two documents in which every second token is a target."""
    pack = {
        "input_ids": torch.arange(tokens) % 1000,
        "position_ids": torch.arange(tokens // 2).repeat(2),
        "loss_mask": torch.arange(tokens) % 2,
        "category_ids": torch.zeros(tokens, dtype=torch.int64),
    }
    return StepCollator(LossSpec("token"), CategoryTable((), ()))([pack])


def job_of_length(tokens: int, overrides: Sequence[str] = ()) -> Job:
    """Return the job of one micro-batch of a Qwen3-8B on 8 GPUs, with the options of recipe=glm_long/stage2_1m."""
    config = compose(
        [
            *(f"model.path={_QWEN3_8B}", f"model.override_config.max_position_embeddings={tokens}"),
            *("data.train_dir=unused", f"data.max_tokens={tokens}", "data.train_batch_size=1", "parallel=ulysses8"),
            *("model.activation_offload=true", "model.tile_tokens=4096", *overrides),
        ]
    )
    resolve_device(config, "cuda")
    return Job(plain(config), [[batch_of(tokens)]], 8, 0, "varlen", PACKED)


def plan_lengths(lengths: Sequence[int], overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Print and return the peak of a GPU and of a rank's host memory, for each pack length in tokens."""
    cells = []
    print(f"{'tokens':>12}{'GPU GiB':>10}{'host GiB':>10}")
    with Predictor() as predictor:
        for tokens in lengths:
            prediction = predictor.predict(job_of_length(tokens, overrides))
            cells.append({"tokens": tokens, "peak": prediction.peak, "host": prediction.host})
            print(f"{tokens:>12,}{prediction.peak / 2**30:>10.1f}{prediction.host / 2**30:>10.1f}", flush=True)
    return cells


def write_model(name: str, folder: Path) -> None:
    """Write a model with random weights."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    fields = dict(_MODELS[name])
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def measure(job: Job) -> float:
    """Return the bytes by which a step's peak exceeds this rank's resident memory before the step."""
    from verl_ext.tools.plan.fake_gpu import MemoryTracker
    from verl_ext.trainer.distributed import process_group

    torch.set_num_threads(1)
    idle = MemoryTracker("cpu", fake=False)  # counts nothing, as it is never entered
    with process_group():
        with quiet():
            engine = build_engine(job)
        fill_optimizer(engine, idle)
        take_step(engine, job, job.steps[0], idle)  # creates the lasting buffers and threads
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
        take_step(engine, job, job.steps[0], idle)
        return _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def on_ranks(job: Job) -> list[float]:
    """Run :func:`measure` on real ranks, each in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "VERL_PLATFORM": "cpu"},
        **{"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},  # returns freed memory
    }
    ranks = []
    for rank in range(job.world_size):
        command = [sys.executable, __file__, "--rank"]
        of_rank = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=of_rank)
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(job))
        process.stdin.close()
        ranks.append(process)
    answers = [process.stdout.read() for process in ranks if process.stdout is not None]
    if any(process.wait() for process in ranks):
        raise RuntimeError("a rank failed; its error stands above")
    return [float(answer.splitlines()[-1]) if rank == 0 else 0.0 for rank, answer in enumerate(answers)]


def compare(case: Case, predictor: Predictor, folder: Path) -> dict[str, Any]:
    """Return rank 0's predicted and measured MiB above the memory before a step, and their ratio."""
    if not (folder / case.model).is_dir():
        write_model(case.model, folder / case.model)
    job = job_of(case, str(folder / case.model))
    prediction = predictor.predict(job)
    predicted = (prediction.peak - prediction.standing) / _MIB
    measured = on_ranks(job)[0] / _MIB
    return {"case": case.name, "predicted_mib": predicted, "measured_mib": measured, "ratio": predicted / measured}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Predicted against measured peak memory of a step.")
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help="by number, from 0")
    parser.add_argument("--lengths", type=int, nargs="+", default=[], help="plan a Qwen3-8B on 8 GPUs by tokens, alone")
    parser.add_argument("--overrides", nargs="+", default=[], help="of that plan, as on the trainer's command line")
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    no_progress_bars()
    if arguments.rank:
        print(measure(pickle.load(sys.stdin.buffer)))
        return
    if arguments.lengths:
        write_cells(arguments.output, plan_lengths(arguments.lengths, arguments.overrides))
        return
    cells = []
    print(f"{'case':<44}{'predicted MiB':>14}{'measured MiB':>14}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder, Predictor() as predictor:
        for number in arguments.cases:
            cell = compare(CASES[number], predictor, Path(folder))
            cells.append(cell)
            print(
                f"{cell['case']:<44}{cell['predicted_mib']:>14,.0f}{cell['measured_mib']:>14,.0f}{cell['ratio']:>8.3f}",
                flush=True,
            )
    write_cells(arguments.output, cells)


def write_cells(path: str | None, cells: list[dict[str, Any]]) -> None:
    """Write the figures as JSON, if a file is named."""
    if path:
        Path(path).write_text(json.dumps(cells, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
