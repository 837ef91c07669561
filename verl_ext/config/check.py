"""Options of verl's that a packed run cannot have, or that would do nothing here: refused, not left without effect.

Ranks, sequence-parallel groups, batches, heads and positions: whether the numbers of a run divide.

ranks = data-parallel size × sequence-parallel size
packs of a step = data-parallel size × micro-batch size × accumulation

Whether a local model folder has weights that can be opened: headers alone, no tensor is read.

Cross-field checks of a run's config, before a model is loaded: all mistakes told together, a line each.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from glob import glob
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_ext.config import schema as nodes
from verl_ext.config.attention import attention_problems
from verl_ext.config.model import check_titans_model, is_titans, model_support_problems, override, titans_problems
from verl_ext.config.own_data import BABILONG, MULTIDOC, PRETRAIN, own_option_problems, splits_validation
from verl_ext.config.schema import MIXED_PRECISION
from verl_ext.engines.router import asks_for_router_loss
from verl_ext.values import choice_problem, nearest_name, show, type_problems

_PACKS_SET_IT = "data.max_tokens and data.micro_batch_size_per_gpu decide what a forward holds"
# key: (the one value it may have, why)
REFUSED: dict[str, tuple[Any, str]] = {
    "model.use_remove_padding": (True, "packs have no padding to keep"),
    "model.use_fused_kernels": (False, "verl 0.9.1's fused head fails under FSDP2"),
    "model.model_type": ("language_model", "packs train language models"),
    "model.mtp.enable": (False, "packs train the next token alone"),
    "model.tiled_mlp.enabled": (False, "verl's SFT engine does not apply it"),
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


_SP = "engine.ulysses_sequence_parallel_size"


def batch_problems(config: DictConfig, world_size: int) -> list[str]:
    """Whether the ranks divide into sequence-parallel groups, and the step into micro-batches over what is left."""
    sp = config.engine.ulysses_sequence_parallel_size
    if not isinstance(sp, int) or sp < 1:
        return [f"{_SP} must be at least 1; got {sp}"]
    if world_size % sp:
        return [f"{_SP} must divide the number of ranks; got {sp} with {world_size} rank{'s' * (world_size > 1)}"]
    batch, micro = config.data.train_batch_size, config.data.micro_batch_size_per_gpu
    if not all(isinstance(size, int) and size > 0 for size in (batch, micro)):
        return []  # told by the data node
    shard = config.engine.fsdp_size
    if isinstance(shard, int) and shard > 0 and world_size % shard:
        return [f"engine.fsdp_size must divide the number of ranks or be -1; got {shard} with {world_size}"]
    dp = world_size // sp
    if batch % (dp * micro) == 0:
        return []
    return [
        "data.train_batch_size must be a multiple of the data-parallel size × data.micro_batch_size_per_gpu = "
        f"{dp} × {micro} = {dp * micro} (ranks {world_size}, {_SP} {sp}); got {batch}"
    ]


def head_problems(config: DictConfig, hf_config: Any) -> list[str]:
    """Whether Ulysses can split the model's heads: query heads divide, key/value heads divide or repeat."""
    sp = config.engine.ulysses_sequence_parallel_size
    text = hf_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(sp, int) or sp <= 1 or not heads:
        return []
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % sp:
        return [f"{_SP} must divide the model's {heads} attention heads; got {sp}"]
    if kv_heads % sp and sp % kv_heads:
        return [f"{_SP} must divide the model's {kv_heads} key/value heads or be a multiple of them; got {sp}"]
    return []


def model_positions(hf_config: Any) -> int | None:
    """The positions that a model was made for, its RoPE scaling included; None when its config names none.

    Some configs (Llama 3) give max_position_embeddings with the scaling included, others (YaRN for Qwen) without: the
    larger reading is taken.
    """
    text = hf_config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not positions:
        return None
    ropes = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    ropes += [inner for rope in ropes if isinstance(rope, dict) for inner in rope.values()]  # one for each layer type
    for rope in ropes:
        if isinstance(rope, dict) and rope.get("factor"):
            base = rope.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", positions)
            positions = max(positions, int(rope["factor"] * base))
    return int(positions)


def check_positions(longest_document: int, max_tokens: int, hf_config: Any) -> None:
    """Raises ValueError when a document reaches positions that the model does not have.

    Positions restart with every document, so a pack may be longer than the model's positions; a document, of at most
    min(longest_document, max_tokens) tokens, may not.
    """
    positions = model_positions(hf_config)
    longest = min(longest_document, max_tokens)
    if positions is not None and longest > positions:
        raise ValueError(
            f"data.max_tokens must be at most the model's {positions} positions while a document is longer than those; "
            f"got {max_tokens} and a longest document of {longest} tokens: lower it with data.over_length=drop, "
            "truncate or split, or extend the model by model.override_config"
        )


_PICKLED = ("pytorch_model*.bin", "model*.bin")


