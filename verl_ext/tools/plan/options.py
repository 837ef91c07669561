"""The options of a plan: the GPUs that the run will have."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from verl_ext.flops import GPUS
from verl_ext.options import Options, choice_problem, must, option, spell

_UNITS = {"": 1, "B": 1, **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_LEAST = 2**30  # a smaller number lacks its unit


@dataclass(frozen=True)
class PlanOptions(Options):
    """The machine of a planned run: ranks, GPUs, memory and speed."""

    prefix: ClassVar[str] = "plan"

    world_size: int = option(1, "ranks of the planned run", least=1)
    gpu: str | None = option(
        None,
        f"GPU on which the time of a step is planned too: {', '.join(GPUS)}; another needs trainer.gpu_peak_tflops, "
        "plan.gpu_memory, plan.link and plan.network",
    )
    efficiency: float = option(
        0.4, "share of the GPU's peak that a step's computation reaches, recomputation included", above=0, most=1
    )
    link: Any = option(None, "bytes per second that a GPU receives in its node, e.g. 450GB; null: those of plan.gpu")
    network: Any = option(None, "bytes per second from other nodes, e.g. 50GB; null: those of plan.gpu")
    gpu_memory: Any = option(
        None,
        "memory of each GPU, e.g. 80GiB, for which the peak is predicted; null: that of plan.gpu, or of a visible GPU",
    )
    host_memory: Any = option(
        None, "memory of each node for its ranks, e.g. 2TiB, which must hold their data on the host; null: not checked"
    )
    ranks_per_node: int = option(8, "ranks that share a node's memory; a smaller run has fewer", least=1)
    expert_imbalance: float = option(
        1.0,
        "with parallel.expert_parallel: rows that reach the busiest rank's experts, relative to the mean over ranks "
        "(train/expert_rows_max of a run)",
        least=1,
    )
    reserve: Any = option("5GiB", "part of gpu_memory outside PyTorch: CUDA's context, NCCL's buffers, workspaces")

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each value that does not fit."""
        for name in ("gpu_memory", "host_memory", "reserve"):
            value = getattr(self, name)
            size = num_bytes(value)
            if size is None and (value is not None or name == "reserve"):
                yield must(f"plan.{name}", "be a size such as 80GiB, 80GB or a number of bytes", value)
            elif name == "gpu_memory" and size is not None and size < _LEAST:
                yield must("plan.gpu_memory", "be at least 1GiB", value)
        for name in ("link", "network"):
            value = getattr(self, name)
            if value is not None and not num_bytes(value):
                yield must(f"plan.{name}", "be the bytes of a second, such as 450GB", value)
        memory, reserve = num_bytes(self.gpu_memory), num_bytes(self.reserve)
        if memory is not None and reserve is not None and reserve > memory >= _LEAST:
            yield must("plan.reserve", f"be at most plan.gpu_memory={spell(self.gpu_memory)}", self.reserve)

    def with_values_of_gpu(self, peak_tflops: float | None) -> "PlanOptions":
        """Return these options with a named GPU's properties for null.

        Raises ValueError if a GPU without a known name lacks one, of which trainer.gpu_peak_tflops is `peak_tflops`.
        """
        if self.gpu is None:
            return self
        known = GPUS.get(self.gpu)
        given: dict[str, Any] = {} if known else {"trainer.gpu_peak_tflops": peak_tflops}
        of_gpu = {} if known is None else {"gpu_memory": known.memory, "link": known.link, "network": known.network}
        values = {name: getattr(self, name) or of_gpu.get(name) for name in ("gpu_memory", "link", "network")}
        given |= {f"{self.prefix}.{name}": value for name, value in values.items()}
        if missing := [key for key, value in given.items() if value is None]:
            problem = choice_problem("plan.gpu", self.gpu, GPUS)
            raise ValueError(f"{problem}; another GPU needs {', '.join(missing)}")
        return self.read({**vars(self), **values})


def num_bytes(size: object) -> int | None:
    """Return the bytes of "80GiB", "80 GB" or a number, else None."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", str(size).strip())
    if isinstance(size, bool) or found is None or found[2] not in _UNITS:
        return None
    return int(float(found[1]) * _UNITS[found[2]])
