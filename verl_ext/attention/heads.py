"""Attention heads among sequence-parallel ranks (Ulysses): their number made divisible, and the exchange of them.

```
                    ranks hold T/n tokens of all H heads
   q, k, v  ──all-to-all──►  T tokens of H/n heads  ──kernel──►  ──all-to-all──►  T/n tokens of H heads
```

Heads that n ranks do not divide are made divisible by splitting the query heads of a key/value head into parts, for
each of which the key/value head is repeated, and by filling up parts and their number with zero heads:

```
   28 heads of 4 key/value heads, 8 ranks     q q q q q q q │ …   ►   q q q q│q q q 0 │ …     4 a rank
                                              k             │ …   ►   k      │k       │ …     1 a rank
   6 heads of 6 key/value heads, 4 ranks      q q q q q q         ►   q q│q q│q q│0 0         2 a rank
                                              k k k k k k         ►   k k│k k│k k│0 0         2 a rank
```

The output of the zero heads is dropped. 360-LLaMA-Factory calls them dummy heads.
DeepSpeed-Ulysses: https://arxiv.org/abs/2309.14509.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


@dataclass(frozen=True)
class HeadPadding:
    """The way to a number of heads that ranks divide, each query head beside its key/value head.

    Attributes:
        groups: key/value heads of the model; group: query heads of each.
        parts: into which each group is split, of equally many query heads after filling up.
        ranks: among which the heads are divided.
    """

    groups: int
    group: int
    parts: int
    ranks: int

    @classmethod
    @lru_cache
    def of(cls, heads: int, kv_heads: int, ranks: int) -> "HeadPadding":
        """The padding with the fewest query heads, and among those with the fewest key/value heads."""
        group = heads // kv_heads
        return min(
            (cls(kv_heads, group, parts, ranks) for parts in range(1, group + 1)), key=lambda p: (p.heads, p.kv_heads)
        )

    @property
    def part(self) -> int:
        """Query heads of each part, zero heads included."""
        return -(-self.group // self.parts)

    @property
    def kv_heads(self) -> int:
        """Key/value heads of all ranks, repeated and zero heads included."""
        return -(-self.groups * self.parts // self.ranks) * self.ranks

    @property
    def heads(self) -> int:
        """Query heads of all ranks, zero heads included."""
        return self.kv_heads * self.part

    @property
    def zero_heads(self) -> int:
        """Query heads that are added."""
        return self.heads - self.groups * self.group

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, self.heads, E]`` from ``x[B, T, groups · group, E]``."""
        if self.zero_heads == 0:
            return x
        padded = x.new_zeros(*x.shape[:2], self.heads, x.size(-1))
        self._of_model(padded).copy_(x.unflatten(2, (self.groups, self.group)))
        return padded

    def key_value(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, self.kv_heads, E]`` from ``x[B, T, groups, E]``."""
        repeated = x if self.parts == 1 else x.repeat_interleave(self.parts, dim=2)
        missing = self.kv_heads - repeated.size(2)
        return F.pad(repeated, (0, 0, 0, missing)) if missing else repeated

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, groups · group, E]`` from ``x[B, T, self.heads, E]``."""
        return x if self.zero_heads == 0 else self._of_model(x).flatten(2, 3)

    def _of_model(self, x: torch.Tensor) -> torch.Tensor:
        """The view ``[B, T, groups, group, E]`` of the model's own query heads among padded ones."""
        filled = self.parts * self.part
        return x[:, :, : self.groups * filled].unflatten(2, (self.groups, filled))[:, :, :, : self.group]


def split_heads(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """``[B, T, heads/n, E]`` of each tensor ``[B, T/n, heads, E]``, by one all-to-all among the n ranks of ``group``.

    The tensors share B, T/n and their type; each has its own heads, a multiple of n, and head size E. They come back as
    views of one tensor where B is 1.
    """
    return _AllToAll.apply(group, True, *tensors)


def join_heads(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[B, T/n, heads, E]`` from ``[B, T, heads/n, E]``: the way back of :func:`split_heads`."""
    (joined,) = _AllToAll.apply(group, False, tensor)
    return joined


class _AllToAll(torch.autograd.Function):
    """The exchange of heads for tokens, or back, whose gradients take the opposite way."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, split: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.split = group, split
        return _exchange(group, split, tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, *_exchange(ctx.group, not ctx.split, grad_outputs))


def _exchange(group: dist.ProcessGroup, split: bool, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Each rank's part of dimension 2 (split) or 1 for that rank; what comes is joined along the other one."""
    divided, joined = (2, 1) if split else (1, 2)
    ranks = dist.get_world_size(group)
    parts = [x.unflatten(divided, (ranks, -1)).movedim(divided, 0) for x in tensors]  # [n, B, T/n, heads/n, E]
    sizes = [part.shape[3:].numel() for part in parts]
    sent = parts[0].new_empty(*parts[0].shape[:3], sum(sizes))
    for place, part in zip(sent.split(sizes, dim=-1), parts, strict=True):
        place.unflatten(-1, part.shape[3:]).copy_(part)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return tuple(
        place.unflatten(-1, part.shape[3:]).movedim(0, joined).flatten(joined, joined + 1)
        for place, part in zip(received.split(sizes, dim=-1), parts, strict=True)
    )
