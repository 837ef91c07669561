"""Attention to other groups' keys and values, by `parallel.context_parallel_size`.

Keys and values travel between groups (key_plan.py), and their gradients return the same way and are added on the rank
that they came from. A kernel that returns its log-sum-exp sees own keys while those of others travel:

```
forward     send keys ─► own keys ─► wait ─► foreign keys     out = Σ_i exp(lse_i - lse) out_i, lse = log Σ_i exp(lse_i)
backward    foreign keys ─► send gradients ─► own keys ─► wait   exact for each part, given out and lse (sinks.py)
```

For other kernels, and in layers with a window, which fetch little, all keys lie in one tensor, in the order of the
pack, before a kernel runs: one call for both chunks if their keys lie apart, else one for each.

Legend: T tokens of a pack with padding, L tokens of a chunk, H query and K key/value heads of a rank inside attention,
E head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl_ext.parallel.key_plan import KeyExchange, KeyParts, size
from verl_ext.parallel.shards import DocumentLayout, SequenceShards


class LseKernel(NamedTuple):
    """A kernel with its log-sum-exp, and a backward exact for more keys.

    Attributes:
        forward: returns ``out[T, H, E]`` and ``lse[H, T]`` for (query, key, value, layout, options), and tensors of its
            own; with ``causal=False`` a query sees all keys of its document.
        backward: returns the gradients of the three for (dout, query, key, value, out, lse, *tensors, layout, options).
    """

    forward: Callable[..., tuple[torch.Tensor, ...]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def share_of_sum(lse: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return ``[T, H, 1]``, the factor of ``lse[H, T]`` inside ``whole[H, T]``."""
    return (lse - whole).exp().t().unsqueeze(-1)


@dataclass(frozen=True)
class ContextGroups:
    """The ranks that share a pack, and their process groups.

    Attributes:
        shards: the tokens that each rank holds.
        inside: ranks of this rank's group, between which heads travel.
        across: this rank and those at its place in other groups, between which keys and values travel.
    """

    shards: SequenceShards
    inside: dist.ProcessGroup
    across: dist.ProcessGroup


@dataclass(frozen=True)
class ContextLayout(DocumentLayout):
    """A pack's document boundaries, whose keys travel between groups of ranks."""

    groups: ContextGroups = field(kw_only=True)
    exchanges: dict[int | None, KeyExchange] = field(default_factory=dict, repr=False)  # by window, as layers ask

    @classmethod
    def from_layout(cls, layout: DocumentLayout, groups: ContextGroups) -> "ContextLayout":
        """Share the layout of all T tokens among groups of ranks."""
        return cls(layout.offsets, layout.cu_seqlens, layout.max_length, groups=groups)

    def _like(self, layout: DocumentLayout) -> DocumentLayout:
        return ContextLayout.from_layout(layout, self.groups)

    def exchange(self, window: int | None) -> KeyExchange:
        """Return the exchange of layers with this window, computed once."""
        if window not in self.exchanges:
            device = self.cu_seqlens.device
            self.exchanges[window] = KeyExchange.from_offsets(self.offsets, self.groups.shards, window, device)
        return self.exchanges[window]

    def overlapped(self, kernel: LseKernel, options: Any) -> LseKernel | None:
        """Return a kernel that overlaps the exchange; None with little exchanged."""
        exchange = self.exchange(options.window)
        if options.window is not None or exchange.needs_no_exchange:
            return None
        both = _Overlapped(kernel, exchange, self._parts, self.groups.across)
        return LseKernel(both.forward, both.backward)

    @cached_property
    def _parts(self) -> KeyParts:
        return KeyParts.from_exchange(self.exchange(None), self.offsets, self.cu_seqlens.device)

    def _calls(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any) -> list[tuple]:
        """Return the calls for this rank's rows ``[2·L, heads, ·]``."""
        exchange = self.exchange(options.window)
        if exchange.needs_no_exchange:  # this rank knows its own rows alone
            seen = [x[call.keys] for call in exchange.calls for x in (key, value)]
        else:
            seen = [*_Gather.apply(key, value, exchange, self.groups.across)]
        return [
            (call.layout, query[call.queries], keys, values)
            for call, keys, values in zip(exchange.calls, seen[::2], seen[1::2], strict=True)
        ]


