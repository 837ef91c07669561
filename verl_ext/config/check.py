"""Checks of a whole run's config, before a model is loaded: all mistakes at once, a line each.

ranks = data-parallel size × sequence-parallel size
packs of a step = data-parallel size × micro-batch size × accumulation
"""

import importlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.nn import Parameter
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config.optimizer import build_optimizer

from verl_ext.attention import AttentionOptions, ParallelOptions
from verl_ext.config.model import model_kind, override
from verl_ext.config.run import AFTER_EACH_EPOCH, TrainerOptions, dataset_class, sequence_parallel_size
from verl_ext.config.schema import MIXED_PRECISION, foreign_option_problems
from verl_ext.config.support import CP, SP
from verl_ext.config.weights import held_back, weight_problems
from verl_ext.data.dataset import DataOptions
from verl_ext.engines.router import asks_for_router_loss
from verl_ext.losses import LossOptions
from verl_ext.values import Options, choice_problem, first_line, plain, refuse, show, type_problems

CONTENTS = ("model", "optimizer", "extra", "hf_model")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PACKS_SET_IT = "data.max_tokens and data.micro_batch_size_per_gpu decide what a forward holds"
# key: (the one value it may have, why)
REFUSED: dict[str, tuple[Any, str]] = {
    "model.use_remove_padding": (True, "packs have no padding to keep"),
    "model.use_fused_kernels": (False, "verl 0.9.1's fused head fails under FSDP2"),
    "model.model_type": ("language_model", "packs train language models"),
    "model.mtp.enable": (False, "packs train the next token alone"),
    "model.tiled_mlp.enabled": (False, "verl's SFT engine does not apply it; model.tile_tokens is what works here"),
    "model.enable_activation_offload": (
        False,
        "verl's computes the head and its logits twice; model.activation_offload=true is what works here",
    ),
    "model.lora.rank": (0, "it is Megatron's; model.lora_rank is the one that works here"),
    "engine.forward_only": (False, "it would not train"),
    "engine.qat.enable": (False, "it was never run with packs"),
    "engine.use_dynamic_bsz": (True, _PACKS_SET_IT),
    "engine.micro_batch_size_per_gpu": (None, _PACKS_SET_IT),
    "engine.max_token_len_per_gpu": (None, _PACKS_SET_IT),
    "engine.infer_micro_batch_size_per_gpu": (None, _PACKS_SET_IT),
    "engine.infer_max_token_len_per_gpu": (None, _PACKS_SET_IT),
}


def refused_problems(config: DictConfig) -> Iterator[str]:
    """One line for each option of :data:`REFUSED` that has another value than the one it may have."""
    for key, (allowed, why) in REFUSED.items():
        value = OmegaConf.select(config, key, default=allowed)
        if value != allowed:
            yield f"{key} must be {show(allowed)}: {why}; got {show(value)}"


def check_run(
    config: DictConfig,
    world_size: int,
    accelerator: str | None = None,
    hf_config: Any = None,
    capability: tuple[int, int] | None = None,
) -> Any:
    """Checks a composed config against the run that it is for, and returns the Hugging Face config that it runs with.

    world_size: ranks; accelerator: the one that is visible, "cuda", "npu" or None, and the compute capability of a GPU;
    hf_config: the model's when it is loaded already (else read from model.path: json alone, no weights). Raises one
    ValueError with a line a mistake.
    """
    kind = model_kind(config)
    problems: list[str | None] = []
    for cls in (LossOptions, AttentionOptions, ParallelOptions, TrainerOptions, DataOptions):
        problems += _option_problems(cls, config[cls.prefix])
    problems += data_problems(config)
    problems += upstream_type_problems(config)
    problems += batch_problems(config, world_size)
    problems += path_problems(config)
    problems += device_problems(config, accelerator)
    problems += adapter_problems(config, accelerator)
    problems += training_problems(config)
    problems += refused_problems(config)
    problems += kind.config_problems(config)
    if hf_config is None:
        hf_config, unreadable = _read_hf_config(config)
        problems += unreadable
        folder = os.path.expanduser(str(config.model.path or ""))
        if not unreadable and os.path.isdir(folder) and plain(config.plan)["gpu_memory"] is None:
            problems += weight_problems(folder)  # memory is predicted from the config alone
    if hf_config is not None:
        problems += router_problems(config, hf_config)
        hf_config, unfit = kind.adapted(config, hf_config)
        problems += unfit
    device = "cpu" if accelerator is None or config.trainer.device == "cpu" else accelerator
    problems += kind.attention_problems(config, hf_config, device, capability)
    refuse(problems)
    return hf_config


