"""A whole training run in a test: the trainer's own steps on the ranks that ``run_ranks`` started."""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from verl_ext.config import compose
from verl_ext.trainer.setup import prepare
from verl_ext.trainer.trainer import SFTTrainer

SMALL = ("data.max_tokens=64", "data.train_batch_size=4", "data.num_workers=0", "optim.lr=1e-2", "parallel=cpu")


def build(overrides: Sequence[str]) -> SFTTrainer:
    """Compose, validate, build. Call it on every rank."""
    return SFTTrainer(prepare(compose([*SMALL, "trainer.logger=[file]", *overrides])))


def train(overrides: Sequence[str]) -> SFTTrainer:
    """:func:`build`, resume, fit; quietly. Call it on every rank."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        trainer = build(overrides)
        trainer.resume()
        trainer.fit()
    return trainer


def train_alone(overrides: Sequence[str]) -> None:
    """:func:`train` for ``run_ranks``: gives nothing back."""
    train(overrides)


def metrics(folder: Path) -> dict[tuple[int, str], Any]:
    """What the run wrote to metrics.jsonl, by step and name."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], key): value for line in lines for key, value in line["data"].items()}


@torch.no_grad()
def plain_losses(model_folder: Path, documents: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Mean loss by category (0: all targets) of plain transformers over documents one by one."""
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
