"""Attention inside the documents of a pack."""

from verl_ext.attention.backends import BACKENDS, choose_backend, has_flash_attn
from verl_ext.attention.layout import DocumentLayout, document_layout

__all__ = ["BACKENDS", "DocumentLayout", "choose_backend", "document_layout", "has_flash_attn"]
