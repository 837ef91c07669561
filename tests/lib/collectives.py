"""Record the bytes that a process sends in all-to-alls, which must be its only collectives."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist

_OTHERS = ("all_to_all", "all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "reduce_scatter_tensor")


@contextmanager
def recorded_all_to_alls() -> Iterator[list[int]]:
    """Record the bytes that each ``all_to_all_single`` sends, in order, including its own rank's share."""
    sent: list[int] = []
    original = dist.all_to_all_single

    def recorded(output: torch.Tensor, rows: torch.Tensor, *args: object, **kwargs: object) -> object:
        sent.append(rows.numel() * rows.element_size())
        return original(output, rows, *args, **kwargs)

    with ExitStack() as patches:
        patches.enter_context(patch.object(dist, "all_to_all_single", recorded))
        for name in _OTHERS:
            patches.enter_context(patch.object(dist, name, side_effect=AssertionError(name)))
        yield sent
