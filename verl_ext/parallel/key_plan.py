"""The keys that travel between groups that share a pack.

A rank has the queries of its group's two chunks. It needs the keys of their documents from the beginning, or from as
far back as a window reaches:

```
chunks        │   0   │   1   │   2   │   3   │
documents     │ A         │ B             │ C │
group 0       │ q k   │   ····│·······│ q k   │      B's keys come from group 1, for the queries of chunk 3
group 1       │·······│ q k   │ q k   │              A's keys come from group 0, for the queries of chunk 1
```

The documents alone decide which rank needs which keys, so no rank has to ask.

Legend: T tokens of a pack with padding, L tokens of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from verl_ext.parallel.shards import DocumentLayout, SequenceShards, pieces


class KernelCall(NamedTuple):
    """A kernel's call: queries, the known keys, the documents of both."""

    queries: slice
    keys: slice
    layout: DocumentLayout


@dataclass(frozen=True)
class KeyExchange:
    """The exchange and calls of a layer, for this rank's 2·L rows.

    Attributes:
        send: the rows for other groups, in the order of the groups; send_sizes: the number for each group.
        receive_sizes: the number of rows that come from each group.
        known: the number of keys that this rank has in the end, in the pack's order.
        own: the places of this rank's own rows among the known keys, by chunk.
        received: the places of the rows of other groups among the known keys, in the order of their arrival.
        calls: one or two kernel calls, which divide all queries of this rank.
        held: the chunks of this rank; needed: the parts of others that it needs, in the pack's order.
        arriving: the same parts in the order of their arrival.
        needs_no_exchange: whether no group needs a key of another.
    """

    send: tuple[slice, ...]
    send_sizes: list[int]
    receive_sizes: list[int]
    known: int
    own: tuple[slice, ...]
    received: tuple[slice, ...]
    calls: tuple[KernelCall, ...]
    held: tuple["TokenRange", ...]
    needed: tuple["TokenRange", ...]
    arriving: tuple["TokenRange", ...]
    needs_no_exchange: bool

    def __post_init__(self) -> None:
        end = 0
        for call in self.calls:
            assert call.queries.start == end, "calls follow each other"
            assert call.layout.offsets[-1] == size(call.queries)
            assert call.layout.keys.offsets[-1] == size(call.keys)
            end = call.queries.stop
        assert end == sum(map(size, self.own)), "each query is in one call"

    @classmethod
    def from_offsets(
        cls, offsets: Sequence[int], shards: SequenceShards, window: int | None, device: Any
    ) -> "KeyExchange":
        """Compute the exchange for documents that end at T, and `window`."""
        length = offsets[-1] // len(shards.chunks)
        runs = [TokenRange(chunk * length, (chunk + 1) * length) for chunk in shards.chunks]
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
            held=tuple(mine),
            needed=tuple(needs[shards.group]),
            arriving=tuple(chain(*come)),
            needs_no_exchange=not any(needs),
        )


class TokenRange(NamedTuple):
    """The tokens [start, end) of a pack."""

    start: int
    end: int


def _tokens(runs: Sequence[TokenRange]) -> int:
    return sum(run.end - run.start for run in runs)


def _rows(runs: Sequence[TokenRange], part: TokenRange) -> slice:
    """Return the place of a part among consecutively stored runs."""
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


def _needed(
    offsets: Sequence[int], own: Sequence[TokenRange], runs: Sequence[TokenRange], window: int | None
) -> list[TokenRange]:
    """Return the foreign parts that a group's queries see, to chunks' ends."""
    first = {query: _first_key(offsets, query.start, window) for query in own}
    needed = []
    for run in runs:
        seen_by = [query for query in own if first[query] < run.end <= query.start]
        if run not in own and seen_by:
            needed.append(TokenRange(max(run.start, min(first[query] for query in seen_by)), run.end))
    return needed


def _calls(
    offsets: Sequence[int], own: Sequence[TokenRange], known: Sequence[TokenRange], window: int | None, device: Any
) -> tuple[KernelCall, ...]:
    """Return one call if both chunks' keys lie apart, else two."""
    keys = [TokenRange(_first_key(offsets, run.start, window), run.end) for run in own]
    lengths = [_lengths(offsets, run, key.start) for run, key in zip(own, keys, strict=True)]
    if keys[0].end <= keys[1].start:
        queries, seen = ([*early, *late] for early, late in zip(*lengths, strict=True))
        layout = DocumentLayout.from_lengths(queries, device, seen)
        return (KernelCall(slice(0, _tokens(own)), slice(0, _tokens(known)), layout),)
    return tuple(
        KernelCall(_rows(own, run), _rows(known, key), DocumentLayout.from_lengths(queries, device, seen))
        for run, key, (queries, seen) in zip(own, keys, lengths, strict=True)
    )


def _lengths(offsets: Sequence[int], run: TokenRange, first_key: int) -> tuple[list[int], list[int]]:
    """Return each document's queries in a run, and keys from ``first_key``."""
    found = list(pieces(offsets, *run))
    queries = [end - start for _, start, end in found]
    return queries, [end - max(offsets[document], first_key) for document, _, end in found]


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
        places: the places of the rows of other groups in the pack's order, in the order of their arrival.
        foreign: for each chunk in whose first document other groups have keys, the call with its queries.
    """

    own: DocumentLayout
    places: tuple[slice, ...]
    foreign: tuple[KernelCall, ...]

    @classmethod
    def from_exchange(cls, exchange: KeyExchange, offsets: Sequence[int], device: Any) -> "KeyParts":
        """Split an exchange's keys into own and foreign ones, by document."""
        lengths: dict[int, int] = {}
        for document, start, end in chain(*(pieces(offsets, *run) for run in exchange.held)):
            lengths[document] = lengths.get(document, 0) + end - start
        foreign = []
        for run in exchange.held:
            document, start, end = next(pieces(offsets, *run))
            seen = [_rows(exchange.needed, part) for part in exchange.needed if offsets[document] < part.end <= start]
            if seen:
                queries, keys = _rows(exchange.held, TokenRange(start, end)), slice(seen[0].start, seen[-1].stop)
                layout = DocumentLayout.from_lengths([end - start], device, [size(keys)])
                foreign.append(KernelCall(queries, keys, layout))
        places = tuple(_rows(exchange.needed, part) for part in exchange.arriving)
        return cls(DocumentLayout.from_lengths([*lengths.values()], device), places, tuple(foreign))


def size(place: slice) -> int:
    """Return the number of rows at a place."""
    return place.stop - place.start
