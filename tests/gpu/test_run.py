"""A run on the GPU as a user starts it: train, checkpoint, resume."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.lib.tiny_model import VOCABULARY, write_tiny_model
from tests.lib.tokenized_data import write_tokenized


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return overrides that name a small model and its data."""
    folder = tmp_path_factory.mktemp("inputs")
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 4096}
    model = write_tiny_model(folder / "model", **shape, initializer_range=0.05)
    rng = np.random.default_rng(0)
    documents = []
    for length in rng.integers(2, 500, 60):
        ids = rng.integers(4, VOCABULARY, length)
        ones = np.ones(length, np.int64)
        documents.append({"input_ids": ids, "loss_mask": np.r_[0, ones[1:]], "category_ids": ones})
    data = write_tokenized(folder / "data", documents, {1: "all"})
    return [f"model.path={model}", f"data.train_dir={data}", f"data.val_dir={data}", "data.max_tokens=1024"]


def run(inputs, output, *overrides):
    """Run ``python -m verl_ext.fsdp_sft_trainer``, and return its metrics by step and name."""
    command = [sys.executable, "-m", "verl_ext.fsdp_sft_trainer", *inputs, f"trainer.default_local_dir={output}"]
    command += ["data.train_batch_size=4", "trainer.logger=[file]", "optim.lr=1e-3", *overrides]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], key): value for line in lines for key, value in line["data"].items()}


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(inputs, tmp_path, device):
    exact = ["engine.full_determinism=true"] if device.type == "cuda" else ["parallel=cpu"]
    whole = run(inputs, tmp_path / "whole", "trainer.total_training_steps=4", *exact)
    assert whole[4, "train/loss"] < whole[1, "train/loss"]
    run(inputs, tmp_path / "parts", "trainer.total_training_steps=4", "trainer.save_freq=2", *exact)
    resumed = run(
        inputs,
        tmp_path / "resumed",
        "trainer.total_training_steps=4",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path / 'parts' / 'global_step_2'}",
        *exact,
    )
    for key in ("train/loss", "train/grad_norm", "train/all_loss"):
        assert [resumed[step, key] for step in (3, 4)] == [whole[step, key] for step in (3, 4)], key
    assert resumed[4, "val/loss"] == whole[4, "val/loss"]
