"""A model of the memory that PyTorch's caching allocator reserves.

Block sizes are rounded up to 512 bytes. Each stream has two pools, one for blocks of up to 1 MiB and one for larger
blocks. A pool hands out its smallest free block that is large enough, splits it, and joins neighbours that are free. If
no free block is large enough, it reserves more memory:

- with segments of fixed size, a new segment of 2 MiB (small blocks), 20 MiB (blocks below 10 MiB), or the block's own
  size rounded up to 2 MiB;
- with expandable segments, as many pages of 2 MiB (small blocks) or 20 MiB as its only segment must grow by.

This follows ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.13 with default options. Two things are not modelled: a
full GPU gives cached memory back, at the cost of time, and ``record_stream`` delays the reuse of blocks.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

_MIB = 2**20
_BLOCK, _SMALL = 512, _MIB

# A name for a block, its bytes, and its stream. Zero bytes free the block.
Event = tuple[Hashable, int, Hashable]


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(eq=False)
class _Pool:
    """A stream's free blocks of one kind of size, by address.

    Attributes:
        page: bytes that an expandable segment grows by.
        by_size: (bytes, start) of the free blocks, sorted.
        size_at: bytes of the free block that starts at an address.
        start_of: start of the free block that ends at an address.
        end: address behind the last segment.
    """

    page: int
    by_size: list[tuple[int, int]] = field(default_factory=list)
    size_at: dict[int, int] = field(default_factory=dict)
    start_of: dict[int, int] = field(default_factory=dict)
    end: int = 0

    def add(self, start: int, size: int) -> None:
        """Add a free block, joined with the free blocks beside it."""
        if (before := self.start_of.get(start)) is not None:
            size += self.remove(before)
            start = before
        if start + size in self.size_at:
            size += self.remove(start + size)
        insort(self.by_size, (size, start))
        self.size_at[start], self.start_of[start + size] = size, start

    def remove(self, start: int) -> int:
        """Remove the free block at an address; return its bytes."""
        size = self.size_at.pop(start)
        del self.start_of[start + size], self.by_size[bisect_left(self.by_size, (size, start))]
        return size


class CachingAllocator:
    """The blocks of one GPU.

    Attributes:
        live: bytes of the blocks in use, in multiples of 512 bytes.
        reserved: bytes of all segments. No segment is ever given back.
    """

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.live = self.reserved = 0
        self._used: dict[Hashable, tuple[_Pool, int, int, int]] = {}  # pool, start, bytes, requested bytes
        self._pools: dict[tuple[Hashable, bool], _Pool] = {}

    def play(self, events: Iterable[Event]) -> None:
        """Allocate and free blocks; ignore frees of unallocated ones."""
        for name, size, stream in events:
            if name in self._used:
                self.free(name)
            if size:
                self.allocate(name, size, stream)

    def allocate(self, name: Hashable, size: int, stream: Hashable = None) -> None:
        """Take a block of at least one byte."""
        size = _rounded(size, _BLOCK)
        small = size <= _SMALL
        pool = self._pools.setdefault((stream, small), _Pool((2 if small else 20) * _MIB))
        if not pool.by_size or pool.by_size[-1][0] < size:
            self._reserve(pool, size)
        _, start = pool.by_size[bisect_left(pool.by_size, (size, 0))]
        found = pool.remove(start)
        left = found - size
        if left >= _BLOCK if small or self.expandable else left > _SMALL:
            pool.add(start + size, left)
            found = size
        self._used[name] = pool, start, found, size
        self.live += size

    def free(self, name: Hashable) -> None:
        """Return a block to its pool."""
        pool, start, size, asked = self._used.pop(name)
        self.live -= asked
        pool.add(start, size)

    @property
    def layout(self) -> Hashable:
        """All that decides where blocks go from now on."""
        free = frozenset((key, tuple(pool.by_size)) for key, pool in self._pools.items())
        return self.reserved, free, frozenset((name, *place[1:]) for name, place in self._used.items())

    def _reserve(self, pool: _Pool, size: int) -> None:
        """Reserve memory so that a block of this size is free."""
        if self.expandable:
            tail = pool.start_of.get(pool.end, pool.end)  # where the free end of the segment begins
            new = _rounded(size - (pool.end - tail), pool.page)
        else:
            new = pool.page if size < 10 * _MIB else _rounded(size, 2 * _MIB)
            pool.end += _BLOCK  # a gap, so that blocks of two segments are never joined
        self.reserved += new
        pool.add(pool.end, new)
        pool.end += new


def reserved(standing: Sequence[Event], steps: Sequence[Sequence[Event]], expandable: bool) -> int:
    """Return the bytes reserved after the standing allocations and all steps.

    A step may occur several times. Blocks that it leaves allocated are freed at its end. A step that left the blocks as
    it found them is not played again until another step has changed them.
    """
    allocator = CachingAllocator(expandable)
    allocator.play(standing)
    layout, settled = allocator.layout, set[int]()
    for step in steps:
        if id(step) in settled:
            continue
        allocator.play(step)
        allocator.play((name, 0, None) for name in {name for name, size, _ in step if size})
        before, layout = layout, allocator.layout
        settled = settled | {id(step)} if layout == before else set()
    return allocator.reserved
