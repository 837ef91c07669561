"""The optimizer of a run and its groups; the implementation of Adam (fused, foreach, or loop).

torch itself takes `foreach` on a GPU and the loop on a CPU, whatever its version. Over FSDP2's DTensors `fused` is the
fastest, but on torch < 2.12 each of its steps leaves objects behind (https://github.com/pytorch/pytorch/issues/188174).
With 100 parameters on two gloo ranks, on torch 2.11: 506 objects and 51 KiB a step (`foreach` 21 and 11 KiB, the loop
26 and 7 KiB), in 61 ms (135 and 1,088 ms). On torch 2.12 and 2.13 none of them leaves any object.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from verl.workers.config.optimizer import build_optimizer

from verl_ext.engines.adam8bit import AdamW8bit
from verl_ext.engines.muon import MATRICES, PARTS, MuonAdamW, fused_parts, layer_matrices
from verl_ext.engines.tiles import is_norm
from verl_ext.layers.towers import is_named, name_hint
from verl_ext.options import first_line, must, refuse
from verl_ext.text.workers import available_cpus

FUSED, FOREACH, LOOP = "fused", "foreach", "loop"
_OPTIONS = {FUSED: {"fused": True}, FOREACH: {"foreach": True}, LOOP: {"foreach": False, "fused": False}}
_ADAMS = ("Adam", "AdamW", "Muon")  # Muon leaves what is not a matrix to AdamW
OWN: dict[str, Any] = {"Muon": MuonAdamW, "AdamW8bit": AdamW8bit}  # beside those of torch.optim, or in their place


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
    overrides = optim["override_optimizer_config"] or {}
    if chosen := [name for name in (FUSED, FOREACH) if overrides.get(name)]:
        return chosen[0]
    if optim["optimizer_impl"] != "torch.optim" or optim["optimizer"] not in _ADAMS:
        return None
    if any(overrides.get(name) is not None for name in (FUSED, FOREACH)) or (device == "cpu" and not offloads):
        return LOOP
    return FUSED if not half and (offloads or Version(version).release >= (2, 12)) else FOREACH


def with_implementation(config: Any, device: str, offloads: bool, half: bool) -> Any:
    """Add :func:`implementation` to verl's optimizer config; the user's options win."""
    chosen = implementation(vars(config), device, offloads, half)
    if chosen is None:
        return config
    return replace(config, override_optimizer_config={**_OPTIONS[chosen], **(config.override_optimizer_config or {})})


def parameter_groups(module: nn.Module, optim: Any) -> list[nn.Parameter] | list[dict[str, Any]]:
    """Return a model's parameters, in groups if `optim.decay`, `optim.lr_of` or Muon asks; no packed ones.

    The first group has the rate `optim.lr` if any has. optim: verl's configuration of the optimizer.
    """
    decay, rates = getattr(optim, "decay", "all"), getattr(optim, "lr_of", {})  # verl's own config has neither
    is_muon = own_optimizer(optim) is MuonAdamW
    if decay == "all" and not rates and not is_muon:
        return [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    refuse([*rate_problems(module, rates)])  # checked before weights are read, but not in remote code
    groups: dict[tuple[float, bool, bool, tuple], list[nn.Parameter]] = {}
    of_norms = {parameter for part in module.modules() if is_norm(part) for parameter in part.parameters()}
    of_muon = set(layer_matrices(module, of_norms)) if is_muon else set()
    parts = fused_parts(module) if is_muon and getattr(optim, "split_fused", False) else {}
    for parameter, names in _named(module).items():
        if not parameter.is_floating_point():  # fused optimizers refuse it
            continue
        is_matrix = parameter.ndim >= 2 and not names[0].endswith("bias") and parameter not in of_norms
        decays, of_parameter = decay == "all" or is_matrix, parts.get(parameter, ())
        key = _factor(names, rates), decays, parameter in of_muon, of_parameter if parameter in of_muon else ()
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": groups[key], "lr": optim.lr * key[0], "weight_decay": optim.weight_decay * key[1]}
        | ({MATRICES: key[2], PARTS: key[3]} if is_muon else {})
        for key in sorted(groups, key=lambda key: (key[0] != 1.0, *key))
    ]


def _named(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the names of each parameter; tied weights have several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _factor(names: Iterable[str], rates: Mapping[str, float]) -> float:
    """Return the factor of `optim.lr_of` for a parameter of these names."""
    named = [pattern for pattern in rates if any(is_named(name, pattern) for name in names)]
    # The longest glob, so that a resume, which compares a mapping, need not ask for an order.
    return rates[max(named, key=lambda pattern: (len(pattern), pattern))] if named else 1.0


def own_optimizer(optim: Any) -> Any:
    """Return the class of :data:`OWN` that a configuration names, or None."""
    is_own = getattr(optim, "optimizer_impl", None) == "torch.optim"
    return OWN.get(getattr(optim, "optimizer", "")) if is_own else None


def built_optimizer(parameters: Sequence[Any], optim: Any) -> torch.optim.Optimizer:
    """Build verl's optimizer, or one of ours, of parameters or of their groups."""
    if (kind := own_optimizer(optim)) is None:
        return build_optimizer(parameters, optim)
    groups = parameters
    if kind is MuonAdamW:
        groups = [p if isinstance(p, dict) else {"params": [p], MATRICES: p.ndim == 2} for p in parameters]
    options = {"lr": optim.lr, "betas": optim.betas, "weight_decay": optim.weight_decay}
    return kind(groups, **{**options, **(optim.override_optimizer_config or {})})


def rate_problems(module: nn.Module, rates: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each glob of `optim.lr_of` that names nothing trained, and for two rates of one weight."""
    trained = [names for parameter, names in _named(module).items() if parameter.requires_grad]
    every = [name for names in trained for name in names]
    for pattern in rates:
        if not any(is_named(name, pattern) for name in every):
            yield must("optim.lr_of", "name parameters that are trained", pattern) + name_hint(pattern, every)
    for names in trained:
        asked = [name for name in names if any(is_named(name, pattern) for pattern in rates)]
        if len({_factor([name], rates) for name in asked}) > 1:
            yield must(
                "optim.lr_of", f"give {' and '.join(asked)}, which are one tied weight, the same factor", dict(rates)
            )


def step_problem(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 2) -> str | None:
    """Return why an optimizer cannot be built or step; None if usable.

    It is tried on two small parameters, FSDP2's shards; the ranks of an open process group take the steps together.

    Args:
        build: makes it for parameters.
        steps: their number; 0 for an optimizer that takes none on a CPU.
    """
    with _mesh() as mesh:
        shards = [torch.zeros(2, 2), torch.zeros(2)]
        try:
            parameters = [nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)])) for shard in shards]
            optimizer = build(parameters)
            for _ in range(steps):
                for parameter in parameters:
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        except Exception as error:  # an optimizer may raise any error
            return first_line(error)
    return None


@contextmanager
def _mesh() -> Iterator[DeviceMesh]:
    """Yield a mesh of all ranks, or of two imagined ones."""
    is_alone = not dist.is_initialized()
    if is_alone:
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    finally:
        if is_alone:
            dist.destroy_process_group()


def take_threads() -> None:
    """Let host optimizers use this rank's share of the node's cores.

    Launchers give a rank one thread, since everything else runs on its GPU.
    """
    share = available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(share, torch.get_num_threads()))
