"""The cache with which ``generate`` continues inside a chunk.

It holds the memory's state, and the chunk's keys and values. Rows of different lengths end their chunks at different
tokens. Each pass takes at most the rest of its chunk from every row, so that attention and memory need not know the
borders of other rows; rows with fewer chunks join later:

```
mask, C = 4          pass 1           pass 2             a token more
. a b c d e f        a b c d          e f                g
. . . . . h i        -                h i                j
```

Legend: B samples, T tokens, C tokens of a chunk, w tokens of a pass, s tokens of a sub-chunk, r tokens before a token
that its key, query and rates see, d hidden size.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F


class ChunkPart(NamedTuple):
    """The part of each row's chunk that a pass reads, right-padded."""

    is_written: torch.Tensor | None = None  # bool [B, w] without a cache: tokens that are not padding, None for all
    start: torch.Tensor | None = None  # int64 [B] with a cache: tokens of the chunk that were read before
    tokens: torch.Tensor | None = None  # int64 [B] with a cache: tokens of the pass that belong to the row
    top: int = 0  # the most tokens of a chunk after the pass
    is_resumed: bool = False  # whether a row has read a part of its chunk before
    keeps_keys: bool = False  # whether keys and values are needed after the pass


class MemoryStream:
    """A layer's memory between two passes, and hidden states not yet written.

    Without a cache, a pass ends with a sub-chunk, and only the r tokens that the next convolutions see are kept.
    """

    def __init__(self) -> None:
        self.state: torch.Tensor | None = None
        self.since: torch.Tensor | None = None  # [B, r + s, d], the r tokens before included; [B, r, d] uncached

    def __call__(self, memory: Any, hidden: torch.Tensor, place: ChunkPart) -> torch.Tensor:
        """Return the summand of ``hidden[B, w, d]``; write complete sub-chunks."""
        size, reach = memory.long_term_memory.options.sub_chunk, memory.long_term_memory.options.conv_tokens - 1
        cached = place.start is not None and place.tokens is not None
        if self.since is None:
            self.since = hidden.new_zeros(len(hidden), reach + size * cached, hidden.shape[-1])
        if place.start is None or place.tokens is None:
            recalled, self.state = memory(hidden, self.state, place.is_written, before=self.since)
            last = torch.cat([self.since, hidden[:, max(0, hidden.shape[1] - reach) :]], 1)
            self.since = last[:, last.shape[1] - reach :]
            return recalled
        first = place.start[:, None] % size
        whole = (first + place.tokens[:, None]) // size * size  # [B, 1] tokens after which a sub-chunk ends
        places = torch.arange(reach + size + hidden.shape[1], device=hidden.device)
        columns = first + places[: hidden.shape[1]]
        window = torch.cat([self.since, torch.zeros_like(hidden)], 1).scatter(1, _wide(reach + columns, hidden), hidden)
        self.since = window.gather(1, _wide((whole + places[: reach + size]).clamp(max=len(places) - 1), hidden))
        if not whole.any():
            before = window.gather(1, _wide(first + places[:reach], hidden))
            recalled, self.state = memory(hidden, self.state, None, write=False, before=before)
            return recalled
        before, window = window[:, :reach], window[:, reach:]
        recalled, self.state = memory(window, self.state, places[: len(places) - reach] < whole, before=before)
        return recalled.gather(1, _wide(columns, recalled))


class ChunkKeys:
    """The rows' chunk keys and values for a pass, as transformers' cache.

    A later pass of a row writes from the row's own place on, so no token ever sees padding of an earlier pass.
    """

    def __init__(self, stored: dict[int, list[torch.Tensor]], columns: torch.Tensor, top: int, resumes: bool) -> None:
        self._stored, self._columns, self._top, self._resumes = stored, columns, top, resumes

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        """Store ``[B, heads, w, size]``; return the chunk's keys and values."""
        if not self._resumes:
            self._stored[layer] = [key, value]
            return key, value
        whole = []
        for old, new in zip(self._stored[layer], (key, value), strict=True):
            old = F.pad(old[:, :, : self._top], (0, 0, 0, max(0, self._top - old.shape[2])))
            index = self._columns[:, None, :, None].expand_as(new)
            whole.append(old.scatter(2, index, new))
        self._stored[layer] = whole
        return whole


class StreamCache:
    """The place where each row stopped (``past_key_values``), within a chunk's size.

    It is not a tuple or dataclass, because FSDP2 casts tensors that it finds in arguments; a state must stay in fp32.
    """

    is_compileable = False  # transformers reads this

    def __init__(self, layers: Any) -> None:
        self.memories = {layer: MemoryStream() for layer in layers}
        self.keys: dict[int, list[torch.Tensor]] = {}  # by layer
        self.columns = 0  # columns of the texts so far, padding included
        self._places: torch.Tensor | None = None  # int64 [B] on the host: tokens of each row's chunk so far

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the columns read so far."""
        return self.columns

    def detach(self) -> None:
        """Detach the memories' states from the autograd graph."""
        for memory in self.memories.values():
            for name, tensor in vars(memory).items():
                setattr(memory, name, tensor if tensor is None else tensor.detach())

    def reorder_cache(self, rows: torch.Tensor) -> None:
        """Select rows of the cache, as beam search does."""
        for memory in self.memories.values():
            for name, tensor in vars(memory).items():
                setattr(memory, name, tensor if tensor is None else tensor[rows])
        self.keys = {layer: [tensor[rows] for tensor in pair] for layer, pair in self.keys.items()}
        assert self._places is not None
        self._places = self._places[rows.cpu()]

    def passes(
        self, mask: torch.Tensor, chunk_size: int, agree: Callable[[int], int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, ChunkPart]]:
        """Yield each pass: tokens before it ``[B]``, columns ``[B, w]``, part.

        The columns of ``mask[B, T]`` hold the tokens of the pass. ``agree`` returns the most passes of any rank,
        because each pass has collectives. The host waits for mask once.
        """
        order = (~mask).long().argsort(dim=1, stable=True)
        left = mask.sum(1).cpu()
        start = torch.zeros_like(left) if self._places is None else self._places
        needed = torch.where(left > 0, (start + left + chunk_size - 1) // chunk_size, 0)
        passes = max(1, int(needed.max()))
        if self.columns == 0 or mask.shape[1] > 1:
            passes = agree(passes)
        done = torch.zeros_like(left)
        for later in reversed(range(passes)):
            count = torch.where(needed > later, torch.minimum(chunk_size - start, left - done), 0)
            width, is_resumed = max(1, int(count.max())), bool(start.any())
            columns = done[:, None] + torch.arange(width)
            columns = order.gather(1, columns.clamp(max=mask.shape[1] - 1).to(mask.device))
            top = int(start.max()) + width
            place = ChunkPart(None, start.to(mask.device), count.to(mask.device), top, is_resumed, later == 0)
            yield done.to(mask.device), columns, place
            done, start = done + count, (start + count) % chunk_size
        self._places = start
        self.columns += mask.shape[1]


def _wide(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``[B, n]`` as an index of tokens into ``[B, …, d]``."""
    return index.unsqueeze(-1).expand(*index.shape, like.shape[-1])
