"""verl's platform interface for CPU ranks, over gloo and without streams.

verl 0.9.1 makes every device call through :class:`verl.plugin.platform.PlatformBase`. This module implements it for a
CPU, so that FSDP2, Ulysses, checkpoints and the Ray worker group run unchanged on a laptop or in CI.

verl's auto-detection never finds this platform, because a CPU-only driver of a GPU cluster must keep the platform that
stock verl selects. Only ``VERL_PLATFORM=cpu`` selects it; our trainer sets this if no accelerator is visible.
"""

import os
import resource
import sys
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _do_nothing(*args: Any, **kwargs: Any) -> None: ...


class CPUDevice:
    """The part of ``torch.cuda`` that verl uses, on a host without GPUs."""

    is_available = staticmethod(torch.cpu.is_available)
    current_device = staticmethod(torch.cpu.current_device)
    current_stream = staticmethod(torch.cpu.current_stream)
    stream = staticmethod(torch.cpu.stream)
    set_device = synchronize = empty_cache = ipc_collect = staticmethod(_do_nothing)
    set_per_process_memory_fraction = reset_peak_memory_stats = staticmethod(_do_nothing)

    @staticmethod
    def device_count() -> int:
        return os.cpu_count() or 1

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "cpu"

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return 0

    memory_reserved = max_memory_allocated = memory_allocated

    @staticmethod
    def max_memory_reserved(device: Any = None) -> int:
        """Return the peak resident memory of this process in bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """The platform of CPU ranks over gloo; only ``VERL_PLATFORM=cpu`` selects it."""

    device_name = vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: CPUDevice)

    set_device = synchronize = empty_cache = set_allocator_settings = _do_nothing
    profiler_start = profiler_stop = cudart = _do_nothing

    def is_available(self) -> bool:
        return not torch.cuda.is_available()

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never by auto-detection; see the module's docstring

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return CPUDevice.device_count()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_EXT_VISIBLE_CPUS"  # not a real variable, because CPU ranks share the host

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False
