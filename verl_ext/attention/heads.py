"""Heads that sequence-parallel ranks do not divide: key/value heads are repeated, groups of query heads filled up.

```
   28 heads of 4 key/value heads, 8 ranks     q q q q q q q │ …   ►   q q q q│q q q 0 │ …     4 a rank
                                              k             │ …   ►   k      │k       │ …     1 a rank
```

The output of the zero heads is dropped. 360-LLaMA-Factory calls them dummy heads.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HeadPadding:
    """How heads become a number that sequence-parallel ranks divide, each query head beside its key/value head.

    Attributes:
        groups: key/value heads; group: query heads of each.
        repeats: of every key/value head; padded_group: query heads of each, zero heads included.
    """

    groups: int
    group: int
    repeats: int
    padded_group: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, ranks: int) -> "HeadPadding":
        """The least padding, for heads query heads."""
        repeats = ranks // math.gcd(kv_heads, ranks)
        group = heads // kv_heads
        return cls(kv_heads, group, repeats, -(-group // repeats) * repeats)

    @property
    def zero_heads(self) -> int:
        """Query heads that are added."""
        return self.groups * (self.padded_group - self.group)

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, heads, E]`` with the zero heads."""
        if self.padded_group == self.group:
            return x
        grouped = x.unflatten(2, (self.groups, self.group))
        return torch.nn.functional.pad(grouped, (0, 0, 0, self.padded_group - self.group)).flatten(2, 3)

    def key_value(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, kv_heads, E]`` repeated."""
        return x if self.repeats == 1 else x.repeat_interleave(self.repeats, dim=2)

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, heads, E]`` without the zero heads."""
        if self.padded_group == self.group:
            return x
        return x.unflatten(2, (self.groups, self.padded_group))[:, :, :, : self.group].flatten(2, 3)
