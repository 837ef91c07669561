"""Packs of random queries, keys and values."""

import torch

LENGTHS = (11, 1, 7, 18)


def attention_pack(lengths=LENGTHS, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``input_ids[T]`` and ``position_ids[T]`` of documents of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(64, (sum(lengths),), generator=generator)
    return ids, torch.cat([torch.arange(n) for n in lengths])
