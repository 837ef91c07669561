"""Causal convolutions inside documents, with halos between ranks.

A kernel of K taps reads K - 1 tokens before each one. A rank that begins inside a document gets them from the rank
that holds them (the halo); a document's first tokens have zeros before them:

```
documents   │ A A A A A A │ B B B B B B B B │         K = 3
rank 0      │ A A A A A A   B │
rank 1           halo:  (0 B)   B B B B B B B        only one of the two tokens before belongs to B
```
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.activations import ACT2FN

from verl_ext.layers.pack import RunningPack, fla_lengths, import_fla
from verl_ext.parallel.shards import DocumentLayout, SequenceShards, pinned

_INSIDE = ("silu", "swish")  # activations that flash-linear-attention's kernel computes; it ignores all others


@dataclass(frozen=True)
class Halo:
    """The rows that ranks exchange for a convolution.

    A rank has L tokens, sends W rows to each of n ranks, and has P pieces of documents, each after its halo.

    Attributes:
        sent: int64[W], rows of this rank's L that others may read.
        read: int64[T'], rows of the L own tokens and the n · W gathered ones, piece by piece.
        kept: int64[L], the places of the own tokens among these T'.
        layout: the P pieces as documents of T' tokens.
    """

    sent: torch.Tensor
    read: torch.Tensor
    kept: torch.Tensor
    layout: DocumentLayout

    @classmethod
    def from_layout(cls, layout: DocumentLayout, shards: SequenceShards, taps: int) -> "Halo":
        """Compute the halo of a convolution with `taps` taps, on the host."""
        offsets, tokens, device = layout.offsets, layout.offsets[-1], layout.cu_seqlens.device
        sent = [_last_tokens(replace(shards, rank=rank), tokens, taps - 1) for rank in range(shards.ranks)]
        width = max(map(len, sent))
        held = tokens // shards.ranks
        gathered = {t: held + rank * width + i for rank, tails in enumerate(sent) for i, t in enumerate(tails)}
        ends = np.asarray(offsets)
        rows: list[int] = []
        read: list[np.ndarray] = []
        kept: list[np.ndarray] = []
        lengths: list[int] = []
        row = at = 0  # of a token among the L, and among the T'
        for first, last in shards.spans(tokens):
            rows += range(row + max(last - first - taps + 1, 0), row + last - first)
            # Only the span's first piece has tokens of its document before it.
            document = int(np.searchsorted(ends, first, side="right")) - 1
            halo = [gathered[t] for t in range(max(offsets[document], first - taps + 1), first)]
            read += [np.array(halo, np.int64), np.arange(row, row + last - first)]
            kept.append(np.arange(at + len(halo), at + len(halo) + last - first))
            inside = ends[document + 1 : int(np.searchsorted(ends, last))]
            sizes = np.diff(inside, prepend=first, append=last)
            lengths += [len(halo) + int(sizes[0]), *sizes[sizes > 0][1:].tolist()]
            row, at = row + last - first, at + len(halo) + last - first
        rows += [0] * (width - len(rows))
        sent_rows, read_rows, kept_rows = (
            pinned(x, device).to(device, non_blocking=True)
            for x in (torch.tensor(rows), *(torch.from_numpy(np.concatenate(parts)) for parts in (read, kept)))
        )
        return cls(sent_rows, read_rows, kept_rows, DocumentLayout.from_lengths(lengths, device))


def _last_tokens(shards: SequenceShards, tokens: int, count: int) -> list[int]:
    """Return each run's last `count` tokens of a rank, by place."""
    return [t for start, end in shards.spans(tokens) for t in range(max(start, end - count), end)]


def convolve(
    pack: RunningPack,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """Convolve ``x[1, C, L]`` inside documents, called like causal_conv1d_fn; ``weight[C, K]``."""
    whole = pack.layout
    assert whole is not None
    rows, layout, halo = x.squeeze(0).transpose(0, 1), whole, None  # [L, C]
    if pack.group is not None:
        taps = weight.size(-1)
        halo = pack.derived(("halo", taps), lambda: Halo.from_layout(whole, pack.shards, taps))
        others = _GatherRows.apply(rows[halo.sent], pack.group)
        rows, layout = torch.cat([rows, others])[halo.read], halo.layout
    kernel = convolution_kernel(x.device.type)
    output = kernel(rows, weight, bias, activation, layout)
    return (output if halo is None else output[halo.kept]).transpose(0, 1).unsqueeze(0)


@cache
def convolution_kernel(device: str) -> Callable[..., torch.Tensor]:
    """Return flash-linear-attention's kernel on a GPU that has it, else torch's."""
    if device == "cuda":
        try:
            causal_conv1d = import_fla("modules.causal_conv1d").causal_conv1d
        except ImportError:
            return convolve_documents

        def kernel(
            x: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            activation: str | None,
            layout: DocumentLayout,
        ) -> torch.Tensor:
            inside = activation if activation in _INSIDE else None
            output = causal_conv1d(x.unsqueeze(0), weight, bias, activation=inside, **fla_lengths(layout))[0].squeeze(0)
            return output if activation == inside else ACT2FN[activation](output)

        return kernel
    return convolve_documents


def convolve_documents(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, layout: DocumentLayout
) -> torch.Tensor:
    """Convolve ``x[T, C]`` one document after the other, each as transformers does."""
    taps, channels = weight.size(-1), weight.size(0)
    documents = [x[start:end].transpose(0, 1) for start, end in pairwise(layout.offsets)]
    outputs = [
        F.conv1d(document, weight.unsqueeze(1), bias, padding=taps - 1, groups=channels)[:, : document.size(1)]
        for document in documents
    ]
    output = torch.cat(outputs, dim=1).transpose(0, 1)
    return output if activation is None else ACT2FN[activation](output)


class _GatherRows(torch.autograd.Function):
    """Ranks' ``[W, C]`` as ``[n · W, C]``; gradients sum over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = rows.new_empty(dist.get_world_size(group) * len(rows), rows.size(1))
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grad_outputs
        received = torch.empty_like(grad)
        dist.all_to_all_single(received, grad.contiguous(), group=ctx.group)  # gloo has no reduce-scatter
        ranks = dist.get_world_size(ctx.group)
        total = received.unflatten(0, (ranks, -1)).sum(0, dtype=torch.promote_types(grad.dtype, torch.float32))
        return total.to(grad.dtype), None
