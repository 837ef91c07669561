"""megatron-core, which the extra `test` installs, imported without what it says of parts that need a GPU."""

import types
import warnings
from typing import Any

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset, utils

__all__ = ["gpt_dataset", "helpers", "indexed_dataset", "open_gpt_dataset", "utils"]


def open_gpt_dataset(
    prefix: str, documents: np.ndarray, seq_len: int, num_samples: int, seed: int, cache: str | None = None
) -> Any:
    """Its GPTDataset over some documents (int32) of an index."""
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=types.SimpleNamespace(vocab_size=1000, eod=0, pad=-1, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache=cache,
    )
    index = indexed_dataset.IndexedDataset(prefix)
    return gpt_dataset.GPTDataset(index, prefix, documents, num_samples, utils.Split.train, config)
