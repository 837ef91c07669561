"""verl's own trainer with one of our dataset classes, on the ranks that ``run_ranks`` started."""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

IMPORTS = Version(transformers.__version__) < Version("5.23")
WHY = "verl 0.9.1's own trainer and dataset of chats cannot be imported with transformers 5.23 or newer"
needs_stock_verl = pytest.mark.skipif(not IMPORTS, reason=WHY)


def train_with_stock_verl(dataset: str, model: str, output: str, overrides: Sequence[str]) -> list[float]:
    """Run verl.trainer.sft_trainer.SFTTrainer around our engine, and return the loss of every step."""
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
                *("data.custom_cls.path=pkg://verl_ext.data", f"data.custom_cls.name={dataset}"),
                *("data.train_batch_size=4", "data.use_dynamic_bsz=false", "data.num_workers=0", f"model.path={model}"),
                *("+model.override_config.attn_implementation=verl_ext_packed", "engine.strategy=fsdp2"),
                *("+engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}", "optim.lr=1e-2"),
                *("trainer.logger=[file]", "trainer.device=cpu", f"trainer.default_local_dir={output}"),
                *overrides,
            ],
        )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        SFTTrainer(config).fit()
    lines = [json.loads(line)["data"] for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]
