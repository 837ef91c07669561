"""Rows of tokens that travel between ranks, and who sends which.

All ranks know a pack's documents, so each computes the same routes on the host, and none has to ask:

```
pack        │ A A A A B B │ B B B C C · │
own         │ rank 0      │ rank 1      │
foreign               B B                    rank 1 sees two tokens before its own: rank 0 sends two rows
```
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single

from verl_ext.parallel.shards import TokenRange, pieces

Ranges = Sequence[TokenRange]

# Upstream: torch 2.12 deprecates its differentiable all_to_all_single. The successor, in torch's private module
# _functional_collectives, has a gradient from torch 2.13 on. To go when torch 2.13 is the oldest.
warnings.filterwarnings("ignore", r".*nn\.functional\.all_to_all_single is deprecated", FutureWarning)


def exchange_rows(
    rows: torch.Tensor, group: dist.ProcessGroup, send: list[int] | None = None, receive: list[int] | None = None
) -> torch.Tensor:
    """Send rows to ranks and return those that arrive; gradients travel back.

    ``rows[sum(send), …]`` become ``[sum(receive), …]``, both in the order of the ranks of ``group``. Without sizes, all
    ranks get equally many. A rank without rows takes part as well.
    """
    rows = rows.contiguous()
    received = torch.empty_like(rows) if receive is None else rows.new_empty(sum(receive), *rows.shape[1:])
    return all_to_all_single(received, rows, receive, send, group)


@dataclass(frozen=True)
class Route:
    """The parts of a pack that a rank sends and receives.

    Attributes:
        outgoing: parts of this rank's spans, in the order of the ranks that they go to.
        incoming: parts of other ranks' spans, in the order of the ranks that they come from.
        send_sizes, receive_sizes: the number of rows for and from each rank.
    """

    outgoing: Ranges
    incoming: Ranges
    send_sizes: list[int]
    receive_sizes: list[int]

    @classmethod
    def from_needs(cls, spans: Sequence[Ranges], needs: Sequence[Ranges], rank: int) -> "Route":
        """Send each rank the parts that it needs, each of one span.

        spans: those of each rank, in the order of its rows; needs: the parts that each rank needs.
        """
        outgoing = [_inside(spans[rank], parts) for parts in needs]
        incoming = [_inside(of_rank, needs[rank]) for of_rank in spans]
        sizes = ([sum(part.tokens for part in parts) for parts in of_ranks] for of_ranks in (outgoing, incoming))
        return cls([*chain(*outgoing)], [*chain(*incoming)], *sizes)

    @property
    def back(self) -> "Route":
        """The way back of what arrived."""
        return Route(self.incoming, self.outgoing, self.receive_sizes, self.send_sizes)

    def start(self, rows: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
        """Start an exchange without gradients: return arriving rows and the work."""
        send, receive = self.send_sizes, self.receive_sizes
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        return received, dist.all_to_all_single(received, rows, receive, send, group=group, async_op=True)


def _inside(spans: Ranges, parts: Ranges) -> list[TokenRange]:
    return [part for span in spans for part in parts if span.start <= part.start < span.end]


@dataclass(frozen=True)
class KnownRows:
    """A rank's own rows, and those of others that they see.

    Attributes:
        own: this rank's spans, in the order of its rows.
        foreign: the parts of other ranks' spans that its tokens see, in the order of these spans.
        route: the exchange that brings the foreign rows.
        is_complete: whether no rank needs a row of another.
    """

    own: Ranges
    foreign: Ranges
    route: Route
    is_complete: bool

    @classmethod
    def from_spans(cls, offsets: Sequence[int], spans: Sequence[Ranges], rank: int, window: int | None) -> "KnownRows":
        """Find what tokens see in their documents, `window` tokens at most."""
        needs = [_foreign(offsets, own, [*chain(*spans)], window) for own in spans]
        return cls(spans[rank], needs[rank], Route.from_needs(spans, needs, rank), not any(needs))

    @property
    def ranges(self) -> list[TokenRange]:
        """What the known rows hold, in the pack's order."""
        return sorted([*self.own, *self.foreign])

    def gathered(self, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the known rows, in the pack's order, from own ``[L, …]``."""
        if self.is_complete:
            return rows
        rows, leaving = _OwnAndOutgoing.apply(rows, self.own, self.route.outgoing)
        received = exchange_rows(leaving, group, self.route.send_sizes, self.route.receive_sizes)
        del leaving
        parts = by_range(rows, self.own) | by_range(received, self.route.incoming)
        # The empty part is for a rank that receives nothing: its backward must join the exchange of gradients.
        return torch.cat([*(parts[part] for part in self.ranges), received[:0]])


class _OwnAndOutgoing(torch.autograd.Function):
    """Own rows beside those that leave, whose gradients are added in fp32."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, spans: Ranges, outgoing: Ranges) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.spans, ctx.outgoing = spans, outgoing
        return rows.view_as(rows), parts_of(rows, spans, outgoing)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        own, returned = grad_outputs
        return with_returned(own, returned, ctx.spans, ctx.outgoing, copy=True), None, None


def with_returned(own: torch.Tensor, returned: torch.Tensor, spans: Ranges, parts: Ranges, copy: bool) -> torch.Tensor:
    """Add gradients that other ranks return to own ones, rounding once."""
    total = own.to(torch.promote_types(own.dtype, torch.float32), copy=copy)
    for part, rows in zip(parts, returned.split([part.tokens for part in parts]), strict=True):
        total[place_in(spans, part)] += rows
    return total.to(own.dtype)


def _foreign(offsets: Sequence[int], own: Ranges, spans: Ranges, window: int | None) -> list[TokenRange]:
    """Return the ends of others' spans that own tokens see."""
    first = {query: window_start(offsets, query.start, window) for query in own}
    parts = []
    for span in spans:
        starts = [first[query] for query in own if first[query] < span.end <= query.start]
        if starts and span not in own:
            parts.append(TokenRange(max(span.start, min(starts)), span.end))
    return parts


def window_start(offsets: Sequence[int], token: int, window: int | None) -> int:
    """Return the earliest token of its document that a token sees."""
    document, _, _ = next(pieces(offsets, token, token + 1))
    return offsets[document] if window is None else max(offsets[document], token - window + 1)


def place_in(ranges: Ranges, part: TokenRange) -> slice:
    """Return the place of a part among the rows of ranges."""
    before = 0
    for run in ranges:
        if run.start <= part.start < run.end:
            return slice(before + part.start - run.start, before + part.end - run.start)
        before += run.tokens
    raise AssertionError(f"{part} is in none of {ranges}")


def parts_of(rows: torch.Tensor, ranges: Ranges, parts: Ranges) -> torch.Tensor:
    """Return the rows of parts of ranges, part after part."""
    return torch.cat([rows[place_in(ranges, part)] for part in parts] or [rows[:0]])


def by_range(rows: torch.Tensor, ranges: Ranges) -> dict[TokenRange, torch.Tensor]:
    """Split rows by the ranges that they hold."""
    return dict(zip(ranges, rows.split([part.tokens for part in ranges]), strict=True))
