"""PyTorch's caching allocator on a GPU, as a model of sizes: the memory that it reserves for given allocations.

Blocks are rounded to 512 bytes and come from pools, two for each stream: up to 1 MiB, and above. A pool gives its
smallest free block that is large enough, splits it, and joins free neighbours again. Where it has none, it reserves:

- in segments of fixed size, a new one of 2 MiB (small blocks), 20 MiB (below 10 MiB), or the size in whole 2 MiB;
- with expandable segments, as many pages of 2 MiB (small blocks) or 20 MiB as its one segment needs to grow by.

As in ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.13 with its default options. Not modelled: that cached memory is
given back when a GPU is full, which costs time, and blocks that ``record_stream`` keeps from being used again.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

_MIB = 2**20
_BLOCK, _SMALL = 512, _MIB

# Bytes and stream of a block, by a name for it; no bytes free it.
Event = tuple[Hashable, int, Hashable]


@dataclass(eq=False)
class _Span:
    """A part of a segment, free or allocated, between its neighbours."""

    start: int
    size: int
    pool: "_Pool"
    before: "_Span | None" = None
    after: "_Span | None" = None
    free: bool = False


@dataclass(eq=False)
class _Pool:
    """The free blocks for one stream and kind of size; `end` is where its next segment begins."""

    page: int
    free: list[tuple[int, int]] = field(default_factory=list)  # of size and start, in order
    spans: dict[int, _Span] = field(default_factory=dict)  # the free ones by their start
    last: _Span | None = None
    end: int = 0

    def put(self, span: _Span) -> None:
        span.free = True
        insort(self.free, (span.size, span.start))
        self.spans[span.start] = span

    def take(self, span: _Span) -> None:
        span.free = False
        del self.free[bisect_left(self.free, (span.size, span.start))]
        del self.spans[span.start]


class CachingAllocator:
    """The blocks of one GPU.

    Attributes:
        live, reserved: bytes of blocks in use as they were asked for, in whole 512 bytes, and of all segments, none of
            which is given back.
    """

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.live = self.reserved = 0
        self._used: dict[Hashable, tuple[_Span, int]] = {}
        self._pools: dict[tuple[Hashable, bool], _Pool] = {}

    def play(self, events: Iterable[Event]) -> None:
        """Allocate and free; what is freed without having been allocated is passed over."""
        for name, size, stream in events:
            if name in self._used:
                self.free(name)
            if size:
                self.allocate(name, size, stream)

    def allocate(self, name: Hashable, size: int, stream: Hashable = None) -> None:
        """Take a block of so many bytes, above 0."""
        size = -(-size // _BLOCK) * _BLOCK
        small = size <= _SMALL
        pool = self._pools.setdefault((stream, small), _Pool((2 if small else 20) * _MIB))
        at = bisect_left(pool.free, (size, 0))
        span = pool.spans[pool.free[at][1]] if at < len(pool.free) else self._reserve(pool, size)
        pool.take(span)
        left = span.size - size
        if left >= _BLOCK if small or self.expandable else left > _SMALL:
            rest = _Span(span.start + size, left, pool, span, span.after)
            if span.after is not None:
                span.after.before = rest
            elif pool.last is span:
                pool.last = rest
            span.size, span.after = size, rest
            pool.put(rest)
        self._used[name] = span, size
        self.live += size

    def free(self, name: Hashable) -> None:
        """Give a block back to its pool."""
        span, size = self._used.pop(name)
        self.live -= size
        pool = span.pool
        if (before := span.before) is not None and before.free:
            pool.take(before)
            span = self._join(before, span)
        if (after := span.after) is not None and after.free:
            pool.take(after)
            span = self._join(span, after)
        pool.put(span)

    @staticmethod
    def _join(left: _Span, right: _Span) -> _Span:
        left.size, left.after = left.size + right.size, right.after
        if right.after is not None:
            right.after.before = left
        elif left.pool.last is right:
            left.pool.last = left
        return left

    def _reserve(self, pool: _Pool, size: int) -> _Span:
        """A free span that is large enough, of memory that was not reserved before."""
        if self.expandable:
            tail = pool.last if pool.last is not None and pool.last.free else None
            new = -(-(size - (tail.size if tail else 0)) // pool.page) * pool.page
            span = _Span(pool.end, new, pool, pool.last)
            if pool.last is not None:
                pool.last.after = span
            if tail is not None:
                pool.take(tail)
                span = self._join(tail, span)
            pool.last = span
        else:
            new = pool.page if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
            span = _Span(pool.end, new, pool)
        pool.end += new
        self.reserved += new
        pool.put(span)
        return span


def reserved(standing: Sequence[Event], steps: Sequence[Sequence[Event]], expandable: bool) -> int:
    """Bytes that are reserved after what stands before the steps and the steps themselves.

    A step may come several times; what it has not freed is freed at its end.
    """
    allocator = CachingAllocator(expandable)
    allocator.play(standing)
    for step in steps:
        allocator.play(step)
        allocator.play((name, 0, None) for name in {name for name, size, _ in step if size})
    return allocator.reserved
