"""Keys and values between the groups of ranks that share a pack (`parallel.context_parallel_size`).

A rank has the queries of its group's two chunks, and needs the keys of their documents from the beginning, or as far as
a window reaches back:

```
chunks        │   0   │   1   │   2   │   3   │
documents     │ A         │ B             │ C │
group 0       │ q k   │   ····│·······│ q k   │      B's keys come from group 1, for the queries of chunk 3
group 1       │·······│ q k   │ q k   │              A's from group 0, for those of chunk 1
```

Who needs what follows from the documents alone, so that nothing is asked for. Gradients of keys and values return the
same way and are added where they came from. The keys that a rank knows lie in one tensor in the pack's order, and the
attention reads them there: one kernel call for both chunks if their keys lie apart, else one for each.

Legend: T tokens of a pack with padding, L tokens of a chunk, H query and K key/value heads of a rank inside attention,
E head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl_ext.attention.kernels import KernelOptions
from verl_ext.attention.layout import DocumentLayout, SequenceShards, pieces


@dataclass(frozen=True)
class ContextGroups:
    """The ranks that share a pack, as an engine has them.

    Attributes:
        shards: which tokens each holds.
        inside: ranks of this rank's group, between which heads travel.
        across: this rank and those at its place in other groups, between which keys and values travel.
    """

    shards: SequenceShards
    inside: dist.ProcessGroup
    across: dist.ProcessGroup


class KernelCall(NamedTuple):
    """Queries of this rank, the known keys that they see, and where the documents of both lie."""

    queries: slice
    keys: slice
    layout: DocumentLayout


@dataclass(frozen=True)
class KeyExchange:
    """What a layer exchanges and computes; rows are those of the 2·L tokens that this rank has of its heads.

    Attributes:
        send: rows for other groups, in their order; send_sizes: how many for each.
        receive_sizes: how many come from each group.
        known: keys that this rank has in the end, in the pack's order.
        own, received: where its own rows lie among these, by chunk, and those of other groups, in the order they come.
        calls: one or two, whose queries are all of this rank's.
        is_silent: whether no group needs anything of another.
    """

    send: tuple[slice, ...]
    send_sizes: list[int]
    receive_sizes: list[int]
    known: int
    own: tuple[slice, ...]
    received: tuple[slice, ...]
    calls: tuple[KernelCall, ...]
    is_silent: bool

    def __post_init__(self) -> None:
        end = 0
        for call in self.calls:
            assert call.queries.start == end, "calls follow each other"
            assert call.layout.offsets[-1] == _size(call.queries)
            assert call.layout.keys.offsets[-1] == _size(call.keys)
            end = call.queries.stop
        assert end == sum(map(_size, self.own)), "each query is in one call"

    @classmethod
    def of(cls, offsets: Sequence[int], shards: SequenceShards, window: int | None, device: Any) -> "KeyExchange":
        """For documents [offsets[d], offsets[d + 1]) that end at T, and layers of this window or of none."""
        length = offsets[-1] // len(shards.chunks)
        runs = [Run(chunk * length, (chunk + 1) * length) for chunk in shards.chunks]
        held = [runs[2 * group : 2 * group + 2] for group in range(shards.context)]
        needs = [_needed(offsets, own, runs, window) for own in held]
        sent = [[need for own in held[shards.group] for need in needed if need.end == own.end] for needed in needs]
        come = [[need for other in others for need in needs[shards.group] if need.end == other.end] for others in held]
        mine = held[shards.group]
        known = sorted([*mine, *needs[shards.group]])
        return cls(
            send=tuple(_rows(mine, run) for run in chain(*sent)),
            send_sizes=[_tokens(part) for part in sent],
            receive_sizes=[_tokens(part) for part in come],
            known=_tokens(known),
            own=tuple(_rows(known, run) for run in mine),
            received=tuple(_rows(known, run) for run in chain(*come)),
            calls=_calls(offsets, mine, known, window, device),
            is_silent=not any(needs),
        )


class Run(NamedTuple):
    """Tokens [start, end) of a pack."""

    start: int
    end: int


def _tokens(runs: Sequence[Run]) -> int:
    return sum(run.end - run.start for run in runs)


def _rows(runs: Sequence[Run], part: Run) -> slice:
    """Where a part of the pack lies among runs that are stored one after the other."""
    before = 0
    for run in runs:
        if run.start <= part.start < run.end:
            return slice(before + part.start - run.start, before + part.end - run.start)
        before += run.end - run.start
    raise AssertionError(f"{part} is in none of {runs}")


def _first_key(offsets: Sequence[int], first: int, window: int | None) -> int:
    """The earliest token that the token `first` sees."""
    document, _, _ = next(pieces(offsets, first, first + 1))
    return offsets[document] if window is None else max(offsets[document], first - window + 1)


def _needed(offsets: Sequence[int], own: Sequence[Run], runs: Sequence[Run], window: int | None) -> list[Run]:
    """What the queries of a group's own chunks see of all others, each chunk to its end."""
    first = {query: _first_key(offsets, query.start, window) for query in own}
    needed = []
    for run in runs:
        seen_by = [query for query in own if first[query] < run.end <= query.start]
        if run not in own and seen_by:
            needed.append(Run(max(run.start, min(first[query] for query in seen_by)), run.end))
    return needed


