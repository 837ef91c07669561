"""What FSDP shards separately, in which type, and what of it stays in fp32."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from verl_ext.layers import SCANS, mixers_of
from verl_ext.parallel.experts import adapt_shares, choose_exchange, expert_layers, share_experts


def keep_decays_precise(module: nn.Module, fsdp_kwargs: dict[str, Any]) -> None:
    """Shard recurrent layers so that their rates of decay stay fp32.

    A_log and dt_bias are summed and exponentiated over all tokens of a document: in bf16 a rate is off by up to 0.4 %.
    A layer's own parameters, and those of its convolution, which it reads and does not call, are a group in fp32 that
    stays whole between forward and backward; its projections and norm are another group with the usual arguments.

    Args:
        module: the model before it is sharded.
        fsdp_kwargs: verl's arguments of fully_shard.
    """
    policy: MixedPrecisionPolicy = fsdp_kwargs["mp_policy"]
    if policy.param_dtype == torch.float32:
        return
    precise = MixedPrecisionPolicy(torch.float32, policy.reduce_dtype, cast_forward_inputs=False)
    for layer, called in list(_recurrent_layers(module)):
        fully_shard(called, **fsdp_kwargs)
        fully_shard(layer, **{**fsdp_kwargs, "mp_policy": precise, "reshard_after_forward": False})


def _recurrent_layers(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield the layers with rates of decay, each with the parts that it calls and that need no fp32."""
    for layer in [layer for layer, mixer in mixers_of(module) if mixer.time in SCANS]:
        yield layer, [part for part in layer.children() if [*part.parameters()] and not isinstance(part, nn.Conv1d)]


def cast_frozen(module: Any, dtype: torch.dtype) -> None:
    """Store frozen parameters in the type of a forward, in place.

    FSDP2 would cast them to it in every forward, so that nothing else is computed. Rates of decay and what the class
    keeps in fp32 stay as they are. Call it before the module is sharded.
    """
    plain = module.get_base_model() if hasattr(module, "peft_config") else module
    fp32 = fp32_names(plain, dtype)
    precise = set[nn.Parameter]()
    for layer, called in _recurrent_layers(module):
        precise |= {*layer.parameters()} - {parameter for part in called for parameter in part.parameters()}
    for name, parameter in module.named_parameters():
        is_cast = parameter.dtype == torch.float32 and parameter not in precise and not fp32.search(name)
        if is_cast and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def fp32_names(model: Any, dtype: torch.dtype) -> re.Pattern[str]:
    """Return the pattern of names that transformers reads in fp32 when it reads a plain model in `dtype`."""
    patterns = [name.replace("*", ".*") for name in model._get_dtype_plan(dtype)]
    return re.compile("|".join(patterns) or "(?!)")


def cut_dim(experts: int, shards: int) -> int:
    """Return the dimension over which `shards` ranks cut a rank's experts: 0 if each gets whole ones, else 1."""
    return 0 if experts % shards == 0 else 1


def shard_experts(module: Any, mesh: DeviceMesh, fsdp_kwargs: dict[str, Any]) -> None:
    """Give each rank its experts, which FSDP2 shards over the ranks that have the same ones.

    One layer after the other, so that a device never holds those of several layers whole.

    Args:
        module: the model before it is sharded, with its adapters.
        mesh: of :func:`verl_ext.parallel.experts.expert_mesh`.
        fsdp_kwargs: verl's arguments of fully_shard.
    """
    # Routing weights stay fp32 at the unit's border, as inside of their layer's unit.
    policy = replace(fsdp_kwargs["mp_policy"], cast_forward_inputs=False)
    shards = mesh["efsdp"].size()
    for layer in [*expert_layers(module)]:
        share_experts(layer, mesh["ep"])
        dim = cut_dim(layer.expert_share.count, shards)
        own = {"mesh": mesh[(mesh.mesh_dim_names or ())[:-1]], "mp_policy": policy}
        fully_shard(layer, **{**fsdp_kwargs, **own, "shard_placement_fn": lambda _, dim=dim: Shard(dim)})
    adapt_shares(module)
    choose_exchange(module.get_base_model() if hasattr(module, "peft_config") else module)


def prefetch_experts(module: nn.Module) -> None:
    """Let each layer with experts gather them, and the next such layer, early.

    In a forward pass the host waits for the routing of every layer, so that it comes to the next ones late. In a
    backward pass it does not wait, and FSDP2's own order is good.
    """
    units = [part for part in module.modules() if isinstance(part, FSDPModule) and part is not module]
    layers = [unit for unit in units if any(part is not unit for part in expert_layers(unit))]
    for layer, following in zip_longest(layers, layers[1:]):
        experts = [*expert_layers(layer)]
        experts = experts if len(experts) == 1 else []  # of several, some may be for images alone, and not run
        layer.set_modules_to_forward_prefetch([*experts, *([following] if following else [])])


def sharded_apart(module: Any) -> list[str]:
    """Return the classes of layers that FSDP2 can shard by themselves."""
    names = set(getattr(module, "_no_split_modules", None) or _layers(module))
    uses = Counter(weight for _, weight in module.named_parameters(remove_duplicate=False))
    tied = getattr(module.config, "tie_word_embeddings", False)

    def stands_alone(layer: Any) -> bool:
        inner = [part for part in layer.modules() if part is not layer]
        if any(type(part).__name__ in names or (isinstance(part, nn.Embedding) and not tied) for part in inner):
            return False
        counts = Counter(weight for _, weight in layer.named_parameters(remove_duplicate=False))
        return all(uses[weight] == count for weight, count in counts.items())

    layers = [layer for layer in module.modules() if type(layer).__name__ in names]
    return sorted({*names} - {type(layer).__name__ for layer in layers if not stands_alone(layer)})


def local_part(tensor: Any) -> torch.Tensor:
    """Return a rank's part of a tensor, the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layers(module: Any) -> set[str]:
    """Return the classes of the members of a model's outermost lists."""
    lists = {path: part for path, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    outer = [part for path, part in lists.items() if not path.startswith(tuple(f"{other}." for other in lists))]
    return {type(layer).__name__ for part in outer for layer in part}
