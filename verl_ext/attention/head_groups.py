"""Kernels over groups of query heads, for the memory of their backward.

Flash attention's backward sums dq in fp32, and holds dk and dv for every query head of a call. With 32 query heads and
8 key heads this is 4.5 times the size of the queries; one group of heads at a time takes only its share of that.
"""

from typing import Any

import torch

from verl_ext.parallel.key_exchange import LseKernel
from verl_ext.parallel.shards import DocumentLayout, KernelFunction

GROUP_BYTES = 2**30  # most bytes, in fp32, of the query heads of one kernel call


def by_groups_of_heads(kernel: KernelFunction, group_bytes: int = GROUP_BYTES) -> KernelFunction:
    """Run the kernel over groups of query heads within `group_bytes` in fp32.

    If all heads together are at most `group_bytes`, there is one call.
    """

    def grouped(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout, options: Any
    ) -> torch.Tensor:
        size, of_keys, shared = _heads_of_a_call(query, key, group_bytes, max(len(query), len(key)))
        if size == query.size(1):
            return kernel(query, key, value, layout, options)
        keys, values = key.split(of_keys, 1), value.split(of_keys, 1)
        calls = (
            kernel(q, keys[first], values[first], layout, options.of_heads(index * size, size))
            for index, q in enumerate(query.split(size, 1))
            for first in [index * size // (shared * of_keys)]
        )
        return torch.cat(list(calls), dim=1)

    return grouped


def backward_by_groups_of_heads(kernel: LseKernel, group_bytes: int = GROUP_BYTES) -> LseKernel:
    """Run only the backward by groups; a forward holds no fp32."""

    def backward(*inputs: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad, query, key, value, output, lse, *others = inputs
        size, of_keys, shared = _heads_of_a_call(query, key, group_bytes, len(query))
        if size == query.size(1):
            return kernel.backward(*inputs, **named)
        dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
        for first in range(0, query.size(1), size):
            heads, keys = slice(first, first + size), slice(first // shared, first // shared + of_keys)
            of_heads = grad[:, heads], query[:, heads], key[:, keys], value[:, keys], output[:, heads], lse[heads]
            parts = kernel.backward(*of_heads, *others, **named)
            for total, part in zip((dq[:, heads], dk[:, keys], dv[:, keys]), parts, strict=True):
                total += part
        return dq, dk, dv

    return LseKernel(kernel.forward, backward)


def _heads_of_a_call(query: torch.Tensor, key: torch.Tensor, group_bytes: int, rows: int) -> tuple[int, int, int]:
    """Return a call's query and key heads, and queries per key head.

    A group is a part of the heads that share a key head, or several whole sets of them. rows: the tokens of its fp32
    tensors, which `group_bytes` bounds.
    """
    heads, shared = query.size(1), query.size(1) // key.size(1)
    most = group_bytes // (4 * rows * query.size(2))
    sizes = [size for size in range(1, heads + 1) if heads % size == 0 and (shared % size == 0 or size % shared == 0)]
    size = max([size for size in sizes if size <= most], default=1)
    return size, max(size // shared, 1), shared
