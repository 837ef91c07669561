"""The keys that travel between groups that share a pack.

A rank has the queries of its group's two chunks. It needs the keys of their documents from the beginning, or from as
far back as a window reaches:

```
chunks        │   0   │   1   │   2   │   3   │
documents     │ A         │ B             │ C │
group 0       │ q k   │   ····│·······│ q k   │      B's keys come from group 1, for the queries of chunk 3
group 1       │·······│ q k   │ q k   │              A's keys come from group 0, for the queries of chunk 1
```

Legend: T tokens of a pack with padding, L tokens of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from verl_ext.parallel.exchange import KnownRows, place_in, window_start
from verl_ext.parallel.shards import DocumentLayout, SequenceShards, TokenRange, pieces


class KernelCall(NamedTuple):
    """A kernel's call: queries, the known keys, the documents of both."""

    queries: slice
    keys: slice
    layout: DocumentLayout


@dataclass(frozen=True)
class KeyExchange:
    """The exchange and calls of a layer, for this rank's 2·L rows.

    Attributes:
        rows: this rank's rows and those that its queries see.
        calls: one or two kernel calls, which divide all queries of this rank.
    """

    rows: KnownRows
    calls: tuple[KernelCall, ...]

    def __post_init__(self) -> None:
        end = 0
        for call in self.calls:
            assert call.queries.start == end, "calls follow each other"
            end += call.layout.offsets[-1]
            assert call.queries.stop == end
            assert call.keys.stop - call.keys.start == call.layout.keys.offsets[-1]
        assert end == sum(span.tokens for span in self.rows.own), "each query is in one call"

    @classmethod
    def from_offsets(
        cls, offsets: Sequence[int], shards: SequenceShards, window: int | None, device: Any
    ) -> "KeyExchange":
        """Compute the exchange for documents that end at T, and `window`."""
        spans = SequenceShards(1, shards.context).spans_of_ranks(offsets[-1])  # of groups
        rows = KnownRows.from_spans(offsets, spans, shards.rank // shards.ulysses, window)
        return cls(rows, _calls(offsets, rows, window, device))


def _calls(offsets: Sequence[int], rows: KnownRows, window: int | None, device: Any) -> tuple[KernelCall, ...]:
    """Return one call if both chunks' keys are separate, else two."""
    keys = [TokenRange(window_start(offsets, chunk.start, window), chunk.end) for chunk in rows.own]
    documents = [list(pieces(offsets, *chunk)) for chunk in rows.own]
    queries = [[end - start for _, start, end in parts] for parts in documents]
    visible = [
        [end - max(offsets[d], key.start) for d, _, end in parts] for key, parts in zip(keys, documents, strict=True)
    ]
    if keys[0].end <= keys[1].start:
        layout = DocumentLayout.from_lengths([*chain(*queries)], device, [*chain(*visible)])
        return (KernelCall(slice(0, layout.offsets[-1]), slice(0, layout.keys.offsets[-1]), layout),)
    return tuple(
        KernelCall(place_in(rows.own, chunk), place_in(rows.ranges, key), DocumentLayout.from_lengths(q, device, k))
        for chunk, key, q, k in zip(rows.own, keys, queries, visible, strict=True)
    )


@dataclass(frozen=True)
class KeyParts:
    """The own and foreign keys of layers without a window.

    A rank's rows are a pack of their own, in which its tokens of a document are neighbours. Foreign keys of a document
    lie before all of the chunk that needs them, so that each of its queries sees each of them:

    ```
    chunks        │   0   │   1   │   2   │   3   │      one document, group 0
    own           │ q k   │       │       │ q k   │      causal, as if nothing lay between
    foreign       │       │     k │ k     │ q     │      all of the queries see all of the keys
    ```

    Attributes:
        own: the documents among this rank's rows.
        foreign: for each chunk in whose first document other groups have keys, the call with its queries.
    """

    own: DocumentLayout
    foreign: tuple[KernelCall, ...]

    @classmethod
    def from_rows(cls, rows: KnownRows, offsets: Sequence[int], device: Any) -> "KeyParts":
        """Split known keys into own and foreign ones, by document."""
        lengths: dict[int, int] = {}
        for document, start, end in chain(*(pieces(offsets, *chunk) for chunk in rows.own)):
            lengths[document] = lengths.get(document, 0) + end - start
        foreign = []
        for chunk in rows.own:
            document, start, end = next(pieces(offsets, *chunk))
            places = [place_in(rows.foreign, part) for part in rows.foreign if offsets[document] < part.end <= start]
            if places:
                queries, keys = place_in(rows.own, TokenRange(start, end)), slice(places[0].start, places[-1].stop)
                layout = DocumentLayout.from_lengths([end - start], device, [keys.stop - keys.start])
                foreign.append(KernelCall(queries, keys, layout))
        return cls(DocumentLayout.from_lengths([*lengths.values()], device), tuple(foreign))
