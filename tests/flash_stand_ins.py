"""CPU functions in place of torch's C++ flash kernels, with their arguments and the formulas of their backward.

The backward knows no more than the C++: it trusts the output and the log-sum-exp that it receives.
"""

from itertools import pairwise

import torch

_registered = []  # keeps libraries alive, which else unregister their functions


def register_flash_stand_ins() -> None:
    """Let torch's varlen attention, and the operations below it, run on the CPU in this process."""
    if not _registered:
        _registered.append(torch.library.Library("aten", "IMPL"))
        _registered[0].impl("_flash_attention_forward", _forward, "CPU")
        _registered[0].impl("_flash_attention_backward", _backward, "CPU")


def _documents(query, key, value, cu_q, cu_k, max_q, max_k, dropout, causal, scale, window):
    """Yield each document's places of queries and keys, its scores ``[H, Q, K]`` and their factor."""
    assert dropout == 0
    assert query.shape[1:] == (query.size(1), value.size(-1)) == (query.size(1), key.size(-1)), "one head size"
    assert (len(query), len(key), len(value)) == (cu_q[-1], cu_k[-1], cu_k[-1])
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert len(cu_q) == len(cu_k)
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    left, right = (-1 if side is None else side for side in window)
    assert right in (-1, 0), "causal, or none"
    scale = query.size(-1) ** -0.5 if scale is None else scale
    for queries, keys in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        count, known = queries[1] - queries[0], keys[1] - keys[0]
        assert 0 < count <= max_q
        assert 0 < known <= max_k
        k = _of_query_heads(key[slice(*keys)], query)
        scores = torch.einsum("qhe,khe->hqk", _precise(query[slice(*queries)]), k) * scale
        distance = torch.arange(known - count, known)[:, None] - torch.arange(known)
        unseen = (distance < 0) if causal or right == 0 else torch.zeros_like(distance, dtype=torch.bool)
        unseen = unseen | (distance > left) if left >= 0 else unseen
        yield slice(*queries), slice(*keys), scores.masked_fill(unseen, -torch.inf), scale


def _forward(query, key, value, *given, scale=None, window_size_left=None, window_size_right=None, **others):
    *lengths, return_debug_mask = given
    assert not return_debug_mask
    assert not any(x is not None for x in others.values())
    window, outputs, sums = (window_size_left, window_size_right), [], []
    for _, keys, scores, _ in _documents(query, key, value, *lengths, scale, window):
        v = _of_query_heads(value[keys], query)
        outputs.append(torch.einsum("hqk,khe->qhe", scores.softmax(-1), v).to(query.dtype))
        sums.append(scores.logsumexp(-1))
    nothing = torch.empty(0)
    return torch.cat(outputs), torch.cat(sums, dim=1), torch.zeros(2, dtype=torch.uint64), nothing, nothing


def _backward(grad, query, key, value, output, lse, *given, scale=None, window_size_left=None, window_size_right=None):
    *lengths, rng_state, _ = given
    assert rng_state.dtype == torch.uint64
    assert grad.shape == output.shape == query.shape
    assert lse.shape == (query.size(1), len(query))
    assert lse.is_contiguous()
    dq, dk, dv = (torch.zeros_like(_precise(x)) for x in (query, key, value))
    of_documents = _documents(query, key, value, *lengths, scale, (window_size_left, window_size_right))
    for queries, keys, scores, factor in of_documents:
        dout = _precise(grad[queries])
        p = (scores - lse[:, queries, None]).exp()
        delta = (dout * output[queries]).sum(-1).t()[..., None]
        k, v = (_of_query_heads(x[keys], query) for x in (key, value))
        ds = p * (torch.einsum("qhe,khe->hqk", dout, v) - delta) * factor
        dq[queries] = torch.einsum("hqk,khe->qhe", ds, k)
        for total, weights, rows in ((dk, ds, _precise(query[queries])), (dv, p, dout)):
            of_keys = torch.einsum("hqk,qhe->khe", weights, rows)
            total[keys] = of_keys.unflatten(1, (key.size(1), -1)).sum(2)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _precise(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_query_heads(x, query):
    return _precise(x).repeat_interleave(query.size(1) // x.size(1), dim=1)
