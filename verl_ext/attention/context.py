"""Keys and values between the groups of ranks that share a pack (`parallel.context_parallel_size`).

A rank has the queries of its group's two chunks. It needs the keys of their documents from the beginning, or from as
far back as a window reaches:

```
chunks        │   0   │   1   │   2   │   3   │
documents     │ A         │ B             │ C │
group 0       │ q k   │   ····│·······│ q k   │      B's keys come from group 1, for the queries of chunk 3
group 1       │·······│ q k   │ q k   │              A's from group 0, for those of chunk 1
```

The documents alone decide which rank needs which keys, so no rank has to ask. Gradients of keys and values return the
same way and are added on the rank that they came from. The keys that a rank knows lie in one tensor, in the order of
the pack, and attention reads them there: one kernel call for both chunks if their keys lie apart, else one for each.

Legend: T tokens of a pack with padding, L tokens of a chunk, H query and K key/value heads of a rank inside attention,
E head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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
    """One call of a kernel: queries of this rank, the known keys that they see, and the documents of both."""

    queries: slice
    keys: slice
    layout: DocumentLayout


@dataclass(frozen=True)
class KeyExchange:
    """The exchange and the kernel calls of a layer; rows are the 2·L tokens that this rank has of its heads.

    Attributes:
        send: the rows for other groups, in the order of the groups; send_sizes: the number for each group.
        receive_sizes: the number of rows that come from each group.
        known: the number of keys that this rank has in the end, in the pack's order.
        own: the places of this rank's own rows among the known keys, by chunk.
        received: the places of the rows of other groups among the known keys, in the order of their arrival.
        calls: one or two kernel calls, which share out all queries of this rank.
        needs_no_exchange: whether no group needs a key of another.
    """

    send: tuple[slice, ...]
    send_sizes: list[int]
    receive_sizes: list[int]
    known: int
    own: tuple[slice, ...]
    received: tuple[slice, ...]
    calls: tuple[KernelCall, ...]
    needs_no_exchange: bool

    def __post_init__(self) -> None:
        end = 0
        for call in self.calls:
            assert call.queries.start == end, "calls follow each other"
            assert call.layout.offsets[-1] == _size(call.queries)
            assert call.layout.keys.offsets[-1] == _size(call.keys)
            end = call.queries.stop
        assert end == sum(map(_size, self.own)), "each query is in one call"

    @classmethod
    def from_offsets(
        cls, offsets: Sequence[int], shards: SequenceShards, window: int | None, device: Any
    ) -> "KeyExchange":
        """Work out the exchange for documents [offsets[d], offsets[d + 1]) that end at T, and layers of a window."""
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
            needs_no_exchange=not any(needs),
        )


class Run(NamedTuple):
    """The tokens [start, end) of a pack."""

    start: int
    end: int


def _tokens(runs: Sequence[Run]) -> int:
    return sum(run.end - run.start for run in runs)


def _rows(runs: Sequence[Run], part: Run) -> slice:
    """Return the place of a part of the pack among runs that are stored one after the other."""
    before = 0
    for run in runs:
        if run.start <= part.start < run.end:
            return slice(before + part.start - run.start, before + part.end - run.start)
        before += run.end - run.start
    raise AssertionError(f"{part} is in none of {runs}")


def _first_key(offsets: Sequence[int], first: int, window: int | None) -> int:
    """Return the earliest token that the token `first` sees."""
    document, _, _ = next(pieces(offsets, first, first + 1))
    return offsets[document] if window is None else max(offsets[document], first - window + 1)


def _needed(offsets: Sequence[int], own: Sequence[Run], runs: Sequence[Run], window: int | None) -> list[Run]:
    """Return the parts of other chunks that the queries of a group's own chunks see, each up to its chunk's end."""
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
    """Return one call if the keys of both chunks lie apart, so that no key is seen twice; else a call for each."""
    keys = [Run(_first_key(offsets, run.start, window), run.end) for run in own]
    lengths = [_lengths(offsets, run, key.start) for run, key in zip(own, keys, strict=True)]
    if keys[0].end <= keys[1].start:
        queries, seen = ([*early, *late] for early, late in zip(*lengths, strict=True))
        layout = DocumentLayout.from_lengths(queries, device, seen)
        return (KernelCall(slice(0, _tokens(own)), slice(0, _tokens(known)), layout),)
    return tuple(
        KernelCall(_rows(own, run), _rows(known, key), DocumentLayout.from_lengths(queries, device, seen))
        for run, key, (queries, seen) in zip(own, keys, lengths, strict=True)
    )


def _lengths(offsets: Sequence[int], run: Run, first_key: int) -> tuple[list[int], list[int]]:
    """Return the number of queries, and of keys from ``first_key`` on, that each document has in a run."""
    found = list(pieces(offsets, *run))
    queries = [end - start for _, start, end in found]
    return queries, [end - max(offsets[document], first_key) for document, _, end in found]


@dataclass(frozen=True)
class ContextLayout(DocumentLayout):
    """The document boundaries of a whole pack whose keys and values travel between groups of ranks."""

    groups: ContextGroups = field(kw_only=True)
    exchanges: dict[int | None, KeyExchange] = field(default_factory=dict, repr=False)  # by window, as layers ask

    @classmethod
    def from_layout(cls, layout: DocumentLayout, groups: ContextGroups) -> "ContextLayout":
        """Share the layout of all T tokens, padding included, among groups of ranks."""
        return cls(layout.offsets, layout.cu_seqlens, layout.max_length, groups=groups)

    def exchange(self, window: int | None) -> KeyExchange:
        """Return the exchange of layers with this window, worked out on the host for the first of them."""
        if window not in self.exchanges:
            device = self.cu_seqlens.device
            self.exchanges[window] = KeyExchange.from_offsets(self.offsets, self.groups.shards, window, device)
        return self.exchanges[window]

    def _calls(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any) -> list[tuple]:
        """Return the calls for this rank's rows ``[2·L, heads, ·]``, with the keys and values of other groups."""
        exchange = self.exchange(options.window)
        if exchange.needs_no_exchange:  # this rank knows its own rows alone
            seen = [x[call.keys] for call in exchange.calls for x in (key, value)]
        else:
            seen = [*_Gather.apply(key, value, exchange, self.groups.across)]
        return [
            (call.layout, query[call.queries], keys, values)
            for call, keys, values in zip(exchange.calls, seen[::2], seen[1::2], strict=True)
        ]


class _Gather(torch.autograd.Function):
    """The exchange of keys and values: ``[known part, K, E]`` of each kernel call, from this rank's ``[2·L, K, E]``."""

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
        # Each group's share is rounded once. Their sum is not rounded in between.
        total = torch.cat([known[place] for place in exchange.own]).to(torch.promote_types(known.dtype, torch.float32))
        for place, part in zip(exchange.send, returned.split([*map(_size, exchange.send)]), strict=True):
            total[place] += part
        key, value = total.to(known.dtype).split(ctx.sizes, dim=-1)
        return key, value, None, None


def _all_to_all(
    rows: Sequence[torch.Tensor], like: torch.Tensor, send: list[int], receive: list[int], across: dist.ProcessGroup
) -> torch.Tensor:
    """Send rows to each rank of the group, and return the rows ``[sum(receive), …]`` that come from each."""
    received = like.new_empty(sum(receive), *like.shape[1:])
    dist.all_to_all_single(received, torch.cat([like[:0], *rows]), receive, send, group=across)
    return received


def _size(place: slice) -> int:
    return place.stop - place.start
