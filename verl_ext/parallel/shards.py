"""The boundaries of documents, and the tokens' places on ranks.

The ranks are `parallel.context_parallel_size` groups of `engine.ulysses_sequence_parallel_size` neighbours. Causal
attention costs more for later tokens of a document, so each group holds an early and a late chunk of the pack.

```
pack      │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6 │ 7 │           8 chunks for 4 groups
group     │ 0   7 │ 1   6 │ 2   5 │ 3   4 │           order of the ranks
rank      │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6 │ 7 │           here 2 ranks a group
```

A single group holds the pack in its own order, one slice per rank.
"""

import math
from bisect import bisect_right
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from verl_ext.options import Options, option

ValueT = TypeVar("ValueT")
KernelFunction = Callable[..., torch.Tensor]  # attention of (query, key, value, layout, options)


@dataclass(frozen=True)
class ParallelOptions(Options):
    """The options of ranks that share packs or experts, beside verl's `engine.ulysses_sequence_parallel_size`."""

    prefix: ClassVar[str] = "parallel"

    context_parallel_size: int = option(
        1,
        "groups of `engine.ulysses_sequence_parallel_size` ranks that share a pack and exchange keys and values",
        least=1,
    )
    expert_parallel: int = option(
        1, "ranks that share the experts of each layer, to which rows of tokens travel; 1: each gathers all", least=1
    )


@dataclass(frozen=True)
class DocumentLayout:
    """A flattened micro-batch's document boundaries, computed once on the host."""

    offsets: tuple[int, ...]  # D + 1 host integers from 0 to T; document d is [offsets[d], offsets[d + 1])
    cu_seqlens: torch.Tensor  # int32[D + 1], the same on the device of the attention
    max_length: int  # tokens of the longest document
    longer_keys: "DocumentLayout | None" = None  # of the keys, if documents have more keys than queries
    # What layers ask for, made once. FSDP2 copies a layout for each of its units, and a dict in it; not a UserDict.
    cache: UserDict[Any, Any] = field(default_factory=UserDict, repr=False, compare=False)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: Any, keys: Sequence[int] | None = None) -> "DocumentLayout":
        """Lay out documents of these lengths, with `keys` where theirs differ."""
        offsets = (0, *accumulate(lengths))
        cu_seqlens = pinned(torch.tensor(offsets, dtype=torch.int32), device).to(device, non_blocking=True)
        longer = None if keys is None or list(keys) == list(lengths) else cls.from_lengths(keys, device)
        return cls(offsets, cu_seqlens, max(lengths), longer)

    @property
    def lengths(self) -> list[int]:
        """The tokens of each document."""
        return [end - start for start, end in pairwise(self.offsets)]

    @property
    def keys(self) -> "DocumentLayout":
        """The layout of the keys; queries are each document's last."""
        return self.longer_keys or self

    def positions(self) -> torch.Tensor:
        """Return int64[T] on the host, each token's position in its document."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    def attend(
        self, kernel: KernelFunction, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any
    ) -> torch.Tensor:
        """Return a kernel's ``[T, H, E]`` for this rank's rows.

        The rows are ``query[T, H, ·]``, ``key[S, K, ·]`` and ``value[S, K, E]``. Documents must cover all rows of a
        call: a flash kernel leaves other rows as they were in memory.
        """
        outputs = []
        for layout, q, k, v in self._calls(query, key, value, options):
            assert (len(q), len(k), len(v)) == (layout.offsets[-1], *[layout.keys.offsets[-1]] * 2)
            outputs.append(kernel(q, k, v, layout, options))
            assert outputs[-1].shape == (*q.shape[:2], v.size(-1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _calls(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any) -> list[tuple]:
        """Return each kernel call's layout, queries, keys and values."""
        return [(self, query, key, value)]

    def in_chunks(self, size: int) -> "DocumentLayout":
        """Cut documents into pseudo-documents of `size` tokens, as Llama 4 attends.

        ```
        documents   │ A A A A A │ B B B │        size 2   │ A A │ A A │ A │ B B │ B │
        ```
        """
        lengths = [min(size, end - at) for start, end in pairwise(self.offsets) for at in range(start, end, size)]
        chunks = (lengths, self.cu_seqlens.device)
        return self.derived(("chunks", size), lambda: replace(self, **vars(DocumentLayout.from_lengths(*chunks))))

    def derived(self, key: Hashable, make: Callable[[], ValueT]) -> ValueT:
        """Return a value that layers share, made for the first of them."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def padded(self, pad: int) -> "DocumentLayout":
        """Append ``pad`` tokens as one pseudo-document, for dividing T."""
        if pad == 0:
            return self
        offsets, longest = (*self.offsets, self.offsets[-1] + pad), max(self.max_length, pad)
        return DocumentLayout(offsets, F.pad(self.cu_seqlens, (0, 1), value=offsets[-1]), longest)


def document_layout(position_ids: torch.Tensor, device: torch.device | str = "cpu") -> DocumentLayout:
    """Read boundaries from host ``position_ids[T]``, 0 at each document's start.

    ```
    position_ids   0 1 2 | 0 1 2 3 | 0        offsets 0 3 7 8    max_length 4
    ```

    Raises ValueError if a document goes on elsewhere, as one with shared tokens does (verl_ext.parallel.trees).
    """
    assert position_ids.dim() == 1
    assert position_ids.device.type == "cpu"
    assert int(position_ids[0]) == 0, "a micro-batch begins with a document's first token"
    starts = (position_ids == 0).nonzero().flatten()
    if int((position_ids.diff() != 1).sum()) >= len(starts):
        raise ValueError(
            "position_ids must restart at 0 in every document of a batch, or the batch say that its documents share "
            "tokens (data.share_prefixes); they jump elsewhere"
        )
    edges = torch.cat([starts, starts.new_tensor([position_ids.numel()])])
    return DocumentLayout.from_lengths(edges.diff().tolist(), device)


class TokenRange(NamedTuple):
    """The tokens [start, end) of a pack."""

    start: int
    end: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.end - self.start


def pieces(offsets: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield (d, start, end) of each document within tokens [first, last)."""
    d = bisect_right(offsets, first) - 1
    while d + 1 < len(offsets) and offsets[d] < last:
        yield d, max(offsets[d], first), min(offsets[d + 1], last)
        d += 1


