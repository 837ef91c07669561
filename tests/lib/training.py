"""Whole training runs in tests: the trainer's own steps on the ranks that ``run_ranks`` started."""

import contextlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.lib.ranks import only_rank
from tests.lib.tiny_model import VOCABULARY
from tests.lib.tokenized_data import random_documents, write_tokenized
from verl_ext.checkpoint.layout import TRACKER, saved_folders, step_of
from verl_ext.checkpoint.state import StateReader
from verl_ext.config.compose import compose
from verl_ext.launch.protocol import Ending
from verl_ext.trainer.run import Run
from verl_ext.trainer.setup import prepare
from verl_ext.trainer.trainer import SFTTrainer

# Endings of metrics that differ between equal runs.
MEASURED = ("per_second", "per_gpu", "memory_gib", "_gb", "mfu", "save_pause")
SMALL = ("data.max_tokens=64", "data.train_batch_size=4", "data.num_workers=0", "optim.lr=1e-2", "parallel=cpu")


def small_run(
    folder: Path, model: Path, lengths: Iterable[int], *more: str, categories: int = 1, seed: int = 0
) -> list[str]:
    """Write random documents, of maths and code, below a folder; return a run's overrides without its output folder."""
    documents = random_documents(np.random.default_rng(seed), lengths, VOCABULARY, categories)
    data = write_tokenized(folder / "data", documents, {1: "maths", 2: "code"} if categories <= 2 else None)
    return [f"data.train_dir={data}", f"model.path={model}", *more]


def into(folder: Path | str) -> str:
    """Return the override that names a run's output folder."""
    return f"trainer.default_local_dir={folder}"


def settle(overrides: Sequence[str]) -> Run:
    """Compose and validate a run. Call it on every rank."""
    os.environ.pop("VERL_FILE_LOGGER_PATH", None)  # set by a previous run
    return prepare(compose([*SMALL, "trainer.logger=[file]", *overrides]))


def build(overrides: Sequence[str]) -> SFTTrainer:
    """Compose, validate and build a trainer. Call it on every rank."""
    return SFTTrainer(settle(overrides))


def fit(overrides: Sequence[str]) -> SFTTrainer:
    """Build a trainer, resume and fit. Call it on every rank."""
    trainer = build(overrides)
    trainer.resume()
    trainer.fit()
    return trainer


def train(overrides: Sequence[str]) -> SFTTrainer:
    """Call :func:`fit` quietly."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        return fit(overrides)


def train_alone(overrides: Sequence[str]) -> None:
    """Call :func:`train` for ``run_ranks``, and return nothing."""
    train(overrides)


def resume_run(overrides: Sequence[str], whole: Path, folder: Path, step: int) -> None:
    """Train in a copy of a run as it was after a step."""
    train([*overrides, into(f'"{stopped_at(whole, folder, step)}"')])


def train_twice(overrides: Sequence[str], whole: Path, folder: Path, step: int = 1) -> None:
    """Train into one folder, and into another one from the state after a step of the first."""
    train([*overrides, into(f'"{whole}"')])
    resume_run(overrides, whole, folder, step)


def train_as_programs(lines: Sequence[Sequence[str]], folder: str = ".") -> None:
    """Train in a folder by the arguments of one torchrun after the other, as each of its ranks does."""
    from verl_ext.fsdp_sft_trainer import train_composed
    from verl_ext.trainer.start import compose_and_run

    os.chdir(folder)
    for line in lines:
        compose_and_run(line[line.index("verl_ext.fsdp_sft_trainer") + 1 :], train_composed)


def heard(function: Callable[..., Any], *arguments: Any) -> str:
    """Call a function without its output; return its stderr, with the error of a user's mistake or a failed run."""
    words = io.StringIO()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(words):
        try:
            function(*arguments)
        except Ending as error:
            print(f"error: {error}", file=words)
        except SystemExit:
            pass  # its line is among the words
    return words.getvalue()


def refusals(overrides: Sequence[str], changes: Sequence[Sequence[str]]) -> list[str]:
    """Return this rank's errors of :func:`settle` for a run under each change, one after the other; "" for none."""
    told = []
    with contextlib.ExitStack() as stack:
        if not dist.is_initialized():
            stack.enter_context(only_rank())
        nowhere = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        for change in changes:
            try:
                settle([*overrides, *change])
                told.append("")
            except SystemExit as error:
                told.append(str(error.__context__))
    return told


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> None:
    """Return once a condition holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} seconds"
        time.sleep(0.02)


def metrics(folder: Path) -> dict[tuple[int, str], Any]:
    """Read the run's metrics.jsonl, by step and name."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], key): value for line in lines for key, value in line["data"].items()}


def exact_metrics(folder: Path) -> dict[tuple[int, str], Any]:
    """Return the :func:`metrics` that two equal runs share: all except measurements of the machine."""
    return {key: value for key, value in metrics(folder).items() if not key[1].endswith(MEASURED)}


def stopped_at(whole: Path, folder: Path, step: int) -> Path:
    """Copy a run as it was after a step; of several ranks, rank 0 does."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.copytree(whole, folder, symlinks=True)
        for checkpoint in saved_folders(folder):
            if step_of(checkpoint) > step:
                shutil.rmtree(checkpoint)
        (folder / TRACKER).write_text(str(step))
    if dist.is_initialized():
        dist.barrier()
    return folder


def tracked_step(folder: Path) -> int | None:
    """Return the step in verl's tracker file, or None without one."""
    tracker = folder / TRACKER
    return int(tracker.read_text()) if tracker.is_file() else None


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint's model and optimizer, whole."""
    return StateReader(checkpoint / "state").read_whole("")


def differences(folder: Path, expected: Path, step: int) -> list[str]:
    """Name the metrics, and the tensors of a step's checkpoint, that differ between two runs in any bit."""
    found, wanted = exact_metrics(folder), exact_metrics(expected)
    different = [
        f"{key[1]} of step {key[0]}" for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)
    ]
    tensors, others = (tensors_of(run / f"global_step_{step}") for run in (folder, expected))
    different += tensors.keys() ^ others.keys()
    return different + [name for name in tensors.keys() & others.keys() if not tensors[name].equal(others[name])]


@torch.no_grad()
def plain_losses(model_folder: Path, documents: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return plain transformers' mean loss by category (0 for all targets), one document at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    sums: dict[int, list[float]] = {}
    for document in documents:
        ids = torch.as_tensor(document["input_ids"], dtype=torch.int64)
        logs = model(ids[None]).logits[0].double().log_softmax(-1)
        for t in range(1, len(ids)):
            if document["loss_mask"][t]:
                loss = -logs[t - 1, ids[t]].item()
                for category in (0, int(document["category_ids"][t])):
                    sums.setdefault(category, []).append(loss)
    return {category: sum(values) / len(values) for category, values in sums.items()}


FP16 = "engine.mixed_precision={param_dtype:fp16,reduce_dtype:fp32,buffer_dtype:fp32}"
