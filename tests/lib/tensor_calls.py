"""What torch is asked for: copies between devices, and counted operations."""

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class Copies(TorchDispatchMode):
    """A record of every copy between devices: its source, and whether the host can go on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []
        self.sources: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if function is torch.ops.aten._to_copy.default else args[1]
            target = kwargs.get("device", args[0].device)
            if source.device.type != torch.device(target).type:
                self.non_blocking.append(bool(kwargs.get("non_blocking", len(args) > 2 and args[2])))
                self.sources.append(source.untyped_storage().data_ptr())
        return function(*args, **kwargs)


class Made(NamedTuple):
    """A tensor that an operation returned."""

    operation: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int


class MadeTensors(TorchDispatchMode):
    """A record of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Made] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in (each for each in tree_leaves(output) if isinstance(each, torch.Tensor)):
            size = tensor.untyped_storage().nbytes()
            self.seen.append(Made(function.overloadpacket, tensor.dtype, tuple(tensor.shape), size))
        return output


def counted(model, lengths) -> float:
    """Count FLOPs of forward and backward, a document at a time; eager attention computes the whole square."""
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            model(torch.arange(length)[None] % 7, use_cache=False).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    squares = counts.pop(torch.ops.aten.bmm)
    return sum(counts.values()) + squares / 2