def pinned(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Page-lock a small host tensor for CUDA, to copy without waiting."""
    return tensor.pin_memory() if tensor.device.type == "cpu" and torch.device(device).type == "cuda" else tensor


@dataclass(frozen=True)
class SequenceShards:
    """The ranks' shares of T tokens, padding included, and this rank's place.

    Attributes:
        ulysses: the ranks of a group, which are neighbours; context: the number of groups.
        rank: this rank among all of them, group · ulysses + its place in the group.
    """

    ulysses: int = 1
    context: int = 1
    rank: int = 0

    @property
    def ranks(self) -> int:
        """The number of ranks that share a pack."""
        return self.ulysses * self.context

    @property
    def multiple(self) -> int:
        """The number of which T must be a multiple."""
        return math.lcm(self.ranks, len(self.chunks))

    @property
    def chunks(self) -> tuple[int, ...]:
        """The pack's chunks in order of ranks, equally many a group."""
        if self.context == 1:
            return (0,)
        return tuple(chunk for group in range(self.context) for chunk in (group, 2 * self.context - 1 - group))

    def by_rank(self, values: torch.Tensor) -> torch.Tensor:
        """Put ``[T, …]`` of the pack in the order of the ranks."""
        if self.context == 1:
            return values
        chunks = values.chunk(len(self.chunks))
        return torch.cat([chunks[chunk] for chunk in self.chunks])

    def by_position(self, values: torch.Tensor) -> torch.Tensor:
        """Put ``[T, …]`` from the order of ranks into the pack's."""
        if self.context == 1:
            return values
        chunks = values.chunk(len(self.chunks))
        return torch.cat([chunks[self.chunks.index(chunk)] for chunk in range(len(chunks))])

    def slice(self, values: torch.Tensor) -> torch.Tensor:
        """Return the ``[T/n, …]`` that this rank holds of ``[T, …]``."""
        length = len(values) // self.ranks
        return self.by_rank(values)[self.rank * length : (self.rank + 1) * length]

    def spans_of_ranks(self, tokens: int) -> list[list[TokenRange]]:
        """Return the spans of every rank."""
        return [[*replace(self, rank=rank).spans(tokens)] for rank in range(self.ranks)]

    def spans(self, tokens: int) -> Iterator[TokenRange]:
        """Yield this rank's parts of the pack in order, at most two."""
        length, share = tokens // len(self.chunks), tokens // self.ranks
        first, last = self.rank * share, (self.rank + 1) * share
        for index, chunk in enumerate(self.chunks):
            start, end = max(first - index * length, 0), min(last - index * length, length)
            if start < end:
                yield TokenRange(chunk * length + start, chunk * length + end)
