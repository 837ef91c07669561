"""Strict CPU functions in place of flash kernels: torch's own, those of flash-attn 2.8.3, and FlashAttention-3.

They have the real signatures, and refuse what the C++ of the real ones refuses or would read wrongly: types, strides
that are no multiple of 16 bytes, lengths that are no int32 or leave rows uncovered, wide heads, flags of another type.
Their backward knows no more than the C++ does: it trusts the output and the log-sum-exp that it receives.
"""

import importlib.machinery
import sys
from collections import Counter
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

_HALF = (torch.float16, torch.bfloat16)
# The schema of hopper/flash_api.cpp.
_FA3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = "
    "None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, "
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None, "
    "Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int "
    "window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, Tensor? "
    "scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_FA3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? "
    "seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, float? "
    "softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, float "
    "softcap = 0.0, bool deterministic = False, int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_accepted: set[torch.dtype] = set(_HALF)
_registered: dict[str, torch.library.Library] = {}  # keeps libraries alive, which else unregister their functions
CALLS: Counter[str] = Counter()  # of the kernels in this process, by name


def register_flash_stand_ins(*exact: torch.dtype) -> None:
    """Let torch's varlen attention run on the CPU in this process, in half precision and in the types of `exact`."""
    _accept(exact)
    _implement(torch_forward, torch_backward)


def flash_attn_package(*exact: torch.dtype) -> ModuleType:
    """Return a package flash-attn, for ``sys.modules``."""
    _accept(exact)
    module = ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


def register_fa3_stand_ins(*exact: torch.dtype) -> None:
    """Give this process FlashAttention-3, which torch's own bridge calls; by :func:`unusable` as on a Hopper GPU."""
    import torch.nn.attention._fa3 as bridge

    from verl_ext.attention import unusable

    _accept(exact)
    if "fa3" in _registered:
        return
    library = _registered["fa3"] = torch.library.Library("flash_attn_3", "DEF")
    for schema, function in ((_FA3_FORWARD, fa3_forward), (_FA3_BACKWARD, fa3_backward)):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")
    module = sys.modules["flash_attn_interface"] = ModuleType("flash_attn_interface")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn_interface", None)
    unusable.cache_clear()
    assert unusable("fa3") is None
    # What the bridge asks of a GPU; all else that it asks stays.
    bridge._get_device_major = lambda device: 9
    bridge._fa3_common_support_error = _with_gpu(bridge._fa3_common_support_error)
    _implement(bridge._fa3_flash_attention_forward_impl_default, bridge._fa3_flash_attention_backward_impl)


def _accept(exact: tuple[torch.dtype, ...]) -> None:
    _accepted.clear()
    _accepted.update((*_HALF, *exact))


def _implement(forward: Any, backward: Any) -> None:
    if "aten" not in _registered:
        library = _registered["aten"] = torch.library.Library("aten", "IMPL")
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")


def _with_gpu(check: Any) -> Any:
    def run(query: torch.Tensor, tensors: Any, *given: Any) -> str | None:
        problem = check(query, tensors, *given)
        return None if problem == "inputs must be CUDA tensors" else problem

    return run


def require(condition: Any, requirement: str) -> None:
    """Raise as the C++ does: a kernel's caller sees a RuntimeError."""
    if not condition:
        raise RuntimeError(requirement)


