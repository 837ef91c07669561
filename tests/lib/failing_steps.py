"""Runs in which steps have no finite loss."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.lib.training import into


def poison_of(tiny_model: Path, folder: Path, token: int) -> Path:
    """Write the tiny model with a NaN embedding for one token; a step that reads it has no finite gradient."""
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def overrides_of(data: str, model: Path, output: Path, *more: str) -> list[str]:
    return [
        *(f"data.train_dir={data}", f"model.path={model}", into(output)),
        *("data.strategy=none", "data.train_batch_size=2", "data.shuffle=false", "data.balance=none"),
        *("trainer.spike_factor=2", *more),
    ]
