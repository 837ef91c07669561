"""The implementation of Adam that a run takes: fused, foreach, or a loop over the parameters.

torch itself takes `foreach` on a GPU and the loop on a CPU, whatever its version. Over FSDP2's DTensors `fused` is the
fastest, but on torch < 2.12 each of its steps leaves objects behind (https://github.com/pytorch/pytorch/issues/188174).
With 100 parameters on two gloo ranks, on torch 2.11: 506 objects and 51 KiB a step (`foreach` 21 and 11 KiB, the loop
26 and 7 KiB), in 61 ms (135 and 1,088 ms). On torch 2.12 and 2.13 none of them leaves any object.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from packaging.version import Version

FUSED, FOREACH, LOOP = "fused", "foreach", "loop"
_OPTIONS = {FUSED: {"fused": True}, FOREACH: {"foreach": True}, LOOP: {"foreach": False, "fused": False}}
_ADAMS = ("Adam", "AdamW")


def implementation(
    optim: Mapping[str, Any], device: str, offloads: bool = False, half: bool = False, version: str = torch.__version__
) -> str | None:
    """Choose the implementation: the user's by `optim.override_optimizer_config`, else that of the device.

    Args:
        optim: the node `optim`.
        device: cuda or cpu.
        offloads: `engine.offload_policy`, whose steps run on the host and take a tenth of the time if they are fused.
        half: whether the run is in fp16, whose gradient scaler would give a fused step tensors that are not DTensors.
        version: the version of torch.

    Returns None for an optimizer without this choice.
    """
    given = optim["override_optimizer_config"] or {}
    if chosen := [name for name in (FUSED, FOREACH) if given.get(name)]:
        return chosen[0]
    if optim["optimizer_impl"] != "torch.optim" or optim["optimizer"] not in _ADAMS:
        return None
    if any(given.get(name) is not None for name in (FUSED, FOREACH)) or (device == "cpu" and not offloads):
        return LOOP
    return FUSED if not half and (offloads or Version(version).release >= (2, 12)) else FOREACH


def with_implementation(config: Any, device: str, offloads: bool, half: bool) -> Any:
    """Add the :func:`implementation` to the options of verl's optimizer config; the user's own options win."""
    chosen = implementation(vars(config), device, offloads, half)
    if chosen is None:
        return config
    return replace(config, override_optimizer_config={**_OPTIONS[chosen], **(config.override_optimizer_config or {})})


def take_threads() -> None:
    """Let the steps of an optimizer on the host use this rank's share of the node's cores.

    Launchers give a rank one thread, since everything else runs on its GPU.
    """
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(share, torch.get_num_threads()))