def check_call(query, key, value, cu_q, cu_k, max_q, max_k, dropout, scale, causal, window, softcap=0.0, reads=True):
    """Raise RuntimeError for what a kernel refuses, or would compute wrongly.

    reads: False for tensors without data, whose lengths cannot be looked at.
    """
    device = query.device
    require(query.dtype in _accepted, f"only fp16 and bf16; got {query.dtype}")
    require(key.dtype == value.dtype == query.dtype, f"one type; got {query.dtype}, {key.dtype}, {value.dtype}")
    for x in (query, key, value):
        require(x.device == device, f"all on {device}; got {x.device}")
        require(x.dim() == 3, f"[T, heads, E]; got {tuple(x.shape)}")
        require(x.stride(-1) == 1, f"a contiguous last dimension; got strides {x.stride()}")
        # A thread loads 16 bytes, which are 8 numbers of half precision.
        steps = [step for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
        require(not any(step % 8 for step in (*steps, x.storage_offset())), f"aligned rows; got {x.stride()}")
    heads, head_size = query.shape[1:]
    require(head_size <= 256 and head_size % 8 == 0, f"a head size that is a multiple of 8 up to 256; got {head_size}")
    require(key.shape == value.shape and key.size(2) == head_size, f"one head size; got {key.shape}, {value.shape}")
    require(heads % key.size(1) == 0, f"key heads that divide query heads; got {key.size(1)} and {heads}")
    for cu in (cu_q, cu_k):
        require(cu.dtype == torch.int32, f"int32 cu_seqlens; got {cu.dtype}")
        require(cu.device == device, f"cu_seqlens on {device}; got {cu.device}")
        require(cu.dim() == 1 and cu.is_contiguous() and cu.shape == cu_q.shape and len(cu) > 1, "flat cu_seqlens")
    for longest in (max_q, max_k):
        require(type(longest) is int and longest > 0, f"a host int as max_seqlen; got {longest!r}")
    require(type(dropout) is float and type(softcap) is float, f"floats; got {dropout!r}, {softcap!r}")
    require(dropout == 0, "no dropout: nothing stands in for the kernels' random numbers")
    require(scale is None or type(scale) is float, f"a float as scale; got {scale!r}")
    require(type(causal) is bool and all(type(side) is int for side in window), f"got {causal!r}, {window!r}")
    require(window[1] in (-1, 0), f"causal, or none; got a right window of {window[1]}")
    if reads:
        for cu, rows, longest in ((cu_q, len(query), max_q), (cu_k, len(key), max_k)):
            sizes = cu.diff().tolist()
            require(cu[0] == 0 and cu[-1] == rows, f"cu_seqlens from 0 to {rows}; got {cu[0]} to {cu[-1]}")
            require(min(sizes) > 0, "documents with tokens")
            require(max(sizes) == longest, f"the longest document's length {max(sizes)}; got {longest}")
    # More queries than keys: the first rows of the output would be empty.
    require(not (reads and (causal or window[1] == 0)) or not (cu_q.diff() > cu_k.diff()).any(), "keys for all queries")


def check_backward(grad, query, output, lse) -> None:
    """Raise RuntimeError for what a kernel's backward refuses, beside what its forward does."""
    for x in (grad, output):
        require(x.dtype == query.dtype and x.device == query.device, f"{query.dtype} on {query.device}; got {x.dtype}")
        require(x.shape == query.shape, f"{tuple(query.shape)}; got {tuple(x.shape)}")
        require(x.stride(-1) == 1, f"a contiguous last dimension; got strides {x.stride()}")
    kind = torch.promote_types(query.dtype, torch.float32)
    require(lse.dtype == kind and lse.shape == (query.size(1), len(query)), f"{kind} [H, T]; got {lse.dtype}")
    require(lse.is_contiguous() and lse.device == query.device, "a contiguous log-sum-exp")


# --- the formulas ---------------------------------------------------------------------------------------------------


def _precise(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_query_heads(x, query):
    return _precise(x).repeat_interleave(query.size(1) // x.size(1), dim=1)


def _documents(query, key, cu_q, cu_k, scale, causal, window, softcap):
    """Yield each document's places of queries and keys, its scores ``[H, Q, K]`` and their slope before the cap."""
    for queries, keys in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        count, known = queries[1] - queries[0], keys[1] - keys[0]
        k = _of_query_heads(key[slice(*keys)], query)
        scores = torch.einsum("qhe,khe->hqk", _precise(query[slice(*queries)]), k) * scale
        slope = torch.full_like(scores, scale)
        if softcap:
            capped = torch.tanh(scores / softcap)
            scores, slope = capped * softcap, slope * (1 - capped**2)
        distance = torch.arange(known - count, known)[:, None] - torch.arange(known)
        unseen = (distance < 0) if causal or window[1] == 0 else torch.zeros_like(distance, dtype=torch.bool)
        unseen = unseen | (distance > window[0]) if window[0] >= 0 else unseen
        yield slice(*queries), slice(*keys), scores.masked_fill(unseen, -torch.inf), slope


@torch.autocast("cpu", enabled=False)  # which is not seen in C++
def attend(query, key, value, cu_q, cu_k, max_q, max_k, dropout, scale, causal, window, softcap=0.0):
    """Check a call, and return its output and log-sum-exp."""
    check_call(query, key, value, cu_q, cu_k, max_q, max_k, dropout, scale, causal, window, softcap)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    outputs, sums = [], []
    for _, keys, scores, _ in _documents(query, key, cu_q, cu_k, scale, causal, window, softcap):
        outputs.append(torch.einsum("hqk,khe->qhe", scores.softmax(-1), _of_query_heads(value[keys], query)))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs).to(query.dtype), torch.cat(sums, dim=1)


@torch.autocast("cpu", enabled=False)
def gradients(grad, query, key, value, output, lse, *of_call):
    """Check a backward call, and return the gradients of queries, keys and values."""
    check_call(query, key, value, *of_call)
    check_backward(grad, query, output, lse)
    cu_q, cu_k, _, _, _, scale, causal, window, *cap = of_call
    scale = query.size(-1) ** -0.5 if scale is None else scale
    dq, dk, dv = (torch.zeros_like(_precise(x)) for x in (query, key, value))
    of_documents = _documents(query, key, cu_q, cu_k, scale, causal, window, *(cap or (0.0,)))
    for queries, keys, scores, slope in of_documents:
        dout = _precise(grad[queries])
        p = (scores - lse[:, queries, None]).exp()
        delta = (dout * output[queries]).sum(-1).t()[..., None]
        k, v = (_of_query_heads(x[keys], query) for x in (key, value))
        ds = p * (torch.einsum("qhe,khe->hqk", dout, v) - delta) * slope
        dq[queries] = torch.einsum("hqk,khe->qhe", ds, k)
        for total, weights, rows in ((dk, ds, _precise(query[queries])), (dv, p, dout)):
            of_keys = torch.einsum("hqk,qhe->khe", weights, rows)
            total[keys] = of_keys.unflatten(1, (key.size(1), -1)).sum(2)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


# --- torch's operations, under varlen_attn --------------------------------------------------------------------------


def _sides(left, right):
    return tuple(-1 if side is None else side for side in (left, right))


def torch_forward(
    *given, scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, **more
):
    """Stand in for ``aten._flash_attention_forward``."""
    *tensors_and_lengths, causal, return_debug_mask = given
    require(not return_debug_mask and seqused_k is alibi_slopes is None, "what training does not use")
    require(all(x is None for x in more.values()), f"what training does not use; got {more}")
    CALLS["torch"] += 1
    output, lse = attend(*tensors_and_lengths, scale, causal, _sides(window_size_left, window_size_right))
    nothing = torch.empty(0)
    return output, lse, torch.zeros(2, dtype=torch.uint64), nothing, nothing


def torch_backward(grad, query, key, value, output, lse, *given, scale=None, **window):
    """Stand in for ``aten._flash_attention_backward``, which makes both gradients and output contiguous."""
    *lengths, dropout, causal, rng_state, _ = given
    require(rng_state.dtype == torch.uint64 and rng_state.numel() == 2, f"a seed; got {rng_state.dtype}")
    sides = _sides(window.get("window_size_left"), window.get("window_size_right"))
    contiguous = grad.contiguous(), query, key, value, output.contiguous(), lse
    return gradients(*contiguous, *lengths, dropout, scale, causal, sides)


# --- flash-attn 2.8.3 -----------------------------------------------------------------------------------------------


class _FlashAttnVarlenFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, *of_call):
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        output, lse = attend(query, key, value, *of_call)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.of_call = of_call
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, output, lse = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        return *gradients(grad, query, key, value, output, lse, *ctx.of_call), *[None] * len(ctx.of_call)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Stand in for the package's function; its backward adds in one order with or without `deterministic`."""
    require(type(deterministic) is bool, f"a bool as deterministic; got {deterministic!r}")
    require(alibi_slopes is block_table is None and not return_attn_probs, "what training does not use")
    CALLS["flash_attn"] += 1
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _FlashAttnVarlenFunc.apply(
        q, k, v, *lengths, dropout_p, softmax_scale, causal, (window_size[0], window_size[1]), softcap
    )


# --- FlashAttention-3, under torch's bridge -------------------------------------------------------------------------


def _arguments(schema: str, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name; the dispatcher leaves out trailing defaults."""
    arguments = torch._C.parse_schema(f"flash_attn_3::{schema}").arguments
    defaults = {a.name: a.default_value for a in arguments}
    return {**defaults, **dict(zip(defaults, given, strict=False)), **named}


def _fa3_call(a: dict[str, Any]) -> tuple[Any, ...]:
    window = a["window_size_left"], a["window_size_right"]
    lengths = (a[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"))
    return *lengths, 0.0, a["softmax_scale"], a["is_causal"], window, a["softcap"]


def fa3_forward(*given: Any, **named: Any) -> Any:
    """Stand in for ``flash_attn_3::fwd``."""
    a = _arguments(_FA3_FORWARD, given, named)
    unused = "k_new v_new q_v out cu_seqlens_k_new seqused_q seqused_k page_table kv_batch_idx leftpad_k rotary_cos"
    require(all(a[name] is None for name in unused.split()), "what training does not use")
    require(a["attention_chunk"] == 0, "whole documents")
    CALLS["fa3"] += 1
    nothing = torch.empty(0)
    return *attend(a["q"], a["k"], a["v"], *_fa3_call(a)), nothing, nothing.clone()


def fa3_backward(*given: Any, **named: Any) -> Any:
    """Stand in for ``flash_attn_3::bwd``, whose deterministic form knows no heads above 192."""
    a = _arguments(_FA3_BACKWARD, given, named)
    require(a["seqused_q"] is a["seqused_k"] is None, "what training does not use")
    require(not a["deterministic"] or a["q"].size(-1) <= 192, "Deterministic backward not supported for hdim 256.")
    of_inputs = gradients(*(a[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse")), *_fa3_call(a))
    for name, found in zip(("dq", "dk", "dv"), of_inputs, strict=True):
        require(a[name].dtype == found.dtype and a[name].stride(-1) == 1, f"a place for {name}")
        a[name].copy_(found)
    return tuple(torch.empty(0) for _ in range(5))
