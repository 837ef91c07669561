"""The token ids of a stream's documents over all ranks: each reads a share, and the next start none."""

from typing import Any

import torch.distributed as dist

from verl_ext.data import MultiDocDataset
from verl_ext.trainer.process_group import errors_told_once


def share_token_range(dataset: MultiDocDataset) -> None:
    """Give `dataset` its token_range, on every rank: from the cache, or by reading each token once.

    All ranks call it together; a mistake in the data is told once and ends all of them.
    """
    leads = dist.get_rank() == 0
    remembered: list[Any] = [None]
    with errors_told_once():
        if leads:
            remembered = [dataset.cached_token_range()]
    dist.broadcast_object_list(remembered)
    if remembered[0] is not None:
        dataset.token_range = remembered[0]
        return
    with errors_told_once():
        part = dataset.token_range_part(dist.get_rank(), dist.get_world_size())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    lowest, highest = zip(*filter(None, parts), strict=True)
    dataset.token_range = min(lowest), max(highest)
    with errors_told_once():
        if leads:
            dataset.cache_token_range()
