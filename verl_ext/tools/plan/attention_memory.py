"""Attention kernels that allocate memory on the fake GPU and compute nothing."""

from typing import Any

import torch

from verl_ext.attention.kernels import KernelOptions
from verl_ext.attention.sinks import flash_arguments
from verl_ext.parallel.key_exchange import LseKernel
from verl_ext.parallel.shards import DocumentLayout


class _Attention(torch.autograd.Function):
    """The memory of an attention kernel that keeps no scores."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: int | None) -> torch.Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.size(1), q.size(0), dtype=torch.float32))
        ctx.documents = documents
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        return (*_attention_gradients(q, k, v, ctx.documents), None)


def _attention_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the memory of an attention kernel's backward pass.

    documents: the number of documents for FlashAttention-2 with cumulative lengths (flash-attn 2.8, torch's
    varlen_attn), whose backward sums dq in fp32, padded by up to 128 tokens per document, and computes dk and dv for
    every query head. None: a kernel that does neither.
    """
    inside = []
    if documents is not None:
        rows, heads = q.size(0) + 128 * documents, q.size(1)
        inside += [q.new_empty(rows, heads, -(-q.size(2) // 32) * 32, dtype=torch.float32)]
        inside += [q.new_empty(rows, heads, dtype=torch.float32)]
        inside += [k.new_empty(k.size(0), heads, k.size(2)) for _ in (k, v) if heads != k.size(1)]
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    del inside
    return gradients


def flash_memory(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout, options: KernelOptions
) -> torch.Tensor:
    """Allocate flash attention's memory in place of a kernel of ``KERNELS``."""
    padded, _ = flash_arguments(query, value, layout)
    return _Attention.apply(query, key, padded, len(layout.offsets) - 1)[..., : value.size(-1)]


def _lse_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    lse = query.new_empty(query.size(1), query.size(0), dtype=torch.float32)
    return torch.empty_like(query)[..., : value.size(-1)], lse


def _lse_backward(*given: Any, causal: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, query, key, value, _, _, layout, _ = given
    padded, _ = flash_arguments(query, value, layout)
    dq, dk, dv = _attention_gradients(query, key, padded, len(layout.offsets) - 1)
    return dq, dk, dv[..., : value.size(-1)]


LSE_MEMORY = LseKernel(_lse_forward, _lse_backward)  # the same for keys that arrive in parts


def fake_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """Stand in for ``scaled_dot_product_attention`` of ``[1, heads, T, E]``, keeping no scores."""
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return _Attention.apply(q, k, v, None).transpose(0, 1).unsqueeze(0)
