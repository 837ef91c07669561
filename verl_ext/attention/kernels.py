"""Kernels for attention inside the documents of a pack, and where those documents begin and end.

| backend      | where                | what                                              |
|--------------|----------------------|---------------------------------------------------|
| `flash_attn` | CUDA, package needed | `flash_attn_varlen_func`                          |
| `varlen`     | CUDA, no dropout     | `torch.nn.attention.varlen.varlen_attn`, built in |
| `sdpa`       | anywhere             | `scaled_dot_product_attention`, per document      |

The first two need an Ampere GPU or a newer one, half precision and a head size that :func:`flash_limit` admits.
Each takes and gives ``[T, heads, E]``.

Legend: T tokens of a micro-batch with padding, D documents, H query heads, K key/value heads (H a multiple of K:
grouped-query attention), E head size.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from verl_ext.values import Options, check_choice, option

PACKED_ATTENTION = "verl_ext_packed"  # its name in `model.override_config.attn_implementation`


@dataclass(frozen=True)
class DocumentLayout:
    """Document boundaries of one flattened micro-batch, computed once on the host and handed to every layer.

    verl's own patched attention gathers and searches ``position_ids`` in every layer, with a collective and a device
    synchronisation each.
    """

    offsets: tuple[int, ...]  # D + 1 host integers from 0 to T; document d is [offsets[d], offsets[d + 1])
    cu_seqlens: torch.Tensor  # int32[D + 1], the same on the device of the attention
    max_length: int  # tokens of the longest document

    def padded(self, pad: int) -> "DocumentLayout":
        """Append ``pad`` tokens as one last pseudo-document, as Ulysses needs where T is no multiple of the ranks."""
        if pad == 0:
            return self
        end = self.offsets[-1] + pad
        return DocumentLayout(
            (*self.offsets, end), F.pad(self.cu_seqlens, (0, 1), value=end), max(self.max_length, pad)
        )


def document_layout(position_ids: torch.Tensor, device: torch.device | str = "cpu") -> DocumentLayout:
    """Boundaries from ``position_ids[T]`` on the host, which restart at 0 with every document.

    ```
    position_ids   0 1 2 | 0 1 2 3 | 0        offsets 0 3 7 8    max_length 4
    ```
    """
    assert position_ids.dim() == 1
    assert position_ids.numel() > 0
    assert position_ids.device.type == "cpu"
    assert int(position_ids[0]) == 0, "a micro-batch begins with a document's first token"
    starts = (position_ids == 0).nonzero().flatten()
    edges = torch.cat([starts, starts.new_tensor([position_ids.numel()])])
    return DocumentLayout(
        offsets=tuple(edges.tolist()),
        cu_seqlens=edges.to(torch.int32).to(device, non_blocking=True),
        max_length=int(edges.diff().max()),
    )


class KernelOptions(NamedTuple):
    """What a layer asks of a kernel beside its tensors."""

    scale: float | None = None  # factor on the logits; None: 1/√E
    window: int | None = None  # tokens that a token sees, itself included, as in transformers; None: all
    dropout: float = 0.0  # of attention weights

    @property
    def flash_window(self) -> tuple[int, int]:
        """The window as flash attention counts it: tokens to the left and to the right; causal."""
        return (-1 if self.window is None else self.window - 1, 0)


def sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout, options: KernelOptions
) -> torch.Tensor:
    """Causal attention of ``query[T, H, E]`` to ``key, value[T, K, E]``, a kernel call for each document."""
    outputs = []
    for start, end in zip(layout.offsets[:-1], layout.offsets[1:], strict=True):
        q, k, v = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        mask = _window_mask(end - start, options.window, query.device)
        given: dict[str, Any] = {"scale": options.scale, "dropout_p": options.dropout, "is_causal": mask is None}
        outputs.append(F.scaled_dot_product_attention(q, k, v, mask, **given, enable_gqa=True))
    return torch.cat(outputs, dim=2).squeeze(0).transpose(0, 1)


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """bool[length, length], True where seen; None where the window holds the whole document."""
    if window is None or window >= length:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout, options: KernelOptions
) -> torch.Tensor:
    """torch's built-in flash attention with cumulative lengths (torch ≥ 2.11); half precision on CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    assert not options.dropout, "choose_backend refuses it"
    groups = query.size(1) // key.size(1)
    grouped: dict[str, Any] = {}
    if groups > 1 and "enable_gqa" in signature(varlen_attn).parameters:
        grouped = {"enable_gqa": True}
    elif groups > 1:  # an early varlen_attn wants as many key/value heads as query heads
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    padded, lengths = _flash_arguments(query, value, layout)
    window = options.flash_window
    output = varlen_attn(query, key, padded, *lengths, scale=options.scale, window_size=window, **grouped)
    assert isinstance(output, torch.Tensor)
    return output[..., : value.size(-1)]


