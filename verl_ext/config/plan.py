"""What `trainer.plan_only=true` plans for: the ranks and the GPU of the machine that will run it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import DictConfig

from verl_ext.attention import has_flash_attn
from verl_ext.values import Options, option, plain, show

_UNITS = {"": 1, "B": 1, **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_LEAST = 2**30  # less is a number without its unit


@dataclass(frozen=True)
class PlanOptions(Options):
    """For another machine than the one that plans."""

    prefix: ClassVar[str] = "plan"

    world_size: int | None = option(None, "ranks of the run; null: those that plan", least=1)
    gpu_memory: Any = option(
        None, "of each GPU, e.g. 80GiB: its peak is predicted, for a run on GPUs; null: that of a visible GPU"
    )
    reserve: Any = option("5GiB", "of gpu_memory for what is not predicted: CUDA's context, NCCL, fragmentation")

    def problems(self) -> Iterable[str | None]:
        for name in ("gpu_memory", "reserve"):
            value = getattr(self, name)
            size = num_bytes(value)
            if size is None and not (value is None and name == "gpu_memory"):
                yield f"plan.{name} must be a size such as 80GiB, 80GB or a number of bytes; got {show(value)}"
            elif name == "gpu_memory" and size is not None and size < _LEAST:
                yield f"plan.gpu_memory must be at least 1GiB; got {show(value)}"
        memory, reserve = num_bytes(self.gpu_memory), num_bytes(self.reserve)
        if memory is not None and reserve is not None and reserve > memory >= _LEAST:
            yield f"plan.reserve must be at most plan.gpu_memory={show(self.gpu_memory)}; got {show(self.reserve)}"


def num_bytes(size: object) -> int | None:
    """Bytes of "80GiB", "80 GB" or a whole number; None where it is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", str(size).strip())
    if isinstance(size, bool) or found is None or found[2] not in _UNITS:
        return None
    return int(float(found[1]) * _UNITS[found[2]])


def plan_options(config: DictConfig) -> PlanOptions:
    """The node `plan` of a composed config; ValueError where a value is not allowed, or nothing is planned."""
    options = PlanOptions.read(plain(config.plan))
    given = [name for name, value in vars(options).items() if value != getattr(PlanOptions(), name)]
    if given and config.trainer.plan_only is not True:
        name = given[0]
        raise ValueError(f"plan.{name} needs trainer.plan_only=true; got {show(getattr(options, name))} without it")
    if options.gpu_memory is not None and config.trainer.device == "cpu":
        raise ValueError(
            f"plan.gpu_memory must be null with trainer.device=cpu (parallel=cpu); got {options.gpu_memory}"
        )
    return options


def resolve_plan(config: DictConfig, options: PlanOptions) -> list[str]:
    """Sets what a plan for GPUs cannot have here, in place: Liger's kernels, a package for attention. Gives notices."""
    if options.gpu_memory is None:
        return []
    notices = []
    if config.model.use_liger is True:
        config.model.use_liger = False
        notices.append("model.use_liger=true is planned without Liger's kernels, which need less memory")
    if config.attention.backend == "flash_attn" and not has_flash_attn():
        config.attention.backend = "auto"  # torch's own flash attention, which takes the same memory
    return notices
