"""The resolution of open values: attention, dataset class, paths, device, precision, kernels; and verl's worker.

Each function returns notices of its changes to the user's values, and raises ValueError for unsupported values.
"""

import glob
import math
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_ext.config.keys import DEPRECATED, RATE, paths
from verl_ext.config.model import model_kind
from verl_ext.config.newer import untried
from verl_ext.config.run import Machine, RunConfig, dataset_class, node_of_verl
from verl_ext.custom import names_own_class
from verl_ext.data import SFTDataSet
from verl_ext.engines.lora import given_settings
from verl_ext.engines.schedule import StepOptimizerConfig
from verl_ext.environment import versions
from verl_ext.launch.protocol import Launcher
from verl_ext.options import default_values, first_line, leaves, must, options_of, plain, spell
from verl_ext.overrides import restored
from verl_ext.text.tokens.tokenizer import read_template

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def resolve_run(composed: DictConfig, machine: Machine) -> RunConfig:
    """Type a completed configuration, and decide what the machine decides of it.

    Raises ValueError with a line for each value that is not allowed.
    """
    config = replace(RunConfig.from_composed(composed, machine), notices=tuple(filter(None, [untried(versions())])))
    for decide in (with_device, with_forwards, with_log_freq):
        config = decide(config)
    return replace(config, notices=(*config.notices, *_without_effect(config)))