def weight_problems(folder: str) -> list[str]:
    """One line when ``folder`` (model.path) holds no weights, or a safetensors file that was cut short."""
    from safetensors import SafetensorError, safe_open

    files = sorted(glob(os.path.join(folder, "*.safetensors")))
    if not files and not any(glob(os.path.join(folder, pattern)) for pattern in _PICKLED):
        return [f"model.path must hold weights (*.safetensors or pytorch_model*.bin); got {folder}"]
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return [f"model.path must hold weights that can be read; got {file}: {error}"]
    return []


CONTENTS = ("model", "optimizer", "extra", "hf_model")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_run(
    config: DictConfig,
    world_size: int,
    accelerator: str | None = None,
    hf_config: Any = None,
    capability: tuple[int, int] | None = None,
) -> Any:
    """Checks a composed config against the run that it is for, and returns the model's Hugging Face config.

    world_size: ranks; accelerator: the one that is visible, "cuda", "npu" or None, and the compute capability of a GPU;
    hf_config: the model's when it is loaded already (else read from model.path: json alone, no weights). Raises one
    ValueError with a line a mistake.
    """
    problems: list[str] = []
    for build in (nodes.data_config, nodes.loss_config, nodes.attention_config, nodes.trainer_config):
        problems += _lines_of(build, config)
    problems += upstream_type_problems(config)
    problems += batch_problems(config, world_size)
    problems += path_problems(config)
    problems += device_problems(config, accelerator)
    problems += model_problems(config, accelerator)
    problems += training_problems(config)
    problems += refused_problems(config)
    problems += titans_problems(config)
    problems += own_option_problems(config)
    if hf_config is None:
        hf_config, unreadable = _read_hf_config(config)
        problems += unreadable
        folder = os.path.expanduser(str(config.model.path or ""))
        if not unreadable and os.path.isdir(folder):
            problems += weight_problems(folder)
    if hf_config is not None and is_titans(config):
        hf_config, unfit = _titans_config(config, hf_config)
        problems += unfit
    elif hf_config is not None:
        unsupported = model_support_problems(hf_config)
        problems += head_problems(config, hf_config) + unsupported + lora_problems(config, hf_config)
        coefficient = config.model.override_config.get("router_aux_loss_coef")
        if coefficient and not asks_for_router_loss(hf_config):
            problems.append(
                "model.override_config.router_aux_loss_coef needs model.override_config.output_router_logits=true; "
                f"got {coefficient} without it"
            )
        hf_config = None if unsupported else hf_config
    problems += attention_problems(config, hf_config, accelerator, capability)
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))
    return hf_config


def check_categories(loss: Any, names: Sequence[str], key: str = "loss.category_weights") -> None:
    """Raises ValueError for weights of categories that the data lacks, or that leave the data no weight at all.

    loss: the LossConfig; names: the categories that the training data has.
    """
    weights = loss.category_weights or {}
    problems = []
    for name in weights:
        if name not in names:
            close = nearest_name(name, names)
            hint = f" (nearest: {close})" if close else ""
            problems.append(f"{key} must name categories of the data, {', '.join(names)}; got {name}{hint}")
    if not problems and names and all(weights.get(name, 1.0) == 0 for name in names):
        problems.append(f"{key} must leave a category a weight above 0; got 0 for all of {', '.join(names)}")
    if problems:
        raise ValueError("\n".join(problems))


def upstream_type_problems(config: DictConfig) -> list[str]:
    """Numbers and flags of verl's nodes that are of another type: verl builds its dataclasses without looking."""
    from hydra.utils import get_class

    problems = []
    for name in ("model", "engine", "optim", "checkpoint"):
        node = config[name]
        cls = get_class(node["_target_"])
        if is_dataclass(cls):
            values = {key: node[key] for key in node if not OmegaConf.is_missing(node, key)}
            problems += type_problems(cls, values, name)
    return problems


def path_problems(config: DictConfig) -> list[str]:
    """Paths that the run reads and that do not exist; a hub name and a remote path are left to their loaders."""
    problems = []
    cls = OmegaConf.select(config, "data.custom_cls.name")
    exists, kind = (os.path.exists, "file or folder") if cls == BABILONG else (os.path.isdir, "folder")
    # What is only measured stands in for data.train_dir as well: told once.
    copied = config.trainer.eval_only is True and config.data.get("train_dir") == config.data.val_dir
    folders = ("data.val_dir",) if copied else ("data.train_dir", "data.val_dir")
    for key in () if cls in (PRETRAIN, MULTIDOC) else folders:  # globs and prefixes: the dataset tells
        value = OmegaConf.select(config, key)
        for path in value if isinstance(value, ListConfig) else [value]:
            if path and "://" not in str(path) and not exists(os.path.expanduser(str(path))):
                problems.append(f"{key} must be an existing {kind}; got {path}")
    if not config.model.path:
        problems.append(f"model.path is required: a folder or hub name of a model; got {show(config.model.path)}")
    for key in ("model.path", "model.hf_config_path", "model.tokenizer_path", "model.lora_adapter_path"):
        value = OmegaConf.select(config, key)
        if value and _is_local(str(value)) and not os.path.isdir(os.path.expanduser(str(value))):
            problems.append(f"{key} must be an existing folder or a hub name; got {value}")
    custom = config.data.custom_cls
    if custom.path and not str(custom.path).startswith("pkg://") and not os.path.isfile(custom.path):
        problems.append(f"data.custom_cls.path must be an existing file or pkg://module; got {custom.path}")
    if custom.path and not custom.name:
        problems.append("data.custom_cls.name is required with data.custom_cls.path; got null")
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
    if problem := choice_problem("engine.strategy", strategy, ("fsdp", "fsdp2")):
        problems.append(problem)
    elif strategy == "fsdp" and (device == "cpu" or accelerator is None):
        problems.append("engine.strategy must be fsdp2 on CPU, where FSDP1 does not run; got fsdp")
    return problems


