"""A sharded tensor in one piece."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def whole_on_first_rank(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on rank 0's host memory, nothing elsewhere; every rank takes part in the gather."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
    return full.cpu() if dist.get_rank() == 0 else full.new_empty(0)
