"""Attention inside the documents of a pack."""

from verl_ext.attention.backends import BACKENDS, choose_backend, flash_limit, gpu_capability, has_flash_attn
from verl_ext.attention.layout import DocumentLayout, document_layout

PACKED_ATTENTION = "verl_ext_packed"  # its name in `model.override_config.attn_implementation`

__all__ = [
    "BACKENDS",
    "PACKED_ATTENTION",
    "DocumentLayout",
    "choose_backend",
    "document_layout",
    "flash_limit",
    "gpu_capability",
    "has_flash_attn",
]
