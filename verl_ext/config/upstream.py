"""Checks of verl's nodes for packs, which verl's dataclasses lack."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from hydra.utils import get_class

from verl_ext.options import choice_problem, spell, type_problems

_PACKS_SET_IT = "data.max_tokens and data.micro_batch_size_per_gpu decide what a forward holds"
# key: (the only allowed value, the reason)
REFUSED: dict[str, tuple[Any, str]] = {
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
    "engine.use_torch_compile": (False, "verl's compiles the entropy alone, which SFT never computes; no layer is"),
    "engine.qat.enable": (False, "it was never run with packs"),
    "engine.use_dynamic_bsz": (True, _PACKS_SET_IT),
    "engine.micro_batch_size_per_gpu": (None, _PACKS_SET_IT),
    "engine.max_token_len_per_gpu": (None, _PACKS_SET_IT),
    "engine.infer_micro_batch_size_per_gpu": (None, _PACKS_SET_IT),
    "engine.infer_max_token_len_per_gpu": (None, _PACKS_SET_IT),
}
_DTYPES = ("fp32", "bf16", "fp16")
_MODEL_DTYPES = (*_DTYPES, "float32", "bfloat16", "float16")
_CONTENTS = ("model", "optimizer", "extra", "hf_model")
# Fields whose types in verl are narrower than what it takes, or whose checks are below or in check_run.
_CHECKED_BELOW = (
    *("path", "override_config", "exclude_modules", "strategy", "model_dtype", "optimizer", "optimizer_impl"),
    *("lr_scheduler_type", "override_optimizer_config", "save_contents", "load_contents", "mixed_precision"),
)
# key: (the check, the requirement in words)
_BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "engine.ulysses_sequence_parallel_size": (lambda size: size >= 1, "at least 1"),
    "model.lora_rank": (lambda rank: rank >= 0, "at least 0"),
    "optim.weight_decay": (lambda decay: 0 <= decay < math.inf, "at least 0 and finite"),
    "optim.lr": (lambda lr: 0 < lr < math.inf, "above 0 and finite"),
    "optim.clip_grad": (lambda norm: norm > 0, "above 0"),
    "optim.num_cycles": (lambda cycles: 0 <= cycles < math.inf, "at least 0 and finite"),
    "optim.lr_warmup_steps_ratio": (lambda share: 0 <= share <= 1, "from 0 to 1"),
    "optim.min_lr_ratio": (lambda share: 0 <= share <= 1, "from 0 to 1"),
}


def upstream_problems(values: Mapping[str, Any]) -> Iterator[str | None]:
    """Yield a line for each ill-typed or out-of-bounds value of verl's nodes."""
    ill_typed: list[str] = []
    for name in ("model", "engine", "optim", "checkpoint", "profiler"):
        cls = get_class(values[name]["_target_"])
        if is_dataclass(cls):
            given = {key: value for key, value in values[name].items() if value != "???"}
            ill_typed += type_problems(cls, given, name, _CHECKED_BELOW)
    yield from ill_typed
    for key, (holds, requirement) in _BOUNDS.items():
        value = select(values, key)
        if not any(line.startswith(f"{key} ") for line in ill_typed) and not holds(value):
            yield f"{key} must be {requirement}; got {spell(value)}"
    yield choice_problem("engine.strategy", values["engine"]["strategy"], ("fsdp2",))
    for name, dtype in (values["engine"].get("mixed_precision") or {}).items():
        if dtype:
            yield choice_problem(f"engine.mixed_precision.{name}", dtype, _DTYPES)
    if (dtype := values["engine"]["model_dtype"]) is not None:
        yield choice_problem("engine.model_dtype", dtype, _MODEL_DTYPES)
    betas = values["optim"]["betas"]
    is_pair = isinstance(betas, list) and len(betas) == 2
    if not is_pair or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        yield f"optim.betas must be two numbers from 0 to below 1; got {spell(betas)}"
    for name in ("save_contents", "load_contents"):  # load_contents defaults to save_contents
        contents = values["checkpoint"][name]
        if not isinstance(contents, list):
            yield f"checkpoint.{name} must be a list of {', '.join(_CONTENTS)}; got {spell(contents)}"
        else:
            yield from (choice_problem(f"checkpoint.{name}", content, _CONTENTS) for content in contents)


def fixed_value_problems(
    values: Mapping[str, Any], fixed: Mapping[str, tuple[Any, str]] = REFUSED, condition: str = ""
) -> Iterator[str]:
    """Yield a line with the reason for each option not so fixed."""
    for key, (allowed, why) in fixed.items():
        if (value := select(values, key, allowed)) != allowed:
            yield f"{key} must be {spell(allowed)}{condition}: {why}; got {spell(value)}"


def select(values: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return a dotted key's value in nested mappings, or the default."""
    for name in key.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return default
        values = values[name]
    return values
