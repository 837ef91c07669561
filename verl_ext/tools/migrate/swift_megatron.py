"""ms-swift's Megatron engine: `megatron sft`, `pt` and `rlhf`, by the names of `swift sft`."""

import math
from typing import Any

from verl_ext.tools.migrate import swift
from verl_ext.tools.migrate.line import Moved, is_on, listed, number
from verl_ext.tools.migrate.tables import values_of

_STEPS = "gradient_accumulation_steps"
_SCHEDULES = {"wsd": "warmup_stable_decay"}


def read_megatron(moved: Moved) -> None:
    """Translate the command's flags."""
    moved.take("megatron")
    names = {own: name for own, name in values_of("megatron").items() if moved.has(own)}
    moved.adopt(names)
    moved.adopted |= {name: _renamed(moved, own, moved.adopted[name]) for own, name in names.items()}
    # A step counts the rows of all ranks there too.
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    group = math.prod(max(int(number(moved.get(name), 1.0)), 1) for name in sizes)
    ranks, moved.ranks = moved.ranks, moved.ranks or group
    rows = int(number(moved.get("global_batch_size"), 16.0))
    micro = max(int(number(moved.get("micro_batch_size"), 1.0)), 1)
    moved.adopted[_STEPS] = max(rows // (micro * max(moved.ranks // group, 1)), 1)
    if str(moved.get("recompute_granularity")) == "none":
        moved.adopted["gradient_checkpointing"] = False
    swift.read_swift_keys(moved)
    moved.ranks = ranks
    moved.put("data.train_batch_size", rows)
    if is_on(least := moved.get("min_lr")):
        moved.put("optim.min_lr_ratio", float(f"{number(least) / number(moved.words['optim.lr'], 1.0):.6g}"))
    if moved.words.get("model") == "lora":
        moved.differ(
            "adapters of q_proj, k_proj and v_proj are apart, there of one matrix; of experts there is none here"
        )


def _renamed(moved: Moved, key: str, value: Any) -> Any:
    """Return a value as `swift sft` takes it."""
    if key == "lr_decay_style":
        return _SCHEDULES.get(str(value).lower(), value)
    if key == "moe_aux_loss_coeff":
        return listed(value)[0]
    if key not in ("modules_to_save", "target_modules"):
        return value
    modules = values_of("megatron_modules")
    ours = [each for name in listed(value) for each in modules.get(str(name), [str(name)])]
    if key == "modules_to_save":
        moved.put("model.modules_to_save", ours)
    if other := [name for name in ours if name.startswith(("linear_", "all-")) and name != "all-linear"]:
        moved.lack(key, f"adapters and copies are of transformers' modules; got {', '.join(other)}")
    return ours