def data_problems(config: DictConfig) -> list[str | None]:
    """What the dataset family refuses: its options, those of other families, paths that do not exist."""
    data, problems = plain(config.data), list[str | None]()
    try:
        problems += foreign_option_problems(config)
        family = dataset_class(config).Options.read(data)
    except ValueError as error:
        return [*problems, *str(error).splitlines()]
    train_dir, val_dir = data.get("train_dir"), data.get("val_dir")
    if family.needs_train_dir and train_dir in (None, "", [], "???"):
        problems.append(f"data.train_dir is required: {family.reads}; got {show(train_dir)}")
    # What is only measured stands in for data.train_dir as well: reported once.
    if not (config.trainer.eval_only is True and train_dir == val_dir):
        problems += family.path_problems("data.train_dir", train_dir)
    problems += family.path_problems("data.val_dir", val_dir)
    test_freq = config.trainer.test_freq
    validates = test_freq == AFTER_EACH_EPOCH or (isinstance(test_freq, int) and test_freq > 0)
    if (validates or config.trainer.eval_only is True) and not val_dir and not family.splits_validation:
        asks = f"trainer.test_freq={test_freq}" if validates else "trainer.eval_only=true"
        problems.append(f"data.val_dir is required with {asks}; got null")
    return problems


def router_problems(config: DictConfig, hf_config: Any) -> Iterator[str]:
    """A coefficient of a router loss that nothing computes."""
    coefficient = config.model.override_config.get("router_aux_loss_coef")
    if coefficient and not asks_for_router_loss(hf_config):
        yield (
            "model.override_config.router_aux_loss_coef needs model.override_config.output_router_logits=true; "
            f"got {coefficient} without it"
        )


def batch_problems(config: DictConfig, world_size: int) -> list[str]:
    """Whether the ranks divide into sequence-parallel groups, and the step into micro-batches over what is left."""
    ulysses, groups = config.engine.ulysses_sequence_parallel_size, config.parallel.context_parallel_size
    if not isinstance(ulysses, int) or ulysses < 1:
        return [f"{SP} must be at least 1; got {ulysses}"]
    if not isinstance(groups, int) or groups < 1:
        return []  # reported with the parallel node
    sp = sequence_parallel_size(config)
    keys, sizes = (SP, f"{ulysses}") if groups == 1 else (f"{SP} × {CP}", f"{ulysses} × {groups}")
    if world_size % sp:
        return [f"{keys} must divide the number of ranks; got {sizes} with {world_size} rank{'s' * (world_size > 1)}"]
    batch, micro = config.data.train_batch_size, config.data.micro_batch_size_per_gpu
    if not all(isinstance(size, int) and size > 0 for size in (batch, micro)):
        return []  # reported with the data node
    shard = config.engine.fsdp_size
    if isinstance(shard, int) and shard > 0 and world_size % shard:
        return [f"engine.fsdp_size must divide the number of ranks or be -1; got {shard} with {world_size}"]
    dp = world_size // sp
    if batch % (dp * micro) == 0:
        return []
    return [
        "data.train_batch_size must be a multiple of the data-parallel size × data.micro_batch_size_per_gpu = "
        f"{dp} × {micro} = {dp * micro} (ranks {world_size}, {keys} {sizes}); got {batch}"
    ]


def check_categories(loss: Any, names: Sequence[str], key: str = "loss.category_weights") -> None:
    """Raises ValueError for weights of categories that the data lacks, or that leave the data no weight at all.

    loss: the LossConfig; names: the categories that the training data has.
    """
    weights = loss.category_weights or {}
    refuse(choice_problem(f"a name in {key}", name, names) for name in weights)
    if names and all(weights.get(name, 1.0) == 0 for name in names):
        raise ValueError(f"{key} must leave a category a weight above 0; got 0 for all of {', '.join(names)}")


