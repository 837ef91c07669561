"""Megatron's indexed form of pretraining data: files, sample indices, windows and blends. numpy in, numpy out."""

from verl_ext.data.megatron.blend import (
    blend_order,
    check_weights,
    megatron_blend_order,
    megatron_source_samples,
    normalised,
)
from verl_ext.data.megatron.index import IndexWriter, TokenIndex
from verl_ext.data.megatron.samples import (
    BLEND_RULES,
    SampleIndices,
    build_sample_indices,
    cached_blend,
    cached_sample_indices,
    count_tokens,
    epochs_needed,
)
from verl_ext.data.megatron.windows import Pieces, TokenStream, Windows, in_order_starts, random_starts
from verl_ext.text.plain_text import optimal_dtype

__all__ = [
    "BLEND_RULES",
    "IndexWriter",
    "Pieces",
    "SampleIndices",
    "TokenIndex",
    "TokenStream",
    "Windows",
    "blend_order",
    "build_sample_indices",
    "cached_blend",
    "cached_sample_indices",
    "check_weights",
    "count_tokens",
    "epochs_needed",
    "in_order_starts",
    "megatron_blend_order",
    "megatron_source_samples",
    "normalised",
    "optimal_dtype",
    "random_starts",
]
