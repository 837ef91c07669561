"""Attention inside the documents of a pack."""

from verl_ext.attention.heads import HeadPadding
from verl_ext.attention.kernels import (
    BACKENDS,
    PACKED_ATTENTION,
    AttentionOptions,
    DocumentLayout,
    choose_backend,
    document_layout,
    flash_limit,
    gpu_capability,
    has_flash_attn,
)
