"""Attention whose scores are not plain: soft caps (Gemma 2) and sinks (GPT-OSS).

A soft cap c bounds the logits: c · tanh(logits / c). A sink is a learnt logit of each head that takes a part of the
softmax and has no value: out = Σ exp(logits) v / (Σ exp(logits) + exp(sink)).

Flash kernels know no sinks, but their backward needs none. It computes the probabilities as exp(logits - lse) from the
log-sum-exp that it is handed, and ds = p (dp - rowsum(dout · out)). Handed lse' = logaddexp(lse, sink) and the output
with the sink in it, it gives the right gradients of queries, keys and values, and d(sink) is
-Σ_t exp(sink - lse'_t) rowsum(dout_t · out_t). Scaling a kernel's output by sigmoid(lse - sink) gives the same output
and wrong gradients, because a flash backward drops the gradient of lse.

Legend: T tokens of a micro-batch with padding, H query heads, K key/value heads, E head size.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from verl_ext.attention.layout import DocumentLayout

_QUERY_BLOCK = 512  # queries whose scores are held at a time


def blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout, options: Any
) -> torch.Tensor:
    """Attend from ``query[T, H, E]`` to ``key, value[S, K, E]`` with a soft cap or sinks, by blocks of queries.

    The scores of a block are computed again in backward, so that no document holds the square of its length.
    """
    outputs = []
    for queries, keys in zip(pairwise(layout.offsets), pairwise(layout.keys.offsets), strict=True):
        k, v = (x[slice(*keys)] for x in (key, value))
        before = len(k) - (queries[1] - queries[0])
        for start in range(*queries, _QUERY_BLOCK):
            q = query[start : min(start + _QUERY_BLOCK, queries[1])]
            place = before + start - queries[0]  # of the block's first query among the keys
            first = 0 if options.window is None else max(place - options.window + 1, 0)
            seen = slice(first, place + len(q))
            outputs.append(checkpoint(_block, q, k[seen], v[seen], place - first, options, use_reentrant=False))
    return torch.cat(outputs)


def _block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, place: int, options: Any) -> torch.Tensor:
    """Attend from ``query[B, H, E]``, the first of which is token `place` of the keys ``[S, K, E]``."""
    shared = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    scale = query.size(-1) ** -0.5 if options.scale is None else options.scale
    logits = torch.einsum("qhe,khe->hqk", query, key) * scale
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    position = torch.arange(len(key), device=query.device)
    distance = position[place : place + len(query), None] - position
    unseen = distance < 0
    if options.window is not None:
        unseen = unseen | (distance >= options.window)
    logits = logits.masked_fill(unseen, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.to(logits.dtype).view(-1, 1, 1).expand(-1, len(query), 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights = torch.dropout(weights[..., : len(key)].to(query.dtype), options.dropout, train=True)
    return torch.einsum("hqk,khe->qhe", weights, value)


def flash_with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout, options: Any
) -> torch.Tensor:
    """Attend with sinks by torch's flash kernels, or by those that it was given; half precision on CUDA."""
    assert not options.dropout, "a flash kernel's backward would need its random numbers"
    return SinkAttention.apply(query, key, value, options.sinks, layout, options, _flash_forward, _flash_backward)


class SinkAttention(torch.autograd.Function):
    """Attention with a sink around a forward that returns its log-sum-exp, and its own backward.

    The forward returns ``[T, H, E]`` and ``lse[H, T]`` for (query, key, value, layout, options); the backward returns
    the gradients of the three for (dout, query, key, value, out, lse, layout, options).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        layout: DocumentLayout,
        options: Any,
        forward: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Scale the kernel's output by the share that the sink leaves, and keep the log-sum-exp with the sink."""
        output, lse = forward(query, key, value, layout, options)
        whole = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))  # [H, T]
        output = (output * (lse - whole).exp().t().unsqueeze(-1)).to(output.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, whole)
        ctx.layout, ctx.options, ctx.of_kernel = layout, options, backward
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        """Hand the kernel's backward the output and the log-sum-exp with the sink in them."""
        query, key, value, sinks, output, whole = ctx.saved_tensors
        (grad,) = grad_outputs
        gradients = ctx.of_kernel(grad.contiguous(), query, key, value, output, whole, ctx.layout, ctx.options)
        of_rows = (grad.to(whole.dtype) * output.to(whole.dtype)).sum(-1).t()  # [H, T]
        of_sinks = -((sinks.to(whole.dtype).unsqueeze(1) - whole).exp() * of_rows).sum(1)
        return *gradients, of_sinks.to(sinks.dtype), None, None, None, None


def _flash_arguments(layout: DocumentLayout) -> Iterator[Any]:
    keys = layout.keys
    yield from (layout.cu_seqlens, keys.cu_seqlens, layout.max_length, keys.max_length, 0.0, True)


def _flash_windows(options: Any) -> dict[str, Any]:
    left, right = options.flash_window
    window = {"window_size_left": left, "window_size_right": right} if left >= 0 else {}
    return {"scale": options.scale, **window}


def _flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout, options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, *_flash_arguments(layout), return_debug_mask=False, **_flash_windows(options)
    )
    return found[0], found[1]


def _flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    layout: DocumentLayout,
    options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return torch.ops.aten._flash_attention_backward(
        *(grad, query, key, value, output, lse, *_flash_arguments(layout)),
        *(no_dropout, torch.empty(0, device=query.device)),
        **_flash_windows(options),
    )