def flash_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: DocumentLayout, options: KernelOptions
) -> torch.Tensor:
    """The flash-attn package's varlen kernel; half precision on CUDA."""
    from flash_attn import flash_attn_varlen_func

    padded, lengths = _flash_arguments(query, value, layout)
    output = flash_attn_varlen_func(
        query,
        key,
        padded,
        *lengths,
        dropout_p=options.dropout,
        softmax_scale=options.scale,
        causal=True,
        window_size=options.flash_window,
        deterministic=os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1",  # set by engine.full_determinism
    )
    return output[..., : value.size(-1)]


def _flash_arguments(
    query: torch.Tensor, value: torch.Tensor, layout: DocumentLayout
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Values as wide as the queries, as flash kernels want (latent attention has narrower ones), and the lengths of
    queries and keys."""
    padded = F.pad(value, (0, query.size(-1) - value.size(-1)))
    return padded, (layout.cu_seqlens, layout.cu_seqlens, layout.max_length, layout.max_length)


KERNELS: dict[str, Callable[..., torch.Tensor]] = {"flash_attn": flash_attn, "varlen": varlen, "sdpa": sdpa}
BACKENDS = tuple(KERNELS)


@dataclass(frozen=True)
class AttentionOptions(Options):
    """Which kernel computes the attention inside the documents of a pack."""

    prefix: ClassVar[str] = "attention"

    backend: str = option("auto", "the kernel; auto: the fastest that runs", choices=("auto", *BACKENDS))


def in_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values in one type: autocast's, when layer norms or rotations under it gave fp32."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


def flash_limit(
    dtype: torch.dtype = torch.bfloat16, head_size: int = 128, capability: tuple[int, int] | None = None
) -> str | None:
    """What `flash_attn` and `varlen` need that is not given here; None where both run.

    capability: of the GPU, as ``torch.cuda.get_device_capability`` gives it; None is taken to be enough.
    """
    if capability is not None and capability < (8, 0):
        return f"a GPU of compute capability 8.0 (Ampere) or newer; got {capability[0]}.{capability[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"half precision (engine.mixed_precision.param_dtype); got {dtype}"
    if head_size > 256 or head_size % 8:
        return f"a head size that is a multiple of 8 up to 256; the model's is {head_size}"
    return None


def choose_backend(
    requested: str,
    device_type: str,
    limit: str | None = None,
    dropout: float = 0.0,
    flash_attn_installed: bool | None = None,
) -> str:
    """The backend that `attention.backend` stands for: ``auto`` takes the fastest that runs what is asked.

    limit: what :func:`flash_limit` says; dropout: of attention weights; flash_attn_installed: None to look.
    Raises ValueError where the name is none of them, or the kernel cannot run here.
    """
    check_choice("attention.backend", requested, ("auto", *BACKENDS))
    installed = has_flash_attn() if flash_attn_installed is None else flash_attn_installed
    if requested == "auto":
        if device_type != "cuda" or limit:
            return "sdpa"
        if installed:
            return "flash_attn"
        return "sdpa" if dropout else "varlen"
    if requested != "sdpa" and device_type != "cuda":
        raise ValueError(f"attention.backend={requested} needs a CUDA GPU; this run is on {device_type}")
    if requested == "varlen" and dropout:
        limit = limit or f"a model without attention dropout; the model's is {dropout}"
    if requested != "sdpa" and limit:
        raise ValueError(f"attention.backend={requested} needs {limit}; attention.backend=auto uses one that runs")
    if requested == "flash_attn" and not installed:
        raise ValueError(
            "attention.backend=flash_attn needs the flash-attn package (pip install 'verl-ext[gpu]'); "
            "attention.backend=auto uses torch's own varlen attention without it"
        )
    return requested


@lru_cache
def gpu_capability(device: int | None = None) -> tuple[int, int] | None:
    """Compute capability of the CUDA device, by default the current one; None without CUDA. It initialises CUDA."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


@lru_cache(maxsize=1)
def has_flash_attn() -> bool:
    """Whether the flash-attn package is installed."""
    return importlib.util.find_spec("flash_attn") is not None
