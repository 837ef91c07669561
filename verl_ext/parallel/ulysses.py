"""Attention heads among sequence-parallel ranks (Ulysses): padding and exchange.

```
                    ranks hold T/n tokens of all H heads
   q, k, v  ──all-to-all──►  T tokens of H/n heads  ──kernel──►  ──all-to-all──►  T/n tokens of H heads
```

If n ranks do not divide the heads, the query heads of a key/value head are split into parts, each with a copy of the
key/value head; zero heads fill up the parts and their number:

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

import torch
import torch.distributed as dist
import torch.nn.functional as F

from verl_ext.parallel.exchange import exchange_rows


@dataclass(frozen=True)
class HeadPadding:
    """A padding to a number of heads that the ranks divide.

    Attributes:
        groups: key/value heads of the model.
        group: query heads of each key/value head.
        parts: the parts that each group is split into, of equally many query heads after filling up.
        ranks: the ranks that share the heads.
    """

    groups: int
    group: int
    parts: int
    ranks: int

    @classmethod
    @lru_cache
    def from_heads(cls, heads: int, kv_heads: int, ranks: int) -> "HeadPadding":
        """Choose the padding with fewest query heads, then fewest key/value heads."""
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
        """The number of query heads that the padding adds."""
        return self.heads - self.groups * self.group

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """Pad ``x[B, T, groups · group, E]`` to ``[B, T, self.heads, E]``."""
        if self.zero_heads == 0:
            return x
        padded = x.new_zeros(*x.shape[:2], self.heads, x.size(-1))
        self._of_model(padded).copy_(x.unflatten(2, (self.groups, self.group)))
        return padded

    def key_value(self, x: torch.Tensor) -> torch.Tensor:
        """Repeat and pad ``x[B, T, groups, E]`` to ``[B, T, self.kv_heads, E]``."""
        repeated = x if self.parts == 1 else x.repeat_interleave(self.parts, dim=2)
        missing = self.kv_heads - repeated.size(2)
        return F.pad(repeated, (0, 0, 0, missing)) if missing else repeated

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """Take the model's own heads out of ``x[B, T, self.heads, E]``."""
        return x if self.zero_heads == 0 else self._of_model(x).flatten(2, 3)

    def _of_model(self, x: torch.Tensor) -> torch.Tensor:
        """View own query heads ``[B, T, groups, group, E]`` among padded ones."""
        filled = self.parts * self.part
        return x[:, :, : self.groups * filled].unflatten(2, (self.groups, filled))[:, :, :, : self.group]


def split_heads(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Exchange tokens for heads, of all tensors in one all-to-all.

    ``[B, T/n, heads, E]`` becomes ``[B, T, heads/n, E]`` among the n ranks of ``group``:

    - the tensors share B, T/n and their type; each has its own E, and its own heads, a multiple of n;
    - if B is 1, the results are views of one tensor.
    """
    ranks = dist.get_world_size(group)
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in tensors]  # [n, B, T/n, heads/n, E]
    shapes = [part.shape[3:] for part in parts]
    rows = exchange_rows(torch.cat([part.flatten(3) for part in parts], dim=-1), group)  # [n, B, T/n, Σ heads/n · E]
    columns = rows.split([shape.numel() for shape in shapes], dim=-1)
    return tuple(
        column.unflatten(-1, shape).movedim(0, 1).flatten(1, 2)  # [B, n, T/n, heads/n, E] -> [B, T, heads/n, E]
        for column, shape in zip(columns, shapes, strict=True)
    )


def join_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange ``x[B, T, heads/n, E]`` for ``[B, T/n, heads, E]``: `split_heads` back."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0)  # [n, B, T/n, heads/n, E]
    return exchange_rows(parts, group).movedim(0, 2).flatten(2, 3)  # [B, T/n, n, heads/n, E] -> [B, T/n, heads, E]
