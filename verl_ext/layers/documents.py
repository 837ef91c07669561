"""Whole documents dealt to the ranks that share a pack.

A layer whose recurrence has no heads to exchange runs on whole documents: one all-to-all brings each document to one
rank, the layer computes the document alone as transformers would, and one all-to-all brings the outputs back.

```
tokens      rank 0 │ A A A A B B │   rank 1 │ B B B C C · │        · padding is a document of its own
documents   rank 0 │ B B B B B   │   rank 1 │ A A A A C C · │    the longest first, to the rank with the fewest tokens
```
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from verl_ext.layers.pack import RunningPack
from verl_ext.parallel.shards import SequenceShards, pinned


@dataclass(frozen=True)
class Deal:
    """The routes of tokens from a rank's slice to dealt documents.

    Attributes:
        send: int64[L], rows of the own tokens in the order of the ranks that they go to; send_sizes: tokens for each.
        place: int64[S], rows of the dealt documents in the order of the tokens that come; receive_sizes: from each.
        offsets: bounds of the dealt documents, which end at S.
    """

    send: torch.Tensor
    send_sizes: list[int]
    place: torch.Tensor
    receive_sizes: list[int]
    offsets: tuple[int, ...]

    @classmethod
    def from_offsets(cls, offsets: Sequence[int], shards: SequenceShards, device: Any) -> "Deal":
        """Deal the documents [offsets[d], offsets[d + 1]) to ranks, on the host."""
        tokens = offsets[-1]
        documents = dealt(offsets, shards.ranks)
        row_of = torch.empty(tokens, dtype=torch.long)  # the row of a token among the documents of its rank
        rank_of = torch.empty(tokens, dtype=torch.long)
        for rank, own in enumerate(documents):
            row = 0
            for d in own:
                size = offsets[d + 1] - offsets[d]
                row_of[offsets[d] : offsets[d + 1]] = torch.arange(row, row + size)
                rank_of[offsets[d] : offsets[d + 1]] = rank
                row += size
        held = [
            torch.cat([torch.arange(*span) for span in replace(shards, rank=rank).spans(tokens)])
            for rank in range(shards.ranks)
        ]
        goes_to = rank_of[held[shards.rank]]
        come = [tokens_of[rank_of[tokens_of] == shards.rank] for tokens_of in held]
        send, place = goes_to.argsort(stable=True), row_of[torch.cat(come)]
        lengths = [offsets[d + 1] - offsets[d] for d in documents[shards.rank]]
        return cls(
            send=pinned(send, device).to(device, non_blocking=True),
            send_sizes=goes_to.bincount(minlength=shards.ranks).tolist(),
            place=pinned(place, device).to(device, non_blocking=True),
            receive_sizes=[len(part) for part in come],
            offsets=(0, *accumulate(lengths)),
        )


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

    The result is ``[1, L, C]`` too.


    Args:
        pack: the pack that runs.
        layer: a layer's forward; if it returns a tuple, the first value counts.
        hidden: its input.
        others: its other arguments; tensors of L tokens in dimension 1 (rotary embeddings) are cut like the input.
    """
    assert pack.layout is not None
    length, offsets = hidden.size(1), pack.layout.offsets
    if pack.group is None:
        return _run(layer, hidden, others, offsets)
    deal = pack.derived("deal", lambda: Deal.from_offsets(offsets, pack.shards, hidden.device))

    def travel(x: torch.Tensor) -> torch.Tensor:
        rows = _Travel.apply(x[0].reshape(length, -1), deal, pack.group, False)
        return rows.view(1, len(rows), *x.shape[2:])

    come = travel(hidden)
    beside = {name: _mapped(value, length, travel) for name, value in others.items()}
    if len(deal.offsets) == 1:
        # FSDP reduces gradients over all ranks, so a rank without documents computes one token with weight 0.
        token = {name: _mapped(value, length, lambda x: x[:, :1]) for name, value in others.items()}
        output = come + 0 * _run(layer, hidden[:, :1], token, (0, 1)).sum()
    else:
        output = _run(layer, come, beside, deal.offsets)
    return _Travel.apply(output[0], deal, pack.group, True).unsqueeze(0)


def _run(
    layer: Callable[..., Any], hidden: torch.Tensor, others: dict[str, Any], offsets: Sequence[int]
) -> torch.Tensor:
    length, outputs = hidden.size(1), []
    for start, end in pairwise(offsets):

        def cut(x: torch.Tensor, start: int = start, end: int = end) -> torch.Tensor:
            return x[:, start:end]

        output = layer(cut(hidden), **{name: _mapped(value, length, cut) for name, value in others.items()})
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])
    return torch.cat(outputs, dim=1)


def _mapped(value: Any, length: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to a value's tensors of `length` in dimension 1."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.dim() >= 2 and value.size(1) == length else value
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(part, length, change) for part in value)
    return value


class _Travel(torch.autograd.Function):
    """Dealt documents' ``[S, C]`` from ranks' ``[L, C]``, or back; differentiable."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, deal: Deal, group: dist.ProcessGroup, back: bool) -> torch.Tensor:
        ctx.deal, ctx.group, ctx.back = deal, group, back
        return _exchange(rows, deal, group, back)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(grad_outputs[0], ctx.deal, ctx.group, not ctx.back), None, None, None


def _exchange(rows: torch.Tensor, deal: Deal, group: dist.ProcessGroup, back: bool) -> torch.Tensor:
    here, there = (deal.send, deal.send_sizes), (deal.place, deal.receive_sizes)
    (leaving, sizes), (arriving, sizes_of_others) = (there, here) if back else (here, there)
    received = rows.new_empty(sum(sizes_of_others), rows.size(1))
    dist.all_to_all_single(received, rows[leaving], sizes_of_others, sizes, group=group)
    placed = torch.empty_like(received)
    placed[arriving] = received
    return placed