def _calls(
    offsets: Sequence[int], own: Sequence[Run], known: Sequence[Run], window: int | None, device: Any
) -> tuple[KernelCall, ...]:
    """A call for each chunk, or one for all where their keys follow each other and nothing is seen twice."""
    keys = [Run(_first_key(offsets, run.start, window), run.end) for run in own]
    lengths = [_lengths(offsets, run, key.start) for run, key in zip(own, keys, strict=True)]
    if keys[0].end <= keys[1].start:
        queries, seen = ([*early, *late] for early, late in zip(*lengths, strict=True))
        layout = DocumentLayout.of(queries, device, seen)
        return (KernelCall(slice(0, _tokens(own)), slice(0, _tokens(known)), layout),)
    return tuple(
        KernelCall(_rows(own, run), _rows(known, key), DocumentLayout.of(queries, device, seen))
        for run, key, (queries, seen) in zip(own, keys, lengths, strict=True)
    )


def _lengths(offsets: Sequence[int], run: Run, first_key: int) -> tuple[list[int], list[int]]:
    """How many queries, and how many keys from ``first_key`` on, each document has in a run."""
    found = list(pieces(offsets, *run))
    queries = [end - start for _, start, end in found]
    return queries, [end - max(offsets[document], first_key) for document, _, end in found]


@dataclass(frozen=True)
class ContextLayout(DocumentLayout):
    """Document boundaries of a whole pack whose keys and values travel between groups of ranks."""

    groups: ContextGroups = field(kw_only=True)
    exchanges: dict[int | None, KeyExchange] = field(default_factory=dict, repr=False)  # by window, as layers ask

    @classmethod
    def shared(cls, layout: DocumentLayout, groups: ContextGroups) -> "ContextLayout":
        """The layout of all T tokens, padding included, for the ranks that share them."""
        return cls(layout.offsets, layout.cu_seqlens, layout.max_length, groups=groups)

    def exchange(self, window: int | None) -> KeyExchange:
        """What layers of a window exchange, worked out on the host for the first of them."""
        if window not in self.exchanges:
            device = self.cu_seqlens.device
            self.exchanges[window] = KeyExchange.of(self.offsets, self.groups.shards, window, device)
        return self.exchanges[window]

    def attend(
        self,
        kernel: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: KernelOptions,
    ) -> torch.Tensor:
        """``[2·L, H, E]`` of a kernel for this rank's queries, keys and values ``[2·L, heads, ·]``."""
        exchange = self.exchange(options.window)
        if exchange.is_silent:  # its own rows are all that it knows
            seen = [x[call.keys] for call in exchange.calls for x in (key, value)]
        else:
            seen = [*_Gather.apply(key, value, exchange, self.groups.across)]
        outputs = [
            call.layout.attend(kernel, query[call.queries], keys, values, options)
            for call, keys, values in zip(exchange.calls, seen[::2], seen[1::2], strict=True)
        ]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


class _Gather(torch.autograd.Function):
    """Keys and values ``[known part, K, E]`` of each kernel call, from this rank's ``[2·L, K, E]``."""

    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor, exchange: KeyExchange, across: dist.ProcessGroup
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.across, ctx.sizes = exchange, across, (key.size(-1), value.size(-1))
        own = torch.cat([key, value], dim=-1)
        rows = [own[part] for part in exchange.send]
        received = _all_to_all(rows, own, exchange.send_sizes, exchange.receive_sizes, across)
        known = own.new_empty(exchange.known, *own.shape[1:])
        for place, part in zip(exchange.own, own.chunk(2), strict=True):
            known[place] = part
        for place, part in zip(exchange.received, received.split([*map(_size, exchange.received)]), strict=True):
            known[place] = part
        return tuple(part for call in exchange.calls for part in known[call.keys].split(ctx.sizes, dim=-1))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        exchange: KeyExchange = ctx.exchange
        known = grad_outputs[0].new_zeros(exchange.known, grad_outputs[0].size(1), sum(ctx.sizes))
        grads = iter(grad_outputs)
        for call in exchange.calls:
            for part in known[call.keys].split(ctx.sizes, dim=-1):
                part += next(grads)
        rows = [known[place] for place in exchange.received]
        returned = _all_to_all(rows, known, exchange.receive_sizes, exchange.send_sizes, ctx.across)
        # A group's share is rounded once, the sum over groups is not rounded in between.
        total = torch.cat([known[place] for place in exchange.own]).to(torch.promote_types(known.dtype, torch.float32))
        for place, part in zip(exchange.send, returned.split([*map(_size, exchange.send)]), strict=True):
            total[place] += part
        key, value = total.to(known.dtype).split(ctx.sizes, dim=-1)
        return key, value, None, None


def _all_to_all(
    rows: Sequence[torch.Tensor], like: torch.Tensor, send: list[int], receive: list[int], across: dist.ProcessGroup
) -> torch.Tensor:
    """The rows ``[sum(receive), …]`` that come from each rank, for those that go to each."""
    received = like.new_empty(sum(receive), *like.shape[1:])
    dist.all_to_all_single(received, torch.cat([like[:0], *rows]), receive, send, group=across)
    return received


def _size(place: slice) -> int:
    return place.stop - place.start
