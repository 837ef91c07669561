"""Recurrences inside documents: the gated delta rule and Mamba 2.

Heads of a recurrence are independent. Ranks that share a pack exchange tokens for heads, as Ulysses does around
attention, run the recurrence over all T tokens for their own heads, and exchange back. All ranks of a pack take part,
groups of context parallelism included, because such layers have many heads (16 to 128).

Legend: L tokens of a rank, T of the pack, H heads, n ranks, P size of a head's values, N of its state.
Gated delta rule: https://arxiv.org/abs/2412.06464. State-space duality: https://arxiv.org/abs/2405.21060.
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version

from verl_ext.layers.pack import RunningPack, fla_lengths, import_fla
from verl_ext.options import first_line
from verl_ext.parallel.ulysses import join_heads, split_heads

_HOPPER = (9, 0)
# Upstream: flash-linear-attention 0.6 raises in the backward passes of its recurrences on Hopper with these versions of
# Triton, which compile them wrongly. To go when torch 2.13 is the oldest.
_WRONG_ON_HOPPER = (Version("3.4.0"), Version("3.7.1"))
_GATED, _KIMI = ("gated_delta_rule", "chunk_gated_delta_rule"), ("kda", "chunk_kda")
CHUNK = 64  # tokens whose pairs torch's state space computes at once


def delta_rule(
    pack: RunningPack,
    rule: Callable[..., tuple[torch.Tensor, Any]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Compute the gated delta rule of ``[1, L, H, ·]`` inside documents.

    ``beta`` is ``[1, L, H]``, and so are the decays ``g``, or ``[1, L, H, N]`` (Kimi's); queries and keys may have
    fewer heads. `rule` is transformers' function for one document, for devices without flash-linear-attention.
    """
    assert pack.layout is not None
    # A recurrence needs all tokens of a document in order, but its heads are independent: ranks split those.
    heads = value.size(2)
    if key.size(2) % pack.shards.ranks:  # else a rank's heads of keys are those of its values
        query, key = (x.repeat_interleave(heads // key.size(2), dim=2) for x in (query, key))
    by_channel = g.dim() == 4
    decays = g if by_channel else g.unsqueeze(-1)
    q, k, v, decay, rate = tokens_to_heads(pack, query, key, value, decays, beta.unsqueeze(-1))
    decay, rate = decay if by_channel else decay.squeeze(-1), rate.squeeze(-1)

    # The package computes all documents at once; transformers' function one at a time.
    kernel = _fla(*(_KIMI if by_channel else _GATED)) if value.is_cuda else None
    normed: dict[str, Any] = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    if kernel is not None:
        output, _state = kernel(q, k, v, g=decay, beta=rate, **normed, **fla_lengths(pack.layout))
    else:
        parts = zip(*(x.split(pack.layout.lengths, dim=1) for x in (q, k, v, decay, rate)), strict=True)
        output = torch.cat([rule(*qkv, g=g, beta=beta, **normed)[0] for *qkv, g, beta in parts], dim=1)
    return heads_to_tokens(pack, output, heads), None


def state_space(
    pack: RunningPack,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: object,
) -> torch.Tensor | tuple[torch.Tensor, None]:
    """Compute Mamba 2's recurrence of ``x[1, L, H, P]`` inside documents.

    It is called like mamba_chunk_scan_combined. ``dt[1, L, H]`` are steps in time before ``dt_bias[H]``, softplus and
    the clamp to `dt_limit`; ``A, D[H]`` rates of decay and weights of the values themselves; ``B, C[1, L, G, N]``
    belong to G groups of H/G heads. With `return_final_states` the result is a pair; the states are not computed.
    """
    assert pack.layout is not None
    heads, groups = x.size(2), B.size(2)
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    decay, steps = (steps * A.float()).unsqueeze(-1), steps.unsqueeze(-1)
    # The heads of a group share B and C. Each rank gets those of all groups if ranks do not divide groups and heads.
    ranks = pack.shards.ranks
    divides = groups % ranks == 0 and heads % ranks == 0
    if not divides:
        B, C = (t.repeat(1, 1, ranks, 1) for t in (B, C))
    v, b, c, log_decay = tokens_to_heads(pack, (x * steps).to(x.dtype), B, C, decay)
    first = 0 if divides else pack.shards.rank * v.size(2)
    group_of = (torch.arange(first, first + v.size(2), device=x.device) // (heads // groups)).clamp(max=b.size(2) - 1)
    b, c = b[:, :, group_of], c[:, :, group_of]

    # The package computes all documents at once; torch one at a time.
    kernel = _fla("simple_gla", "chunk_simple_gla") if x.is_cuda else None
    if kernel is not None:  # simple gated linear attention with C as queries and B as keys
        output, _state = kernel(c, b, v, g=log_decay.squeeze(-1), scale=1.0, **fla_lengths(pack.layout))
    else:
        parts = zip(*(t[0].split(pack.layout.lengths) for t in (v, log_decay[..., 0], b, c)), strict=True)
        output = torch.cat([_state_space_of_document(*(t.float() for t in part)) for part in parts]).unsqueeze(0)
    output = heads_to_tokens(pack, output.to(x.dtype), heads)
    if D is not None:
        output = output + (D.float().unsqueeze(-1) * x).to(x.dtype)
    return (output, None) if return_final_states else output


def _state_space_of_document(
    v: torch.Tensor, log_decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    """Return ``[L, H, P]`` of one document, by chunks of :data:`CHUNK` tokens.

    v is ``[L, H, P]``, log_decay ``[L, H]``, b and c ``[L, H, N]``. State S_t = exp(log_decay_t) · S_{t-1} + b_t v_tᵀ
    and output c_tᵀ S_t. Pairs of one chunk are computed at once; the state at the end of a chunk carries the rest.
    """
    length = len(v)
    pad = -length % CHUNK
    v, b, c = (F.pad(t, (0, 0, 0, 0, 0, pad)).unflatten(0, (-1, CHUNK)).transpose(1, 2) for t in (v, b, c))
    total = F.pad(log_decay, (0, 0, 0, pad)).unflatten(0, (-1, CHUNK)).transpose(1, 2).cumsum(-1)  # [chunks, H, CHUNK]
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    inside = (c @ b.transpose(-1, -2) * between.masked_fill(~causal, -torch.inf).exp()) @ v  # [chunks, H, CHUNK, P]
    added = (b * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2) @ v  # [chunks, H, N, P]
    state, before = torch.zeros_like(added[0]), []
    for chunk in range(len(added)):
        before.append(state)
        state = state * total[chunk, :, -1, None, None].exp() + added[chunk]
    carried = (c * total.exp().unsqueeze(-1)) @ torch.stack(before)
    return (inside + carried).transpose(1, 2).flatten(0, 1)[:length]


def tokens_to_heads(pack: RunningPack, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Exchange tokens for heads between ranks.

    ``x[1, L, H, ·]`` become ``[1, T, H/n, ·]`` in the pack's order; H is padded with zero heads. Tensors of one type
    travel in one all-to-all.
    """
    if pack.group is None:
        return tensors
    result = [F.pad(x, (0, 0, 0, -x.size(2) % pack.shards.ranks)) for x in tensors]
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        places = [place for place, x in enumerate(result) if x.dtype == dtype]
        for place, x in zip(places, split_heads([result[place] for place in places], pack.group), strict=True):
            result[place] = pack.shards.by_position(x.squeeze(0)).unsqueeze(0)
    return tuple(result)


def heads_to_tokens(pack: RunningPack, x: torch.Tensor, heads: int) -> torch.Tensor:
    """Exchange ``x[1, T, H/n, P]`` for ``[1, L, heads, P]``: `tokens_to_heads` back."""
    if pack.group is None:
        return x
    return join_heads(pack.shards.by_rank(x.squeeze(0)).unsqueeze(0), pack.group)[:, :, :heads]


def kernels_problem(capability: tuple[int, int] | None) -> str | None:
    """Return a line if flash-linear-attention, which is installed, would raise on this machine."""
    if torch.cuda.is_available():  # a machine that plans for another one imports no kernels
        try:
            import_fla("ops")
        except RuntimeError as error:
            return first_line(error)
    try:
        triton = version("triton")
    except PackageNotFoundError:
        return None
    if capability != _HOPPER or not _WRONG_ON_HOPPER[0] <= Version(triton) < _WRONG_ON_HOPPER[1]:
        return None
    right, has = f"{_WRONG_ON_HOPPER[1]} or newer on a Hopper GPU (torch 2.13 brings it)", f"triton {triton}"
    return f"flash-linear-attention needs triton {right}, or to be uninstalled; got {has} and torch {torch.__version__}"


@cache
def _fla(module: str, name: str) -> Callable[..., Any] | None:
    """Return a function of flash-linear-attention's `ops`; None without the package."""
    try:
        return getattr(import_fla(f"ops.{module}"), name)
    except ImportError:
        return None
