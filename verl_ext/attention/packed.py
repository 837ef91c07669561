"""The Hugging Face attention ``verl_ext_packed``, for documents and Ulysses.

It is registered through transformers' ``AttentionInterface``, so no model is patched. The engine passes a
:class:`DocumentLayout` to the model's forward. The layout reaches attention as a keyword argument or, in models that
pass none on, through the `running_pack` of the attention module (verl_ext.layers.pack).

The ranks of Ulysses exchange heads before and after the kernel (parallel/ulysses.py). With a :class:`ContextLayout`
they do so inside a group of ranks, and keys and values travel between groups before the kernel or while it runs
(parallel/key_exchange.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, get_ulysses_sequence_parallel_world_size

from verl_ext.attention.head_groups import backward_by_groups_of_heads, by_groups_of_heads
from verl_ext.attention.kernels import (
    KERNELS,
    PACKED_ATTENTION,
    AttentionNeeds,
    Kernel,
    KernelDevice,
    KernelOptions,
    choose_backend,
    gpu_capability,
    in_autocast_dtype,
)
from verl_ext.attention.sinks import LseAttention
from verl_ext.parallel.key_exchange import ContextLayout
from verl_ext.parallel.shards import DocumentLayout
from verl_ext.parallel.ulysses import HeadPadding, join_heads, split_heads

# Keyword arguments that change nothing here: boundaries that the layout holds already, and what models return.
_READ_ELSEWHERE = {
    *("position_ids", "cache_position", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("logits_to_keep", "is_causal", "num_items_in_batch", "deterministic"),
}
_requested: str | Kernel = "auto"
_layout_required = False


def set_backend(requested: str | Kernel) -> None:
    """Choose this process's kernel: a name, ``auto``, or a kernel itself."""
    global _requested
    _requested = requested


def require_layout() -> None:
    """Refuse calls without a layout, which would mix packs' documents."""
    global _layout_required
    _layout_required = True


@dataclass(frozen=True)
class PositionNeeds:
    """What a module's attention needs of positions in documents.

    Attributes:
        chunk: tokens of a chunk, counted from a document's first token, inside which tokens see each other.
        query_scale: returns the factor ``[T/n]`` on the queries of this rank's tokens.
    """

    chunk: int | None = None
    query_scale: Callable[[], torch.Tensor] | None = None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    document_layout: DocumentLayout | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Return ``[1, T/n, H, E]``, the attention inside documents.

    It is that of ``query[1, H, T/n, E]`` to ``key, value[1, K, T/n, E]``, with n the sequence-parallel size.
    ``document_layout`` covers all T tokens; without one, each row is a document.
    """
    # The layout comes by keyword, or through the module of a model that passes no keywords to its layers.
    pack, needs = getattr(module, "running_pack", None), getattr(module, "position_needs", PositionNeeds())
    if document_layout is None and pack is not None:
        document_layout = pack.layout
    _refuse_unsupported(module, kwargs, masked=document_layout is not None and attention_mask is not None)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [B, T/n, heads, E]
    if needs.query_scale is not None and document_layout is not None:
        query = (query * needs.query_scale().view(1, -1, 1, 1)).to(query.dtype)
    if needs.chunk is not None and document_layout is not None:
        document_layout = document_layout.in_chunks(needs.chunk)

    # Ranks exchange tokens for heads. Zero heads come before, since each rank must get equally many.
    shared = document_layout if isinstance(document_layout, ContextLayout) else None
    group: Any = shared.groups.inside if shared else get_ulysses_sequence_parallel_group()
    ranks = get_ulysses_sequence_parallel_world_size(group)
    padding = HeadPadding.from_heads(query.size(2), key.size(2), ranks)
    query, key, value = padding.query(query), padding.key_value(key), padding.key_value(value)
    query, key, value = in_autocast_dtype(query, key, value)
    if ranks > 1:
        query, key, value = split_heads((query, key, value), group)  # [B, T, heads/n, E]
        if s_aux is not None:
            s_aux = padding.query(s_aux.view(1, 1, -1, 1)).flatten().chunk(ranks)[dist.get_rank(group)]

    # A batch without a layout has a document in each row; a kernel gets all rows as one sequence.
    if document_layout is None:
        document_layout = _rows_layout(module, query, key, attention_mask)
    rows, length = query.shape[:2]
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))  # [B · T, heads/n, E]

    # A kernel with a log-sum-exp sees own keys while those of other groups travel; others wait for all keys.
    options = KernelOptions(scaling, sliding_window, dropout, softcap, s_aux)
    kernel = _kernel_of(query, options)
    overlapped = shared.overlapped(backward_by_groups_of_heads(kernel.lse), options) if shared and kernel.lse else None
    if overlapped is None:
        output = document_layout.attend(by_groups_of_heads(kernel.whole), query, key, value, options)
    else:
        output = LseAttention.apply(query, key, value, s_aux, document_layout, options, overlapped)

    # Ranks exchange heads for tokens, and zero heads go.
    output = output.unflatten(0, (rows, length))  # [B, T, heads/n, E]
    if ranks > 1:
        output = join_heads(output, group)  # [B, T/n, heads, E]
    return padding.output(output).contiguous(), None


def _kernel_of(query: torch.Tensor, options: KernelOptions) -> Kernel:
    """Return this process's kernel, or for ``auto`` the fastest for a call."""
    if not isinstance(_requested, str):
        return _requested
    has_sinks, exact = options.sinks is not None, torch.are_deterministic_algorithms_enabled()
    needs = AttentionNeeds(query.dtype, query.size(-1), options.dropout, options.softcap, has_sinks, exact)
    capability = gpu_capability(query.device.index) if query.is_cuda else None
    return KERNELS[choose_backend(_requested, needs, KernelDevice(query.device.type, capability))]


def _refuse_unsupported(module: torch.nn.Module, kwargs: dict, masked: bool) -> None:
    """Raise ValueError if a layer needs what no backend computes."""
    unread = sorted(name for name, value in kwargs.items() if value is not None and name not in _READ_ELSEWHERE)
    unsupported = ["an attention mask of its own"] * masked + unread
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        unsupported.append("bidirectional attention")
    if unsupported:
        needs = f"model.path: {type(module).__name__} needs {', '.join(unsupported)}"
        raise ValueError(f"{needs}, which {PACKED_ATTENTION} does not compute")


def _rows_layout(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None
) -> DocumentLayout:
    """Return the layout of ``query[B, T, H, E]``, whose rows are documents."""
    if _layout_required:
        raise ValueError(f"model.path: {type(module).__name__} must be given its model's keyword arguments; it is not")
    if query.size(1) != key.size(1) or attention_mask is not None:
        raise ValueError(
            f"{PACKED_ATTENTION} trains packs and keeps no cache; load the model with attn_implementation=sdpa "
            "to generate"
        )
    rows, length = query.shape[:2]
    return DocumentLayout.from_lengths([length] * rows, query.device)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
