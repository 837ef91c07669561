"""Whole documents dealt to the ranks that share a pack.

A layer whose recurrence has no heads to exchange runs on whole documents: one all-to-all brings each document to one
rank, the layer computes the document alone as transformers would, and one all-to-all brings the outputs back.

```
tokens      rank 0 │ A A A A B B │   rank 1 │ B B B C C · │        · padding is a document of its own
documents   rank 0 │ B B B B B   │   rank 1 │ A A A A C C · │    the longest first, to the rank with the fewest tokens
```
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from verl_ext.layers.pack import RunningPack
from verl_ext.parallel.exchange import Ranges, Route, by_range, exchange_rows
from verl_ext.parallel.shards import SequenceShards, TokenRange, pieces


@dataclass(frozen=True)
class Deal:
    """The documents of a rank, and the way of tokens to them.

    Attributes:
        route: from a rank's L rows to the S rows of its documents.
        lengths: the tokens of these documents, S together.
    """

    route: Route
    lengths: list[int]

    @classmethod
    def from_offsets(cls, offsets: Sequence[int], shards: SequenceShards) -> "Deal":
        """Deal the documents [offsets[d], offsets[d + 1]) to ranks."""
        documents = dealt(offsets, shards.ranks)
        lengths = [offsets[d + 1] - offsets[d] for d in documents[shards.rank]]
        rank_of = {d: rank for rank, own in enumerate(documents) for d in own}
        spans = shards.spans_of_ranks(offsets[-1])
        needs: list[list[TokenRange]] = [[] for _ in spans]
        for span in chain(*spans):
            for d, start, end in pieces(offsets, *span):
                needs[rank_of[d]].append(TokenRange(start, end))
        return cls(Route.from_needs(spans, needs, shards.rank), lengths)


def dealt(offsets: Sequence[int], ranks: int) -> list[list[int]]:
    """Return ranks' documents: the longest first, to the rank with fewest tokens."""
    lengths = [end - start for start, end in pairwise(offsets)]
    documents: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for d in sorted(range(len(lengths)), key=lambda d: (-lengths[d], d)):
        rank = min(range(ranks), key=lambda r: (tokens[r], r))
        documents[rank].append(d)
        tokens[rank] += lengths[d]
    return [sorted(own) for own in documents]


def layer_by_document(
    pack: RunningPack, layer: Callable[..., Any], hidden: torch.Tensor, others: dict[str, Any]
) -> torch.Tensor:
    """Run a layer on each document of ``hidden[1, L, C]`` alone.

    layer is a layer's forward; if it returns a tuple, the first value, ``[1, L, C]``, counts. Of its other arguments,
    tensors of L tokens in dimension 1 (rotary embeddings) are cut like the input; they have no gradients.
    """
    assert pack.layout is not None
    length, layout = hidden.size(1), pack.layout
    if pack.group is None:
        return _run(layer, hidden, others, layout.lengths)
    deal = layout.derived("deal", lambda: Deal.from_offsets(layout.offsets, pack.shards))
    route, group = deal.route, pack.group
    own = _travel(hidden, route, group)
    beside = {name: _mapped(value, length, lambda x: _travel(x, route, group)) for name, value in others.items()}
    if not deal.lengths:
        # FSDP reduces gradients over all ranks, so a rank without documents computes one token with weight 0.
        token = {name: _mapped(value, length, lambda x: x[:, :1]) for name, value in others.items()}
        output = own + 0 * _run(layer, hidden[:, :1], token, [1]).sum()
    else:
        output = _run(layer, own, beside, deal.lengths)
    return _travel(output, route.back, group)


def _travel(x: torch.Tensor, route: Route, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange ``x[1, L, …]`` for ``[1, S, …]``, in the pack's order."""
    sizes = (route.send_sizes, route.receive_sizes)
    received = exchange_rows(_reordered(x[0], sorted(route.outgoing), route.outgoing), group, *sizes)
    return _reordered(received, route.incoming, sorted(route.incoming)).unsqueeze(0)


def _reordered(rows: torch.Tensor, ranges: Ranges, order: Ranges) -> torch.Tensor:
    """Put ranges' rows into another order, by one copy in both passes."""
    parts = by_range(rows, ranges)
    return torch.cat([parts[part] for part in order] or [rows])


def _run(layer: Callable[..., Any], hidden: torch.Tensor, others: dict[str, Any], lengths: list[int]) -> torch.Tensor:
    """Run the layer document by document, from the first on."""
    length, outputs, start = hidden.size(1), [], 0
    for document in hidden.split(lengths, dim=1):
        cut = itemgetter((slice(None), slice(start, start + document.size(1))))  # x[:, start:end]
        output = layer(document, **{name: _mapped(value, length, cut) for name, value in others.items()})
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])
        start += document.size(1)
    return torch.cat(outputs, dim=1)


def _mapped(value: Any, length: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to a value's tensors of `length` in dimension 1."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.dim() >= 2 and value.size(1) == length else value
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(part, length, change) for part in value)
    return value
