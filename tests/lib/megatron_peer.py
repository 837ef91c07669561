"""megatron-core, from the extra `test`, imported without its warnings about parts that need a GPU."""

import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if sys.platform == "darwin":
    pytest.skip("megatron-core has no build for macOS", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset, helpers, indexed_dataset, utils

__all__ = ["gpt_dataset", "helpers", "indexed_dataset", "megatron_file", "open_blend", "open_gpt_dataset", "utils"]


def megatron_file(prefix: Path, documents: list[list[list[int]]], dtype: Any) -> Path:
    """Write its index of documents, each a list of sequences of token ids."""
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        builder.add_document([token for sequence in sequences for token in sequence], [*map(len, sequences)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def open_gpt_dataset(
    prefix: str, documents: np.ndarray, seq_len: int, num_samples: int, seed: int, cache: str | None = None
) -> Any:
    """Open its GPTDataset over some documents (int32) of an index."""
    index = indexed_dataset.IndexedDataset(prefix)
    config = _config(([prefix], None), seq_len, seed, cache)
    return gpt_dataset.GPTDataset(index, prefix, documents, num_samples, utils.Split.train, config)


def open_blend(
    prefixes: list[str], weights: list[float] | None, seq_len: int, num_samples: int | None, seed: int
) -> Any:
    """Build a training set of whole indices with its BlendedMegatronDatasetBuilder. Caches lie beside the indices."""
    builder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder(
        gpt_dataset.GPTDataset, [num_samples, 0, 0], lambda: True, _config((prefixes, weights), seq_len, seed, None)
    )
    return builder.build()[0]


def _config(
    blend: tuple[list[str], list[float] | None], seq_len: int, seed: int, cache: str | None
) -> gpt_dataset.GPTDatasetConfig:
    return gpt_dataset.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        blend=blend,
        split="1,0,0",
        tokenizer=types.SimpleNamespace(vocab_size=1000, eod=0, pad=-1, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache=cache,
    )
