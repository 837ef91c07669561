"""What a composed config leaves open, settled in place: attention, dataset class, paths, device, precision, kernels.

Each function returns notices for what it changed against the user's words; what cannot be is a ValueError.
"""

import math
import os

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_ext.attention import PACKED_ATTENTION
from verl_ext.config.model import ATTENTION, is_titans
from verl_ext.config.own_data import PACKS, PRETRAIN, splits_validation
from verl_ext.values import choice_problem

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
PATHS = (
    "data.train_dir",
    "data.val_dir",
    "data.custom_cls.path",
    "model.path",
    "model.hf_config_path",
    "model.tokenizer_path",
    "model.lora_adapter_path",
    "model.memory_checkpoint",
    "trainer.default_local_dir",
    "trainer.resume_from_path",
)


def resolve_config(config: DictConfig) -> list[str]:
    """Settles what does not depend on the machine: `~` and empty paths, the attention, the dataset class. In place."""
    for key in PATHS:
        value = OmegaConf.select(config, key)
        if isinstance(value, str) and (value == "" or value.startswith("~")):
            OmegaConf.update(config, key, os.path.expanduser(value) or None)
    splits_blend = config.data.get("blend") is not None and splits_validation(config)
    if config.trainer.eval_only and not config.data.get("train_dir") and not splits_blend:
        if not config.data.val_dir:
            raise ValueError("data.val_dir is required with trainer.eval_only=true; got null")
        config.data.train_dir = config.data.val_dir  # nothing is trained on
        if config.data.get("blend") is not None:
            config.data.blend = None
    _resolve_rows(config)
    return resolve_attention(config) + resolve_dataset(config)


def _resolve_rows(config: DictConfig) -> None:
    """What data.rows=padded makes of packs: rows of data.max_length tokens, one document each; in place."""
    data = config.data
    if data.custom_cls.name == PRETRAIN and data.get("rows") == "padded":
        data.max_tokens, data.strategy, data.pad_mode = data.max_length, "none", "right"


def resolve_logging(config: DictConfig, world_size: int) -> list[str]:
    """Turns trainer.log_every_batches, in micro-batches of a rank, into trainer.log_freq in steps, in place."""
    batches, data = config.trainer.log_every_batches, config.data
    sizes = (
        batches,
        data.train_batch_size,
        data.micro_batch_size_per_gpu,
        config.engine.ulysses_sequence_parallel_size,
    )
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return []  # null, or told by the checks
    ranks = max(world_size // config.engine.ulysses_sequence_parallel_size, 1)
    accumulation = max(data.train_batch_size // (ranks * data.micro_batch_size_per_gpu), 1)
    config.trainer.log_freq = math.ceil(batches / accumulation)
    return [
        f"trainer.log_every_batches={batches} is read as trainer.log_freq={config.trainer.log_freq}: "
        f"a step is {accumulation} batches of a rank"
    ]


def resolve_attention(config: DictConfig) -> list[str]:
    """Routes model.override_config.attn_implementation to attention.backend, in place.

    Hugging Face's flash_attention_2 becomes backend flash_attn; raises ValueError for every other implementation:
    none keeps the documents of a pack apart.
    """
    if is_titans(config):
        _resolve_chunk_attention(config)
        return []
    key = "model.override_config.attn_implementation"
    asked = OmegaConf.select(config, key)
    if asked == PACKED_ATTENTION:
        return []
    backend = config.attention.backend
    if asked is not None and (asked != "flash_attention_2" or backend not in ("auto", "flash_attn")):
        also = f" and attention.backend={backend}" if asked == "flash_attention_2" else ""
        raise ValueError(
            f"{key} must be {PACKED_ATTENTION}, which keeps documents apart: choose its kernel by attention.backend="
            f"auto, flash_attn, varlen or sdpa; got {asked}{also}"
        )
    with open_dict(config):
        config.model.override_config.attn_implementation = PACKED_ATTENTION
    if asked is None:
        return []
    config.attention.backend = "flash_attn"
    return [f"{key}={asked} is read as attention.backend=flash_attn, which keeps the documents of a pack apart"]


def _resolve_chunk_attention(config: DictConfig) -> None:
    """Inside a chunk of a model with memory, one row is one document: transformers' own kernels serve, in place."""
    key, backend = "model.override_config.attn_implementation", config.attention.backend
    asked, chosen = OmegaConf.select(config, key), ATTENTION.get(backend, backend)  # an unknown one: told by the checks
    if asked in (None, chosen):
        with open_dict(config):
            config.model.override_config.attn_implementation = chosen
    elif backend != "auto" or asked not in ATTENTION.values():
        raise ValueError(
            f"{key} must be {' or '.join(dict.fromkeys(ATTENTION.values()))} with model=qwen_titans, as "
            f"attention.backend={backend} has it; got {asked}"
        )


def resolve_dataset(config: DictConfig) -> list[str]:
    """Lets verl_ext.data.SFTDataSet stand in for a custom_cls.path of that class that does not exist, in place."""
    custom = config.data.custom_cls
    path = custom.path
    if not path or custom.name != PACKS or path.startswith("pkg://") or os.path.exists(path):
        return []
    custom.path = custom.name = None
    return [f"data.custom_cls.path={path} does not exist: verl_ext.data.{PACKS} is used"]


def resolve_device(config: DictConfig, accelerator: str | None) -> list[str]:
    """Settles trainer.device, engine.mixed_precision where it is null, and model.use_liger, in place.

    accelerator is what is visible: "cuda", "npu" (refused by check_run) or None. auto becomes it, or cpu without one.
    fp32 throughout on CPU; bf16 parameters with fp32 reductions on accelerators.
    """
    notices: list[str] = []
    if problem := choice_problem("trainer.device", config.trainer.device, ("auto", "cpu", "cuda")):
        raise ValueError(problem)
    if config.trainer.device == "auto":
        config.trainer.device = accelerator or "cpu"
    on_cpu = config.trainer.device == "cpu"
    given = OmegaConf.select(config, "engine.mixed_precision") or {}
    with open_dict(config):  # what is not given must not become verl's bf16
        config.engine.mixed_precision = {**(FP32 if on_cpu else BF16), **given}
    if on_cpu and config.model.use_liger is True:
        config.model.use_liger = False
        notices.append("model.use_liger=true is off here: liger's kernels need a GPU, and trainer.device is cpu")
    return notices