def with_log_freq(config: RunConfig) -> RunConfig:
    """Return the config with `trainer.log_every_batches` as steps."""
    if (batches := config.trainer.log_every_batches) is None:
        return config
    packs = max(config.data_parallel_size, 1) * config.data.micro_batch_size_per_gpu
    accumulation = max(config.data.train_batch_size // packs, 1)
    log_freq = math.ceil(batches / accumulation)
    read = f"trainer.log_every_batches={batches} is read as trainer.log_freq={log_freq}"
    return config.decided(f"{read}: a step is {accumulation} batches of a rank", trainer={"log_freq": log_freq})


def _without_effect(config: RunConfig) -> Iterator[str]:
    """Yield a line for options of Ray under torchrun, and of adapters without a rank."""
    unread = [f"ray.{name}" for name in config.ray.changed()]
    if unread and "TORCHELASTIC_RUN_ID" in os.environ and Launcher.from_environment().ray_nodes is None:
        yield f"{', '.join(unread)}: without effect here: torchrun has MAX_RESTARTS of its own"
    defaults = {entry.name: entry.default for entry in fields(model_kind(config.values))}
    lora = ("lora_alpha", "target_modules", "target_parameters", "exclude_modules")
    changed = [name for name in lora if getattr(config.model_options, name, defaults[name]) != defaults[name]]
    unused = [f"model.{name}" for name in (*changed, *given_settings(config.model_options))]
    if unused and not config.model_options.lora_rank:
        yield f"model.lora_rank=0 trains all parameters: no effect of {', '.join(unused)}"


def resolve_config(config: DictConfig) -> list[str]:
    """Resolve what no machine decides, in place.

    This is `~`, empty paths, the attention and the dataset class. It also restores characters of names that Hydra's
    grammar lacks.
    """
    composed: Any = OmegaConf.to_container(config, resolve=False)
    for name, node in composed.items():
        if restored(node) != node:
            config[name] = restored(node)
    if not OmegaConf.is_dict(given := config.model.override_config):
        raise ValueError(must("model.override_config", "map keys of the model's config to values", given))
    for key in paths("data", "run", "model"):
        value = OmegaConf.select(config, key)
        if isinstance(value, int | float):
            OmegaConf.update(config, key, spell(value))  # the name of the folder is a number
        elif isinstance(value, str) and (value == "" or value.startswith("~")):
            OmegaConf.update(config, key, os.path.expanduser(value) or None)
    # The functions below read the classes of the nodes, so that a wrong name is refused before them.
    check_classes(config)
    template = OmegaConf.select(config, "model.custom_chat_template")
    if isinstance(template, str) and os.path.isfile(template):  # verl takes the text alone
        OmegaConf.update(config, "model.custom_chat_template", read_template(template, "model.custom_chat_template"))
    notices = [*resolve_names(config), *model_kind(config).resolve_attention(config)]
    custom = config.data.custom_cls
    # verl's scripts name a class as ours is named, in a file of their own.
    if custom.path and custom.name == SFTDataSet.__name__ and not custom.path.startswith("pkg://"):
        if names_own_class(custom.path, custom.name):
            notices.append(
                f"data.custom_cls.*: the default, verl_ext.data.{custom.name}, packs tokenized documents by "
                f"data.max_tokens too: leave both out if {custom.path} does no more"
            )
        else:
            notices.append(f"data.custom_cls.path={custom.path} does not exist: verl_ext.data.{custom.name} is used")
            custom.path = custom.name = None
    try:
        family = dataset_class(config).Options
    except ValueError:
        return notices  # the checks report it
    # The group `data` has defaults for options that a class of the user's does not have.
    others = default_values(SFTDataSet.Options) if names_own_class(custom.path, custom.name) else {}
    with open_dict(config):
        for name in others.keys() - options_of(family).keys():
            if config.data.get(name) == others[name]:
                config.data.pop(name, None)
    # A dataset family may derive values; the checks then see what is in use.
    data = plain(config.data)
    if config.trainer.eval_only and not data.get("train_dir"):  # the run does not train
        config.data.update(family.for_evaluation(data))
    config.data.update(family.implied(data))
    return notices


def check_classes(config: DictConfig) -> None:
    """Raise ValueError if a `_target_` of verl's nodes is not a class."""
    for node in ("model", "engine", "optim", "checkpoint", "profiler"):
        values: Any = OmegaConf.to_container(config[node], resolve=False)
        for key, name in leaves(values, f"{node}."):
            if "_target_" not in key.split("."):
                continue
            try:
                get_class(name)
            except Exception:  # any value may be given, and any module may be imported
                raise ValueError(must(key, "be a class by its dotted name", name)) from None


def resolve_names(config: DictConfig) -> list[str]:
    """Move values from verl's deprecated names to today's, in place.

    Null is read as verl reads it where its engine would fail. Raises ValueError for a key that a command line alone
    translates (a user's file has it), and for two values.
    """
    notices, defaults = [], {entry.name: entry.default for entry in fields(StepOptimizerConfig)}
    for old, new in DEPRECATED.items():
        (node, name), today = old.split("."), new.split(".")[1]
        if (value := config[node].get(name)) is None:
            continue
        if config[node][today] not in (defaults[today], value):
            both = f"{spell(plain(config[node][today]))} and {old}={spell(plain(value))}"
            raise ValueError(must(new, "be given once", both))
        config[node][today], config[node][name] = value, None
        notices.append(f"{old} (deprecated in verl) is read as {new}")
    for key, value in (("optim.lr_warmup_steps", -1), ("optim.min_lr_ratio", 0.0)):
        if OmegaConf.select(config, key, default="") is None:
            OmegaConf.update(config, key, value)
    if config.optim.lr is None and config.trainer.eval_only:  # the engine builds its optimizer nonetheless
        config.optim.lr = float(RATE)
    if config.model.use_remove_padding is False:
        config.model.use_remove_padding = True
        notices.append("model.use_remove_padding=false is without effect: packs have no padding to remove or keep")
    return notices


def with_forwards(config: RunConfig) -> RunConfig:
    """Return the config with as many packs a forward as `data.max_token_len_per_gpu` holds."""
    tokens, max_tokens, split = config.data.max_token_len_per_gpu, config.max_tokens, config.sequence_parallel_size
    if tokens is None or not all(isinstance(value, int) and value > 0 for value in (max_tokens, split)):
        return config  # not given, or the checks report it
    of_rank = max(config.data.train_batch_size // max(config.machine.world_size // split, 1), 1)
    most = min(max(tokens * split // max_tokens, 1), of_rank)
    micro = max(size for size in range(1, most + 1) if of_rank % size == 0)
    read = f"data.max_token_len_per_gpu={tokens} is read as data.micro_batch_size_per_gpu={micro}"
    return config.decided(read, data={"micro_batch_size_per_gpu": micro})


def with_device(config: RunConfig) -> RunConfig:
    """Return the config with the values that the device decides.

    trainer.device=auto becomes the visible accelerator ("npu" is refused) or cpu. engine.mixed_precision is fp32 on
    CPU, and bf16 parameters with fp32 reductions on accelerators. A null head block and model.use_liger follow from it.
    """
    accelerator, device = config.machine.accelerator, config.trainer.device
    if device == "auto":
        # A GPU that torch cannot use must not become a slow run on the CPU in silence.
        if accelerator is None and (why := idle_gpu()):
            got = f"'{why}' from torch {torch.__version__}; trainer.device=cpu (parallel=cpu) trains on the CPU"
            raise ValueError(must("trainer.device=auto", "find the GPU that this machine shows", got))
        if accelerator == "npu":
            needed = "be cuda or cpu, on a machine that shows no NPU"
            raise ValueError(must("trainer.device", needed, "auto and a visible NPU"))
        device = accelerator or "cpu"
    on_cpu = device == "cpu"
    if not isinstance(given := config.engine.mixed_precision or {}, Mapping):
        raise ValueError(must("engine.mixed_precision", f"map {', '.join(FP32)} to dtypes", given))
    # Null or missing values must not become verl's bf16.
    precision = (FP32 if on_cpu else BF16) | {name: dtype for name, dtype in given.items() if dtype is not None}
    config = config.decided(trainer={"device": device}, engine={"mixed_precision": precision})
    if config.loss.head_block_mib is None:  # on a GPU, each block reads and writes the weight's fp32 gradient
        config = config.decided(loss={"head_block_mib": 256 if on_cpu else 1024})
    if on_cpu and config.model_options.use_liger is True:
        off = "model.use_liger=true is off here: liger's kernels need a GPU, and trainer.device is cpu"
        config = config.decided(off, model_options={"use_liger": False})
    return config


def idle_gpu() -> str | None:
    """Return why torch cannot use an NVIDIA GPU here, or None."""
    smi, shown = shutil.which("nvidia-smi"), bool(glob.glob("/dev/nvidia[0-9]*"))
    if not shown and smi:
        with suppress(OSError, subprocess.SubprocessError):
            shown = b"GPU " in subprocess.run([smi, "-L"], capture_output=True, timeout=30).stdout
    if not shown:
        return None
    if torch.version.cuda is None:
        return "a build without CUDA"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return first_line(error) + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})")
    return None


def worker_config(values: Mapping[str, Any], total_steps: int) -> Any:
    """Return verl's TrainingWorkerConfig; `total_steps` is the schedule's length."""
    from verl.workers.engine_workers import TrainingWorkerConfig  # here, because its import chooses the device

    groups = values["parallel"]["context_parallel_size"]
    # By name, because verl's engines choose the device when they are imported.
    engine = {
        "_target_": "verl_ext.engines.step.StepEngineConfig",
        "ulysses_sequence_parallel_size": values["engine"]["ulysses_sequence_parallel_size"] * groups,
        "context_parallel_size": groups,
        "expert_parallel": values["parallel"]["expert_parallel"],
    }
    parts = {name: node_of_verl(name, values) for name in ("model", "optim", "checkpoint", "profiler")}
    parts["optim"].total_training_steps = total_steps
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=parts["model"],
        engine_config=node_of_verl("engine", values, **engine),
        optimizer_config=parts["optim"],
        checkpoint_config=parts["checkpoint"],
        profiler_config=parts["profiler"],
    )
