"""Type and check a composed configuration as the trainer does, for a machine of the test's choice."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from transformers import Qwen3Config

from verl_ext.config.architecture import Architecture
from verl_ext.config.check import check_run
from verl_ext.config.compose import complete, compose
from verl_ext.config.model import ModelFacts
from verl_ext.config.resolve import resolve_run
from verl_ext.config.run import Machine, RunConfig
from verl_ext.config.support import model_support_problems
from verl_ext.overrides import parsed_words


def sound_run(folder: Path) -> DictConfig:
    """Compose a run that passes on one CPU rank: its folders exist; its model has 12 heads, 2 key/value heads."""
    (folder / "data").mkdir()
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 96}
    Qwen3Config(max_position_embeddings=512, num_hidden_layers=1, **heads).save_pretrained(folder / "model")
    save_file({"w": torch.zeros(1)}, folder / "model" / "model.safetensors")
    paths = {"data.train_dir": "data", "model.path": "model", "trainer.default_local_dir": "out"}
    return compose([*(f"{key}={folder / name}" for key, name in paths.items()), "parallel=cpu", "optim.lr=1e-3"])


def changed(composed: DictConfig, words: Iterable[str]) -> DictConfig:
    """Return a copy of a composed configuration under overrides, without the time of composing another one."""
    config = composed.copy()
    for item in parsed_words(list(words)):
        OmegaConf.update(config, item.key, item.parsed(), force_add=True)
    return config


def typed(composed: DictConfig, *machine: Any) -> RunConfig:
    """Type a copy of a configuration for `Machine(*machine)`."""
    config = composed.copy()
    notices = complete(config)
    run = resolve_run(config, Machine(*machine))
    return replace(run, notices=(*notices, *run.notices))


def checked(composed: DictConfig, *machine: Any, hf_config: Any = None) -> ModelFacts:
    """Raise ValueError as the trainer would before a model is loaded; otherwise return the model's facts."""
    return check_run(typed(composed, *machine), hf_config)


def support_problems(hf_config: Any) -> list[str]:
    """Return the reasons why an architecture is not trained on packs."""
    return model_support_problems(Architecture(hf_config))
