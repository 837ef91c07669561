"""Attention inside the documents of a pack."""

from verl_ext.attention.kernels import (
    BACKENDS,
    PACKED_ATTENTION,
    AttentionNeeds,
    AttentionOptions,
    KernelDevice,
    choose_backend,
    fallback_notices,
    flash_limit,
    gpu_capability,
    unusable,
)