@dataclass(frozen=True)
class _Overlapped:
    """An :class:`LseKernel` that sees own keys while those of others travel."""

    kernel: LseKernel
    exchange: KeyExchange
    parts: KeyParts
    across: dist.ProcessGroup

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout, options: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return outputs, log-sum-exp, and the foreign keys beside their values."""
        exchange, widths = self.exchange, [key.size(-1), value.size(-1)]
        rows = torch.cat([_rows(x, exchange.send) for x in (key, value)], dim=-1)
        foreign, work = _start(rows, exchange.send_sizes, exchange.receive_sizes, self.across)
        output, lse = self.kernel.forward(query, key, value, self.parts.own, options)
        work.wait()
        foreign = _placed(torch.empty_like(foreign), self.parts.places, foreign)
        for call in self.parts.foreign:
            keys, values = foreign[call.keys].split(widths, dim=-1)
            at, queries = call.queries, query[call.queries]
            more, more_lse = self.kernel.forward(queries, keys, values, call.layout, options, causal=False)
            whole = torch.logaddexp(lse[:, at], more_lse)
            output[at] = (output[at] * share_of_sum(lse[:, at], whole)).addcmul_(more, share_of_sum(more_lse, whole))
            lse[:, at] = whole
        return output, lse, foreign

    def backward(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return this rank's gradients, other groups' queries included."""
        grad, query, key, value, output, lse, foreign, _, options = given
        exchange, widths = self.exchange, [key.size(-1), value.size(-1)]
        of_foreign, of_queries = torch.zeros_like(foreign), []
        for call in self.parts.foreign:
            at, (keys, values) = call.queries, foreign[call.keys].split(widths, dim=-1)
            seen = grad[at], query[at], keys, values, output[at], lse[:, at]
            dq, dk, dv = self.kernel.backward(*seen, call.layout, options, causal=False)
            of_foreign[call.keys] += torch.cat([dk, dv], dim=-1)
            of_queries.append(dq)
        of_foreign = _rows(of_foreign, self.parts.places)
        returned, work = _start(of_foreign, exchange.receive_sizes, exchange.send_sizes, self.across)
        dq, dk, dv = self.kernel.backward(grad, query, key, value, output, lse, self.parts.own, options)
        for call, more in zip(self.parts.foreign, of_queries, strict=True):
            dq[call.queries] += more
        work.wait()
        return dq, *_with_returned(torch.cat([dk, dv], dim=-1), returned, exchange).split(widths, dim=-1)


class _Gather(torch.autograd.Function):
    """Exchange own ``[2·L, K, E]`` for calls' ``[known part, K, E]``."""

    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor, exchange: KeyExchange, across: dist.ProcessGroup
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.across, ctx.widths = exchange, across, (key.size(-1), value.size(-1))
        own = torch.cat([key, value], dim=-1)
        received, work = _start(_rows(own, exchange.send), exchange.send_sizes, exchange.receive_sizes, across)
        known = _placed(own.new_empty(exchange.known, *own.shape[1:]), exchange.own, own)
        work.wait()
        _placed(known, exchange.received, received)
        return tuple(part for call in exchange.calls for part in known[call.keys].split(ctx.widths, dim=-1))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        exchange: KeyExchange = ctx.exchange
        known = grad_outputs[0].new_zeros(exchange.known, grad_outputs[0].size(1), sum(ctx.widths))
        grads = iter(grad_outputs)
        for call in exchange.calls:
            for part in known[call.keys].split(ctx.widths, dim=-1):
                part += next(grads)
        rows = _rows(known, exchange.received)
        returned, work = _start(rows, exchange.receive_sizes, exchange.send_sizes, ctx.across)
        work.wait()
        key, value = _with_returned(_rows(known, exchange.own), returned, exchange).split(ctx.widths, dim=-1)
        return key, value, None, None


def _rows(x: torch.Tensor, places: Sequence[slice]) -> torch.Tensor:
    """Return the rows of some places, one after the other."""
    return torch.cat([x[:0], *(x[place] for place in places)])


def _placed(x: torch.Tensor, places: Sequence[slice], rows: torch.Tensor) -> torch.Tensor:
    """Write rows to their places in ``x``, and return it."""
    for place, part in zip(places, rows.split([*map(size, places)]), strict=True):
        x[place] = part
    return x


def _with_returned(own: torch.Tensor, returned: torch.Tensor, exchange: KeyExchange) -> torch.Tensor:
    """Add the gradients that other groups return, rounding once."""
    total = own.to(torch.promote_types(own.dtype, torch.float32))
    for place, part in zip(exchange.send, returned.split([*map(size, exchange.send)]), strict=True):
        total[place] += part
    return total.to(own.dtype)


def _start(
    rows: torch.Tensor, send: list[int], receive: list[int], across: dist.ProcessGroup
) -> tuple[torch.Tensor, dist.Work]:
    """Send rows; return the arriving rows and the work to await."""
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    return received, dist.all_to_all_single(received, rows, receive, send, group=across, async_op=True)
