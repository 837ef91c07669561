"""Where the documents of a pack begin and end, and where its tokens lie on the ranks that share it.

The ranks are `parallel.context_parallel_size` groups of `engine.ulysses_sequence_parallel_size` neighbours. Causal
attention costs a token more the later it stands in its document: a group holds an early and a late chunk of the pack.

```
pack      │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6 │ 7 │           8 chunks for 4 groups
group     │ 0   7 │ 1   6 │ 2   5 │ 3   4 │           order of the ranks
rank      │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6 │ 7 │           here 2 ranks a group
```

One group holds the pack as it is, a slice a rank.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from verl_ext.values import Options, option


@dataclass(frozen=True)
class ParallelOptions(Options):
    """How ranks share a pack, beside verl's `engine.ulysses_sequence_parallel_size`."""

    prefix: ClassVar[str] = "parallel"

    context_parallel_size: int = option(
        1,
        "groups of `engine.ulysses_sequence_parallel_size` ranks that share a pack and exchange keys and values",
        least=1,
    )


@dataclass(frozen=True)
class DocumentLayout:
    """Document boundaries of one flattened micro-batch, computed once on the host and handed to every layer.

    verl's own patched attention gathers and searches ``position_ids`` in every layer, with a collective and a device
    synchronisation each.
    """

    offsets: tuple[int, ...]  # D + 1 host integers from 0 to T; document d is [offsets[d], offsets[d + 1])
    cu_seqlens: torch.Tensor  # int32[D + 1], the same on the device of the attention
    max_length: int  # tokens of the longest document
    longer_keys: "DocumentLayout | None" = None  # of keys, where documents have more of them than queries

    @classmethod
    def of(cls, lengths: Sequence[int], device: Any, keys: Sequence[int] | None = None) -> "DocumentLayout":
        """Documents of these lengths; keys: lengths of their keys, where those are others."""
        offsets = (0, *accumulate(lengths))
        cu_seqlens = pinned(torch.tensor(offsets, dtype=torch.int32), device).to(device, non_blocking=True)
        longer = None if keys is None or list(keys) == list(lengths) else cls.of(keys, device)
        return cls(offsets, cu_seqlens, max(lengths), longer)

    @property
    def keys(self) -> "DocumentLayout":
        """Where each document's keys lie, of which its queries are the last."""
        return self.longer_keys or self

    def attend(
        self,
        kernel: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Any,
    ) -> torch.Tensor:
        """``[T, H, E]`` of a kernel for ``query[T, H, ·]``, ``key[S, K, ·]`` and ``value[S, K, E]``.

        Documents must cover all rows: a flash kernel leaves the others as they were in memory.
        """
        assert (len(query), len(key), len(value)) == (self.offsets[-1], *[self.keys.offsets[-1]] * 2)
        output = kernel(query, key, value, self, options)
        assert output.shape == (*query.shape[:2], value.size(-1))
        return output

    def padded(self, pad: int) -> "DocumentLayout":
        """Append ``pad`` tokens as one last pseudo-document, as ranks need that do not divide T."""
        if pad == 0:
            return self
        end = self.offsets[-1] + pad
        return DocumentLayout(
            (*self.offsets, end), F.pad(self.cu_seqlens, (0, 1), value=end), max(self.max_length, pad)
        )


def document_layout(position_ids: torch.Tensor, device: torch.device | str = "cpu") -> DocumentLayout:
    """Boundaries from ``position_ids[T]`` on the host, which restart at 0 with every document.

    ```
    position_ids   0 1 2 | 0 1 2 3 | 0        offsets 0 3 7 8    max_length 4
    ```
    """
    assert position_ids.dim() == 1
    assert position_ids.numel() > 0
    assert position_ids.device.type == "cpu"
    assert int(position_ids[0]) == 0, "a micro-batch begins with a document's first token"
    starts = (position_ids == 0).nonzero().flatten()
    edges = torch.cat([starts, starts.new_tensor([position_ids.numel()])])
    return DocumentLayout.of(edges.diff().tolist(), device)


def pieces(offsets: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """(d, start, end) of each document d that has tokens in [first, last), and which of them it has there."""
    d = bisect_right(offsets, first) - 1
    while d + 1 < len(offsets) and offsets[d] < last:
        yield d, max(offsets[d], first), min(offsets[d + 1], last)
        d += 1


def pinned(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """A small tensor page-locked on its way from the host to CUDA, without which the copy waits."""
    return tensor.pin_memory() if tensor.device.type == "cpu" and torch.device(device).type == "cuda" else tensor


@dataclass(frozen=True)
class SequenceShards:
    """Which tokens of a pack of T, padding included, each of the ranks holds that share it, and where this rank's are.

    Attributes:
        ulysses: ranks of a group, neighbours; context: groups.
        rank: this one among all of them, group · ulysses + its place in the group.
    """

    ulysses: int = 1
    context: int = 1
    rank: int = 0

    @property
    def ranks(self) -> int:
        return self.ulysses * self.context

    @property
    def group(self) -> int:
        """The group that this rank is in."""
        return self.rank // self.ulysses

    @property
    def multiple(self) -> int:
        """Of which T must be a multiple."""
        return math.lcm(self.ranks, len(self.chunks))

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks of the pack in the order of the ranks, equally many a group."""
        if self.context == 1:
            return (0,)
        return tuple(chunk for group in range(self.context) for chunk in (group, 2 * self.context - 1 - group))

    def by_rank(self, values: torch.Tensor) -> torch.Tensor:
        """``[T, …]`` of the pack in the order of the ranks."""
        if self.context == 1:
            return values
        chunks = values.chunk(len(self.chunks))
        return torch.cat([chunks[chunk] for chunk in self.chunks])

    def by_position(self, values: torch.Tensor) -> torch.Tensor:
        """``[T, …]`` in the order of the ranks as it stands in the pack."""
        if self.context == 1:
            return values
        chunks = values.chunk(len(self.chunks))
        return torch.cat([chunks[self.chunks.index(chunk)] for chunk in range(len(chunks))])

    def slice(self, values: torch.Tensor) -> torch.Tensor:
        """``[T/n, …]``: what this rank holds of ``[T, …]``."""
        length = len(values) // self.ranks
        return self.by_rank(values)[self.rank * length : (self.rank + 1) * length]

    def positions(self, places: torch.Tensor, tokens: int) -> torch.Tensor:
        """Where tokens stand in the pack that have these places in the order of the ranks."""
        length = tokens // len(self.chunks)
        return torch.tensor(self.chunks)[places // length] * length + places % length

    def spans(self, tokens: int) -> Iterator[tuple[int, int]]:
        """[start, end) in the pack of the runs of tokens that this rank holds, in its order; at most two."""
        length, held = tokens // len(self.chunks), tokens // self.ranks
        first, last = self.rank * held, (self.rank + 1) * held
        for index, chunk in enumerate(self.chunks):
            start, end = max(first - index * length, 0), min(last - index * length, length)
            if start < end:
                yield chunk * length + start, chunk * length + end