def upstream_type_problems(config: DictConfig) -> list[str]:
    """Numbers and flags of verl's nodes that are of another type: verl builds its dataclasses without looking."""
    problems = []
    for name in ("model", "engine", "optim", "checkpoint"):
        node = config[name]
        cls = get_class(node["_target_"])
        if is_dataclass(cls):
            values = {key: node[key] for key in node if not OmegaConf.is_missing(node, key)}
            problems += type_problems(cls, values, name)
    return problems


def path_problems(config: DictConfig) -> list[str]:
    """Paths of the model and of a resume that do not exist; a hub name and a remote path are left to their loaders."""
    problems = []
    if not config.model.path:
        problems.append(f"model.path is required: a folder or hub name of a model; got {show(config.model.path)}")
    for key in ("model.path", "model.hf_config_path", "model.tokenizer_path", "model.lora_adapter_path"):
        value = OmegaConf.select(config, key)
        if value and _is_local(str(value)) and not os.path.isdir(os.path.expanduser(str(value))):
            problems.append(f"{key} must be an existing folder or a hub name; got {value}")
    resume = config.trainer.resume_from_path
    if resume and config.trainer.resume_mode != "disable" and not os.path.isdir(os.path.expanduser(str(resume))):
        problems.append(f"trainer.resume_from_path must be an existing global_step_N folder; got {resume}")
    return problems


def device_problems(config: DictConfig, accelerator: str | None) -> list[str]:
    """Whether the device asked for is there, and the engine's strategy runs on it."""
    device, strategy = config.trainer.device, config.engine.strategy
    problems = []
    if accelerator == "npu":
        problems.append("trainer.device must be cuda or cpu, where packs have an engine; an NPU is visible")
    elif device == "cuda" and accelerator is None:
        problems.append(f"parallel=fsdp2 (trainer.device={device}) needs a GPU; none is visible; use parallel=cpu")
    elif device == "cpu" and accelerator is not None:
        problems.append(
            f"parallel=cpu (trainer.device=cpu) needs a process that sees no accelerator, since verl chooses its "
            f"platform once; got a visible {accelerator}: start it with CUDA_VISIBLE_DEVICES="
        )
    if config.engine.offload_policy and (device == "cpu" or accelerator is None):
        problems.append("engine.offload_policy must be false on CPU, where host memory holds everything; got true")
    elif config.engine.offload_policy and strategy == "fsdp":
        problems.append("engine.offload_policy=true needs engine.strategy=fsdp2: verl's FSDP1 ignores it; got fsdp")
    if problem := choice_problem("engine.strategy", strategy, ("fsdp", "fsdp2")):
        problems.append(problem)
    elif strategy == "fsdp" and (device == "cpu" or accelerator is None):
        problems.append("engine.strategy must be fsdp2 on CPU, where FSDP1 does not run; got fsdp")
    return problems


def adapter_problems(config: DictConfig, accelerator: str | None) -> list[str]:
    """Model options that packs or this machine cannot have."""
    model = config.model
    problems = []
    if model.use_liger is True and accelerator and importlib.util.find_spec("liger_kernel") is None:
        problems.append(
            "model.use_liger=true needs the package liger-kernel, which is not installed: pip install 'verl-ext[gpu]'"
        )
    if isinstance(model.lora_rank, int) and model.lora_rank < 0:
        problems.append(f"model.lora_rank must be at least 0; got {model.lora_rank}")
    adapter = model.lora_adapter_path
    if adapter and not model.lora_rank:
        problems.append(f"model.lora_rank must be at least 1 with model.lora_adapter_path={adapter}; got 0")
    if adapter and os.path.isdir(adapter) and not os.path.isfile(os.path.join(adapter, "adapter_config.json")):
        problems.append(f"model.lora_adapter_path must hold an adapter_config.json; got {adapter}")
    return problems


