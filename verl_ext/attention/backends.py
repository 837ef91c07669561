"""Three kernels for attention inside the documents of a pack; each takes and gives ``[T, heads, head size]``.

| backend      | where                | what                                              |
|--------------|----------------------|---------------------------------------------------|
| `flash_attn` | CUDA, package needed | `flash_attn_varlen_func`                          |
| `varlen`     | CUDA                 | `torch.nn.attention.varlen.varlen_attn`, built in |
| `sdpa`       | anywhere             | `scaled_dot_product_attention`, per document      |

Legend: T tokens, H query heads, K key/value heads (H a multiple of K: grouped-query attention), E head size.
"""

import importlib.util
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F

from verl_ext.attention.layout import DocumentLayout

Backend = Callable[..., torch.Tensor]
BACKENDS = ("flash_attn", "varlen", "sdpa")


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: DocumentLayout,
    *,
    scale: float | None,
    window: int | None,
    dropout: float,
) -> torch.Tensor:
    """Causal attention of ``query[T, H, E]`` to ``key, value[T, K, E]``, one document at a time.

    No document's result depends on another, to the last bit: each is its own kernel call.
    """
    outputs = []
    for start, end in zip(layout.offsets[:-1], layout.offsets[1:], strict=True):
        q, k, v = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        mask = None if window is None or window >= end - start else _window_mask(end - start, window, query.device)
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, is_causal=mask is None, enable_gqa=True
            )
        )
    return torch.cat(outputs, dim=2).squeeze(0).transpose(0, 1)


@lru_cache(maxsize=8)
def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """bool[length, length]: token t sees itself and the ``window - 1`` tokens before it, as in transformers."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: DocumentLayout,
    *,
    scale: float | None,
    window: int | None,
    dropout: float,
) -> torch.Tensor:
    """torch's built-in flash attention with cumulative lengths (torch ≥ 2.11); half precision on CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise ValueError(f"attention.backend=varlen has no attention dropout; the model's config asks for {dropout}")
    return varlen_attn(
        query,
        key,
        value,
        layout.cu_seqlens,
        layout.cu_seqlens,
        layout.max_length,
        layout.max_length,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.size(1) != key.size(1),
    )


def flash_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: DocumentLayout,
    *,
    scale: float | None,
    window: int | None,
    dropout: float,
) -> torch.Tensor:
    """The flash-attn package's varlen kernel; half precision on CUDA."""
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        query,
        key,
        value,
        layout.cu_seqlens,
        layout.cu_seqlens,
        layout.max_length,
        layout.max_length,
        dropout_p=dropout,
        softmax_scale=scale,
        causal=True,
        window_size=(-1 if window is None else window - 1, 0),
    )


def choose_backend(requested: str, device_type: str) -> str:
    """The backend that `attention.backend` stands for on a device: ``auto`` takes the fastest that is there.

    Raises:
        ValueError: the name is none of them, or the kernel cannot run here.
    """
    if requested == "auto":
        if device_type != "cuda":
            return "sdpa"
        return "flash_attn" if has_flash_attn() else "varlen"
    if requested not in BACKENDS:
        raise ValueError(f"attention.backend must be auto, {', '.join(BACKENDS)}; got {requested}")
    if requested != "sdpa" and device_type != "cuda":
        raise ValueError(f"attention.backend={requested} needs a CUDA GPU; this run is on {device_type}")
    if requested == "flash_attn" and not has_flash_attn():
        raise ValueError(
            "attention.backend=flash_attn needs the flash-attn package (pip install 'verl-ext[gpu]'); "
            "attention.backend=auto uses torch's own varlen attention without it"
        )
    return requested


@lru_cache(maxsize=1)
def has_flash_attn() -> bool:
    """Whether the flash-attn package is installed."""
    return importlib.util.find_spec("flash_attn") is not None


FUNCTIONS: dict[str, Backend] = {"flash_attn": flash_attn, "varlen": varlen, "sdpa": sdpa}
