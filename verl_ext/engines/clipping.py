"""The norm of all gradients in fp64, and their clipping by it.

A sum of squares in fp32 loses digits with its length and order: torch's `vector_norm` on a CPU is off by 1e-4 over a
small model and by 1 % over 10^8 numbers, and by another part on each number of ranks.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl_ext.engines.sharding import local_part

_BLOCK = 1 << 23  # numbers whose fp64 copy is held at a time


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float, device: Any) -> torch.Tensor:
    """Clip gradients in place; return their norm before, fp64 on `device`.

    A collective of the ranks that share the gradients; no rank waits for its device. The gradients may lie elsewhere
    than on `device`, on which ranks communicate.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        parts = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in _blocks(gradient)]
        squares.setdefault(_holders(gradient), []).append(torch.stack(parts).square().sum())
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, of_parameters in squares.items():
        part = torch.stack(of_parameters).sum().to(device, non_blocking=True)
        for group in groups:
            dist.all_reduce(part, group=group)
        total += part
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
    for gradient in gradients:
        local_factor = factor.to(gradient.device)
        for block in _blocks(gradient):  # half precision would round the factor itself
            block.mul_(local_factor) if block.dtype == torch.float32 else block.copy_(block.float() * local_factor)
    return norm


def _holders(gradient: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups whose ranks hold different parts of a gradient."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh, placements = gradient.device_mesh, gradient.placements
    assert not any(placement.is_partial() for placement in placements), "FSDP2 has reduced its gradients"
    # Of experts over ranks, one placement is torch's _StridedShard, which denies to be a shard.
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())


def _blocks(gradient: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of a gradient's own part; an empty one once."""
    local = local_part(gradient)
    yield from local.view(-1).split(_BLOCK) if local.is_contiguous() else (local,)