def training_problems(config: DictConfig) -> list[str]:
    problems: list[str | None] = []
    lr = config.optim.lr
    if isinstance(lr, int | float) and not 0 < lr < float("inf"):
        problems.append(f"optim.lr must be above 0 and finite; got {lr}")
    clip = config.optim.clip_grad
    if not isinstance(clip, int | float) or clip <= 0:
        problems.append(f"optim.clip_grad must be above 0; got {show(clip)}")
    for name in ("lr_warmup_steps_ratio", "min_lr_ratio"):
        if not isinstance(config.optim[name], int | float | None) or not 0 <= (config.optim[name] or 0) <= 1:
            problems.append(f"optim.{name} must be from 0 to 1; got {config.optim[name]}")
    betas = config.optim.betas
    in_range = isinstance(betas, ListConfig) and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas)
    if not in_range or len(betas) != 2:
        problems.append(f"optim.betas must be two numbers from 0 to below 1; got {betas}")
    for name in MIXED_PRECISION:
        if dtype := OmegaConf.select(config, name):
            problems.append(choice_problem(name, dtype, ("fp32", "bf16", "fp16")))
    problems.append(choice_problem("optim.lr_scheduler_type", config.optim.lr_scheduler_type, ("constant", "cosine")))
    if not any(problems):
        problems.append(optimizer_problem(config))
    if config.trainer.eval_only is True and config.trainer.overwrite is True:
        problems.append("trainer.overwrite must be false with trainer.eval_only=true, which replaces no run; got true")
    for key in ("checkpoint.save_contents", "checkpoint.load_contents"):
        contents = OmegaConf.select(config, key)
        if key.endswith("load_contents") and contents == config.checkpoint.save_contents:
            continue  # its default, reported already
        if isinstance(contents, str) or contents is None:
            problems.append(f"{key} must be a list of {', '.join(CONTENTS)}; got {show(contents)}")
        else:
            problems += [choice_problem(key, name, CONTENTS) for name in contents]
    return [problem for problem in problems if problem]


def optimizer_problem(config: DictConfig) -> str | None:
    """One line where the optimizer does not exist or refuses its options; it is built once, of two small tensors."""
    optim, key = config.optim, "optim.optimizer_impl"
    try:
        names = vars(importlib.import_module(optim.optimizer_impl))
    except ImportError as error:
        return f"{key} must be a module that is installed; got {optim.optimizer_impl} ({first_line(error)})"
    kinds = [name for name, kind in names.items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)]
    if optim.optimizer not in names:
        return choice_problem("optim.optimizer", optim.optimizer, sorted(set(kinds) - {"Optimizer"}))
    try:
        build_optimizer([Parameter(torch.zeros(2, 2)), Parameter(torch.zeros(2))], omega_conf_to_dataclass(optim))
    except (TypeError, ValueError) as error:
        given = show(plain(optim.override_optimizer_config) or {})
        return (
            f"optim.override_optimizer_config must be options of {optim.optimizer}; got {given} ({first_line(error)})"
        )
    return None


def _option_problems(cls: type[Options], node: DictConfig) -> list[str]:
    try:
        cls.read(node)
    except ValueError as error:
        return str(error).splitlines()
    return []


def _is_local(path: str) -> bool:
    """Whether a model path can only be a folder: it is no remote address and does not read as a hub name."""
    return "://" not in path and (path.startswith((".", "/", "~")) or _HUB_NAME.fullmatch(path) is None)


def _read_hf_config(config: DictConfig) -> tuple[Any, list[str]]:
    path = str(config.model.hf_config_path or config.model.path or "")
    folder = os.path.expanduser(path)
    if not path or "://" in path or (_is_local(path) and not os.path.isdir(folder)):
        return None, []  # required or missing: path_problems reports it; remote: read by verl
    try:
        hf_config = read_hf_config(folder, bool(config.model.trust_remote_code))
        override(hf_config, config.model.override_config)
    except ValueError as error:
        return None, [str(error)]
    return hf_config, []


def read_hf_config(path: str, trusted: bool = False) -> Any:
    """The Hugging Face config of a folder or Hub name; trusted: its own code may run. ValueError where it has none."""
    from transformers import AutoConfig

    try:
        with held_back("configuration_utils"):  # which shows the whole config before it raises
            return AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    except Exception as error:  # a config's class raises whatever the values lead it to
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]
        raise ValueError(f"model.path must hold a model's config.json; got {path} ({reason})") from error
