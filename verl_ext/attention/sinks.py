"""Attention with soft caps (Gemma 2) and sinks (GPT-OSS).

A soft cap c bounds the logits: c · tanh(logits / c). A sink is a learnt logit of each head that takes a part of the
softmax and has no value: out = Σ exp(logits) v / (Σ exp(logits) + exp(sink)).

Flash kernels know no sinks, but their backward needs none. It computes the probabilities as exp(logits - lse) from the
log-sum-exp that it is handed, and ds = p (dp - rowsum(dout · out)). Handed lse' = logaddexp(lse, sink) and the output
with the sink in it, it gives the right gradients of queries, keys and values, and d(sink) is
-Σ_t exp(sink - lse'_t) rowsum(dout_t · out_t). Scaling a kernel's output by sigmoid(lse - sink) gives the same output
and wrong gradients, because a flash backward drops the gradient of lse. Keys that come in parts are joined in the same
way (parallel/key_exchange.py).

Legend: T tokens of a micro-batch with padding, H query heads, K key/value heads, E head size.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from verl_ext.parallel.key_exchange import LseKernel, share_of_sum
from verl_ext.parallel.shards import DocumentLayout

_QUERY_BLOCK = 512  # queries whose scores or mask are held at a time


def attention_by_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any
) -> Iterator[torch.Tensor]:
    """Yield a document's attention by blocks of queries, ``[B, H, E]`` each.

    ``query[Q, H, E]`` are the last tokens of ``key, value[S, K, E]``. No tensor has the square of their number:

    - with a soft cap or sinks, the scores of a block are computed again in backward;
    - with a window alone, sdpa gets a mask. Only its memory-efficient kernel accepts one and holds no scores. It has no
      grouped heads, and accepts a mask without a copy, shared by all blocks, if keys are a multiple of 16.
    """
    has_scores = options.softcap is not None or options.sinks is not None
    if not has_scores:
        key, value = _repeated(key, query), _repeated(value, query)
    before, masks = len(key) - len(query), {}
    reach = len(key) if options.window is None else -(-(options.window - 1) // 16) * 16
    for start in range(0, len(query), _QUERY_BLOCK):
        q = query[start : start + _QUERY_BLOCK]
        visible = slice(max(before + start - reach, 0), before + start + len(q))
        k, v = key[visible], value[visible]
        if has_scores:
            yield checkpoint(_scored, q, k, v, options, use_reentrant=False)
            continue
        if (shape := (len(q), len(k))) not in masks:
            masks[shape] = q.new_zeros(shape).masked_fill(_unseen(*shape, options.window, q.device), -torch.inf)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, ·, E]
        output = F.scaled_dot_product_attention(q, k, v, masks[shape], dropout_p=options.dropout, scale=options.scale)
        yield output.squeeze(0).transpose(0, 1)


def _unseen(queries: int, keys: int, window: int | None, device: Any) -> torch.Tensor:
    """Return bool``[queries, keys]``: which keys the last queries do not see."""
    place = torch.arange(keys, device=device)
    distance = place[keys - queries :, None] - place
    return (distance < 0) | (distance >= (window or keys))


def _repeated(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat ``x[S, K, E]`` to a head for each query head."""
    return x.repeat_interleave(query.size(1) // x.size(1), dim=1)


def _scored(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any) -> torch.Tensor:
    """Attend from ``[B, H, E]``, the last tokens of ``[S, K, E]``."""
    key, value = _repeated(key, query), _repeated(value, query)
    scale = query.size(-1) ** -0.5 if options.scale is None else options.scale
    logits = torch.einsum("qhe,khe->hqk", query, key) * scale
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    logits = logits.masked_fill(_unseen(len(query), len(key), options.window, query.device), -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.to(logits.dtype).view(-1, 1, 1).expand(-1, len(query), 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights = torch.dropout(weights[..., : len(key)].to(query.dtype), options.dropout, train=True)
    return torch.einsum("hqk,khe->qhe", weights, value)


class LseAttention(torch.autograd.Function):
    """Attention by an :class:`LseKernel`, with sinks ``[H]`` or None."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        """Scale the output by what sinks leave; keep the joint log-sum-exp."""
        query, key, value, sinks, layout, options, kernel = inputs
        output, lse, *others = kernel.forward(query, key, value, layout, options)
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))  # [H, T]
            output = (output * share_of_sum(lse, whole)).to(output.dtype)
            lse = whole
        ctx.save_for_backward(query, key, value, sinks, output, lse, *others)
        ctx.layout, ctx.options, ctx.kernel = layout, options, kernel
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        """Pass output and log-sum-exp, both with sinks, to the kernel."""
        query, key, value, sinks, output, lse, *others = ctx.saved_tensors
        (grad,) = grad_outputs
        inputs = (grad.contiguous(), query, key, value, output, lse, *others)
        gradients = ctx.kernel.backward(*inputs, ctx.layout, ctx.options)
        of_sinks = None
        if sinks is not None:
            of_rows = (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1).t()  # [H, T]
            of_sinks = -((sinks.to(lse.dtype).unsqueeze(1) - lse).exp() * of_rows).sum(1).to(sinks.dtype)
        return *gradients, of_sinks, None, None, None


def flash_arguments(
    query: torch.Tensor, value: torch.Tensor, layout: DocumentLayout
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Return values as wide as queries, and lengths, for flash kernels.

    Latent attention has narrower values. The causal rule of flash kernels treats queries as a document's last tokens.
    """
    keys = layout.keys
    return _widened(value, query), (layout.cu_seqlens, keys.cu_seqlens, layout.max_length, keys.max_length)


def _widened(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    missing = query.size(-1) - x.size(-1)
    assert missing >= 0, "a pad by less than nothing would cut"
    return F.pad(x, (0, missing)) if missing else x  # a pad by nothing would copy


def _flash_windows(options: Any) -> dict[str, Any]:
    left, right = options.flash_window
    window = {"window_size_left": left, "window_size_right": right} if left >= 0 else {}
    return {"scale": options.scale, **window}


def _flash_forward(*inputs: Any, causal: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, layout, options = inputs
    assert (options.dropout, options.softcap) == (0, None), "flash_limit and choose_backend refuse both"
    padded, lengths = flash_arguments(query, value, layout)
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, padded, *lengths, 0.0, causal, return_debug_mask=False, **_flash_windows(options)
    )
    return output[..., : value.size(-1)], lse


def _flash_backward(*inputs: Any, causal: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad, query, key, value, output, lse, layout, options = inputs
    padded, lengths = flash_arguments(query, value, layout)
    grad, output = _widened(grad, query), _widened(output, query)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(grad, query, key, padded, output, lse.contiguous(), *lengths, 0.0, causal),
        *(no_dropout, torch.empty(0, device=query.device)),
        **_flash_windows(options),
    )
    return dq, dk, dv[..., : value.size(-1)]


FLASH = LseKernel(_flash_forward, _flash_backward)  # torch's flash kernels, or those that it was given


def flash_with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout, options: Any
) -> torch.Tensor:
    """Attend with sinks by torch's flash kernels; half precision, CUDA."""
    return LseAttention.apply(query, key, value, options.sinks, layout, options, FLASH)
