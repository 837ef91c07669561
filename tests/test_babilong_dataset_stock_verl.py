"""BABILongDataset inside verl's own trainer."""

import contextlib
import json
import os
from pathlib import Path

from tests.babilong_files import records, write_records
from tests.ranks import run_ranks


def train_with_stock_verl(path: str, model: str, output: str) -> list[float]:
    """verl.trainer.sft_trainer.SFTTrainer on BABILong rows; the loss of every step."""
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
                "data.custom_cls.name=BABILongDataset",
                f"data.train_files={path}",
                f"data.val_files={path}",
                "data.max_length=32",
                "+data.answer_reserve_tokens=4",
                f"+data.cache_dir={output}/cache",
                "data.train_batch_size=4",
                "data.micro_batch_size_per_gpu=2",
                "data.use_dynamic_bsz=false",
                "data.num_workers=0",
                f"model.path={model}",
                "+model.override_config.attn_implementation=verl_ext_packed",
                "engine.strategy=fsdp2",
                "+engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
                "optim.lr=1e-2",
                "trainer.total_epochs=2",
                "trainer.logger=[file]",
                "trainer.device=cpu",
                f"trainer.default_local_dir={output}",
            ],
        )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        SFTTrainer(config).fit()
    lines = [json.loads(line)["data"] for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def test_verls_own_trainer_takes_babilong_rows(tiny_model, tmp_path):
    path = write_records(tmp_path / "data/qa1/0k.json", records(8, sentences=1))
    (tmp_path / "out").mkdir()
    (losses,) = run_ranks(train_with_stock_verl, 1, path, str(tiny_model), str(tmp_path / "out"))
    assert len(losses) == 4
    assert losses[-1] < losses[0]