def model_problems(config: DictConfig, accelerator: str | None) -> list[str]:
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


def lora_problems(config: DictConfig, hf_config: Any) -> list[str]:
    """Adapters on the input embeddings or the head, where they cannot be sharded or exported."""
    model, adapter = config.model, config.model.lora_adapter_path
    tied = hf_config.get_text_config().tie_word_embeddings
    if not model.lora_rank or not (tied or config.engine.strategy == "fsdp2"):
        return []
    from peft import LoraConfig  # here: takes seconds, and only such a run needs it
    from peft.tuners.tuners_utils import check_target_module_exists as targets_module

    if adapter and not os.path.isfile(os.path.join(adapter, "adapter_config.json")):
        return []  # told with the paths, or a hub name
    if adapter:
        key, lora = "model.lora_adapter_path: target_modules", LoraConfig.from_pretrained(adapter)
    else:
        plain: Any = OmegaConf.to_container(model, resolve=True)
        key = "model.target_modules"
        lora = LoraConfig(target_modules=plain["target_modules"], exclude_modules=plain["exclude_modules"])
    named = [name for name in ("lm_head", "model.embed_tokens") if lora.target_modules and targets_module(lora, name)]
    if not named:
        return []
    why = "tied weights are exported as one" if tied else "verl 0.9.1's FSDP2 cannot shard an adapter there"
    given = lora.target_modules if isinstance(lora.target_modules, str) else sorted(lora.target_modules or ())
    return [f"{key} must leave out {' and '.join(named)}: {why}; got {given}"]


def training_problems(config: DictConfig) -> list[str]:
    """Optimizer, validation and checkpoint contents."""
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
    if not (isinstance(betas, ListConfig) and len(betas) == 2 and all(_is_share(beta) for beta in betas)):
        problems.append(f"optim.betas must be two numbers from 0 to below 1; got {betas}")
    for name in MIXED_PRECISION:
        if dtype := OmegaConf.select(config, name):
            problems.append(choice_problem(name, dtype, ("fp32", "bf16", "fp16")))
    problems.append(choice_problem("optim.lr_scheduler_type", config.optim.lr_scheduler_type, ("constant", "cosine")))
    test_freq = config.trainer.test_freq
    validates = test_freq == nodes.AFTER_EACH_EPOCH or (isinstance(test_freq, int) and test_freq > 0)
    asks = f"trainer.test_freq={test_freq}" if validates else "trainer.eval_only=true"
    measures = validates or config.trainer.eval_only is True
    if measures and not OmegaConf.select(config, "data.val_dir") and not splits_validation(config):
        problems.append(f"data.val_dir is required with {asks}; got null")
    if config.trainer.eval_only is True and config.trainer.overwrite is True:
        problems.append("trainer.overwrite must be false with trainer.eval_only=true, which replaces no run; got true")
    for key in ("checkpoint.save_contents", "checkpoint.load_contents"):
        contents = OmegaConf.select(config, key)
        if key.endswith("load_contents") and contents == config.checkpoint.save_contents:
            continue  # its default, told already
        if isinstance(contents, str) or contents is None:
            problems.append(f"{key} must be a list of {', '.join(CONTENTS)}; got {show(contents)}")
        else:
            problems += [choice_problem(key, name, CONTENTS) for name in contents]
    return [problem for problem in problems if problem]


def _lines_of(build: Callable[[DictConfig], Any], config: DictConfig) -> list[str]:
    try:
        build(config)
    except ValueError as error:
        return str(error).splitlines()
    return []


def _titans_config(config: DictConfig, hf_config: Any) -> tuple[Any, list[str]]:
    try:
        return check_titans_model(config, hf_config), []
    except ValueError as error:
        return None, str(error).splitlines()


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1


def _is_local(path: str) -> bool:
    """Whether a model path can only be a folder: it is no remote address and does not read as a hub name."""
    return "://" not in path and (path.startswith((".", "/", "~")) or _HUB_NAME.fullmatch(path) is None)


def _read_hf_config(config: DictConfig) -> tuple[Any, list[str]]:
    from transformers import AutoConfig

    path = str(config.model.hf_config_path or config.model.path or "")
    folder = os.path.expanduser(path)
    if not path or "://" in path or (_is_local(path) and not os.path.isdir(folder)):
        return None, []  # required or missing: told by path_problems; remote: read by verl
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=bool(config.model.trust_remote_code))
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None, [f"model.path must hold a model's config.json; got {path} ({reason})"]
    try:
        override(hf_config, config.model.override_config)
    except ValueError as error:
        return None, [str(error)]
    return hf_config, []
