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
from contextlib import suppress
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from verl_ext.layers.pack import RunningPack, fla_lengths, import_fla
from verl_ext.parallel.exchange import KnownRows, by_range
from verl_ext.parallel.shards import DocumentLayout, SequenceShards, TokenRange, pieces

_INSIDE = ("silu", "swish")  # activations that flash-linear-attention's kernel computes; it ignores all others


def convolve(
    pack: RunningPack,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """Convolve ``x[1, C, L]`` inside documents, called like causal_conv1d_fn; ``weight[C, K]``."""
    kernel, whole, taps = convolution_kernel(x.device.type), pack.layout, weight.size(-1)
    assert whole is not None
    rows = x.squeeze(0).transpose(0, 1)  # [L, C]
    if pack.group is None:
        output = kernel(rows, weight, bias, activation, whole)
    else:
        known, layout = whole.derived(("halo", taps), lambda: _with_halo(whole, pack.shards, taps))
        output = kernel(known.gathered(rows, pack.group), weight, bias, activation, layout)
        parts = by_range(output, known.ranges)
        output = torch.cat([parts[span] for span in known.own])
    return output.transpose(0, 1).unsqueeze(0)


def _with_halo(layout: DocumentLayout, shards: SequenceShards, taps: int) -> tuple[KnownRows, DocumentLayout]:
    """Return a rank's rows and those before them, and their documents."""
    offsets = layout.offsets
    known = KnownRows.from_spans(offsets, shards.spans_of_ranks(offsets[-1]), shards.rank, taps)
    runs: list[TokenRange] = []
    for part in known.ranges:  # a span follows its halo
        start = runs.pop().start if runs and runs[-1].end == part.start else part.start
        runs.append(TokenRange(start, part.end))
    lengths = [end - start for run in runs for _, start, end in pieces(offsets, *run)]
    return known, DocumentLayout.from_lengths(lengths, layout.cu_seqlens.device)


@cache
def convolution_kernel(device: str) -> Callable[..., torch.Tensor]:
    """Return flash-linear-attention's kernel on a GPU that has it, else torch's."""
    if device == "cuda":
        try:
            causal_conv1d = _kernel_of_fla()
        except ImportError:
            return convolve_documents

        def kernel(*inputs: Any) -> torch.Tensor:
            x, weight, bias, activation, layout = inputs
            inside = activation if activation in _INSIDE else None
            output = causal_conv1d(x.unsqueeze(0), weight, bias, activation=inside, **fla_lengths(layout))[0].squeeze(0)
            return output if activation == inside else ACT2FN[activation](output)

        return kernel
    return convolve_documents


def _kernel_of_fla() -> Callable[..., Any]:
    """Import flash-linear-attention's convolution, which 0.6 has moved; raise ImportError without the package."""
    import_fla("modules")
    with suppress(ImportError):
        return import_fla("modules.causal_conv1d").causal_conv1d
    return import_fla("modules.conv").causal_conv1d


def convolve_documents(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, layout: DocumentLayout
) -> torch.Tensor:
    """Convolve ``x[T, C]`` one document after the other, each as transformers does."""
    outputs = [convolve_rows(document.T, weight, bias) for document in x.split(layout.lengths)]
    output = torch.cat(outputs, dim=1).transpose(0, 1)
    return output if activation is None else ACT2FN[activation](output)


def convolve_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None = None,
    seq_idx: None = None,
) -> torch.Tensor:
    """Convolve ``x[…, C, L]``, one document in each row, without a kernel."""
    output = F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.size(-1) - 1, groups=weight.size(0))[
        ..., : x.size(-1)
    ]
    return output if activation is None else ACT2FN[activation](output)
