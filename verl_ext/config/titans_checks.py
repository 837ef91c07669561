"""What a model with long-term memory can and cannot have in a run, told before its weights are read."""

import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from verl_ext.config.nearest import choice_problem, show
from verl_ext.config.titans_options import ATTENTION, TRAIN, is_titans

OWN_KEYS = ("train", "memory_checkpoint", "memory")


def titans_problems(config: DictConfig) -> list[str]:
    """What `model=qwen_titans` cannot have, told from the configuration alone; its own keys on any other model."""
    if not is_titans(config):
        return [
            f"model.{key} is an option of model=qwen_titans; got {show(config.model[key])} without it"
            for key in OWN_KEYS
            if key in config.model
        ]
    problems = [choice_problem("model.train", config.model.train, TRAIN)]
    problems.append(choice_problem("attention.backend", config.attention.backend, tuple(ATTENTION)))
    problems += [
        f"{key} must be {show(allowed)} with model=qwen_titans: {why}; got {show(OmegaConf.select(config, key))}"
        for key, allowed, why in _ONLY
        if OmegaConf.select(config, key, default=allowed) != allowed
    ]
    return [problem for problem in problems if problem]


_ONLY: tuple[tuple[str, Any, str], ...] = (
    ("engine.ulysses_sequence_parallel_size", 1, "the memory reads a row's chunks one after the other on one rank"),
    ("engine.strategy", "fsdp2", "its engine shards the memory by FSDP2"),
    ("model.lora_rank", 0, "model.train=memory is what trains few parameters"),
    ("model.lora_adapter_path", None, "it has no adapters"),
    ("model.use_liger", False, "liger does not know the model"),
    ("model.enable_activation_offload", False, "its engine keeps activations where they are"),
    ("data.strategy", "none", "a row is one document, whose memory starts empty (data=babilong sets it)"),
    ("data.pad_mode", "right", "every rank must read equally many chunks (data=babilong sets it)"),
)


def check_titans_model(config: DictConfig, hf_config: Any) -> Any:
    """The config with memory around the one that `model.path` holds.

    Raises:
        ValueError: a base that is no Qwen, an option of the memory that cannot be, rows that are no whole chunks, a
            `model.memory_checkpoint` of another model; a line each.
    """
    from verl_ext.config.titans_model import titans_config  # here: only such a run needs the model

    titans = titans_config(hf_config, config.model.memory)
    problems = []
    tokens, chunk = config.data.max_tokens, titans.chunk_size
    if isinstance(tokens, int) and tokens % chunk:
        up = -(-tokens // chunk) * chunk
        problems.append(
            "data.max_tokens (data.max_length of data=babilong) must be a multiple of model.memory.chunk_size="
            f"{chunk}; got {tokens} (nearest above: {up})"
        )
    if config.model.train == "memory" and not titans.memory_settings.layers:
        problems.append(
            "model.memory.layers must name a layer with model.train=memory, which trains nothing else; got []"
        )
    problems += _memory_problems(config.model.memory_checkpoint, titans)
    if problems:
        raise ValueError("\n".join(problems))
    return titans


def _memory_problems(path: str | None, titans: Any) -> list[str]:
    """Whether `model.memory_checkpoint` fits: by the settings beside it, else tried on a model without storage."""
    if path is None:
        return []
    from verl_ext.models.qwen_titans import QwenTitansForCausalLM, load_memory_checkpoint

    settings = Path(path).with_suffix(".json")
    if settings.is_file():
        try:
            trained = json.loads(settings.read_text(encoding="utf-8"))
        except ValueError:
            trained = None
        if not isinstance(trained, dict):
            return [f"model.memory_checkpoint: the settings beside it must be a JSON object; got {settings}"]
        told = [
            f"model.memory.{name} must be {show(value)}, as in {settings}, with model.memory_checkpoint={path}; got "
            f"{show(titans.memory.get(name))}"
            for name, value in trained.items()
            if titans.memory.get(name) != value
        ]
        if told:
            return told

    with torch.device("meta"):
        model = QwenTitansForCausalLM(titans)
    try:
        load_memory_checkpoint(model, path)
    except ValueError as error:
        return [f"model.memory_checkpoint: {error}"]
    return []
