"""Our dataset and engine inside verl's own trainer: what a team that keeps its verl deployment gets."""

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.ranks import run_ranks
from tests.tiny_model import VOCABULARY
from tests.tokenised_data import random_documents, write_tokenised


def train_with_stock_verl(folder: str, model: str, output: str) -> list[float]:
    """verl.trainer.sft_trainer.SFTTrainer on our packs; the loss of every step."""
    os.environ["VERL_ENGINE_VENDOR"] = "verl_ext"
    os.environ["VERL_FILE_LOGGER_PATH"] = f"{output}/metrics.jsonl"
    from hydra import compose, initialize_config_module
    from verl.trainer.sft_trainer import SFTTrainer

    from verl_ext.plugin import register_engine

    register_engine()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "sft_trainer_engine",
            overrides=[
                "data.custom_cls.path=pkg://verl_ext.data",
                "data.custom_cls.name=SFTDataSet",
                f"data.train_files={folder}",
                "+data.max_tokens=64",
                "data.train_batch_size=4",
                "data.micro_batch_size_per_gpu=1",
                "data.use_dynamic_bsz=false",
                "data.num_workers=0",
                f"model.path={model}",
                "+model.override_config.attn_implementation=verl_ext_packed",
                "engine.strategy=fsdp2",
                "+engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
                "optim.lr=1e-2",
                "trainer.total_epochs=3",
                "trainer.logger=[file]",
                "trainer.device=cpu",
                f"trainer.default_local_dir={output}",
            ],
        )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        SFTTrainer(config).fit()
    lines = Path(output, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["data"]["train/loss"] for line in lines]


@pytest.mark.parametrize("ranks", [2])
def test_verls_own_trainer_trains_on_our_packs(tiny_model, tmp_path, ranks):
    rng = np.random.default_rng(0)
    folder = write_tokenised(tmp_path / "data", random_documents(rng, [20] * 30, VOCABULARY, 2))
    (tmp_path / "out").mkdir()
    losses, _ = run_ranks(train_with_stock_verl, ranks, folder, str(tiny_model), str(tmp_path / "out"))
    assert len(losses) >= 6
    assert losses[-1] < losses[0]
