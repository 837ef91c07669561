"""Attention to other groups' keys and values, by `parallel.context_parallel_size`.

Keys and values travel between groups (key_plan.py), and their gradients return the same way and are added on the rank
that they came from. A kernel that returns its log-sum-exp sees own keys while those of others travel:

```
forward     send keys ─► own keys ─► wait ─► foreign keys     out = Σ_i exp(lse_i - lse) out_i, lse = log Σ_i exp(lse_i)
backward    foreign keys ─► send gradients ─► own keys ─► wait   exact for each part, given out and lse (sinks.py)
```

For other kernels, and in layers with a window, which fetch little, all keys lie in one tensor, in the order of the
pack, before a kernel runs: one call for both chunks if their keys are separate, else one for each.

Legend: T tokens of a pack, L of a chunk, H query and K key/value heads of a rank inside attention, E head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl_ext.parallel.exchange import KnownRows, parts_of, with_returned
from verl_ext.parallel.key_plan import KeyExchange, KeyParts
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

    @classmethod
    def from_layout(cls, layout: DocumentLayout, groups: ContextGroups) -> "ContextLayout":
        """Share the layout of all T tokens among groups of ranks."""
        return cls(layout.offsets, layout.cu_seqlens, layout.max_length, groups=groups)

    def exchange(self, window: int | None) -> KeyExchange:
        """Return the exchange of layers with this window, computed once."""
        of_documents = (self.offsets, self.groups.shards, window, self.cu_seqlens.device)
        return self.derived(("keys", window), lambda: KeyExchange.from_offsets(*of_documents))

    def overlapped(self, kernel: LseKernel, options: Any) -> LseKernel | None:
        """Return a kernel that overlaps the exchange; None with little exchanged."""
        rows = self.exchange(options.window).rows
        if options.window is not None or rows.is_complete:
            return None
        parts = self.derived("parts", lambda: KeyParts.from_rows(rows, self.offsets, self.cu_seqlens.device))
        both = _Overlapped(kernel, rows, parts, self.groups.across)
        return LseKernel(both.forward, both.backward)

    def _calls(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any) -> list[tuple]:
        """Return the calls for this rank's rows ``[2·L, heads, ·]``."""
        exchange, widths = self.exchange(options.window), [key.size(-1), value.size(-1)]
        if not exchange.rows.is_complete:
            known = exchange.rows.gathered(torch.cat([key, value], dim=-1), self.groups.across)
            key, value = known.split(widths, dim=-1)
        return [(call.layout, query[call.queries], key[call.keys], value[call.keys]) for call in exchange.calls]


@dataclass(frozen=True)
class _Overlapped:
    """An :class:`LseKernel` that sees own keys while those of others travel."""

    kernel: LseKernel
    rows: KnownRows
    parts: KeyParts
    across: dist.ProcessGroup

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Return outputs, log-sum-exp, and the foreign keys beside their values."""
        query, key, value, _, options = inputs
        rows, route, widths = self.rows, self.rows.route, [key.size(-1), value.size(-1)]
        leaving = torch.cat([parts_of(x, rows.own, route.outgoing) for x in (key, value)], dim=-1)
        foreign, work = route.start(leaving, self.across)
        output, lse = self.kernel.forward(query, key, value, self.parts.own, options)
        work.wait()
        foreign = parts_of(foreign, route.incoming, rows.foreign)
        for call in self.parts.foreign:
            keys, values = foreign[call.keys].split(widths, dim=-1)
            at, queries = call.queries, query[call.queries]
            part, part_lse = self.kernel.forward(queries, keys, values, call.layout, options, causal=False)
            whole = torch.logaddexp(lse[:, at], part_lse)
            output[at] = (output[at] * share_of_sum(lse[:, at], whole)).addcmul_(part, share_of_sum(part_lse, whole))
            lse[:, at] = whole
        return output, lse, foreign

    def backward(self, *saved: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return this rank's gradients, other groups' queries included."""
        grad, query, key, value, output, lse, foreign, _, options = saved
        rows, route, widths = self.rows, self.rows.route, [key.size(-1), value.size(-1)]
        # Gradients of foreign keys come first: they travel while the kernel computes those of own keys.
        of_foreign, of_queries = torch.zeros_like(foreign), []
        for call in self.parts.foreign:
            at, (keys, values) = call.queries, foreign[call.keys].split(widths, dim=-1)
            inputs = grad[at], query[at], keys, values, output[at], lse[:, at]
            dq, dk, dv = self.kernel.backward(*inputs, call.layout, options, causal=False)
            of_foreign[call.keys] += torch.cat([dk, dv], dim=-1)
            of_queries.append(dq)
        of_foreign = parts_of(of_foreign, rows.foreign, route.incoming)
        returned, work = route.back.start(of_foreign, self.across)
        dq, dk, dv = self.kernel.backward(grad, query, key, value, output, lse, self.parts.own, options)
        for call, of_part in zip(self.parts.foreign, of_queries, strict=True):
            dq[call.queries] += of_part
        work.wait()
        own = torch.cat([dk, dv], dim=-1)
        return dq, *with_returned(own, returned, rows.own, route.outgoing, copy=False).split(widths, dim=-1)
