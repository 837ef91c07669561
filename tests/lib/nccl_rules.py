"""What NCCL refuses, or does wrongly, of collectives that gloo takes."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# ncclDataType of ProcessGroupNCCL: int16 and unsigned integers above a byte have none.
_TYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
}
_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
_WITHOUT_DATA = ("barrier", "monitored_barrier", "wait_tensor")


def _flat(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _flat(value)


def nccl_problem(func: Any, args: Any, device: str) -> str | None:
    """Return what NCCL refuses of an operation of ``c10d`` over tensors of a GPU; None if it runs.

    device: the type of tensors that NCCL gets. Those of the host go over gloo ("cpu:gloo,cuda:nccl").
    """
    name = func._schema.name.partition("::")[2]
    tensors = list(_flat(args))
    ours = [x for x in tensors if x.device.type == device]
    if not ours or name in _WITHOUT_DATA:
        return None
    if len(ours) < len(tensors):
        return f"{name} of tensors on {sorted({str(x.device) for x in tensors})}"
    if wrong := {x.dtype for x in ours} - _TYPES:
        return f"{name} of {wrong}, which NCCL does not have"
    if not all(x.is_contiguous() for x in ours):
        return f"{name} of tensors with strides {[x.stride() for x in ours if not x.is_contiguous()]}"
    if len({x.dtype for x in ours}) > 1:
        return f"{name} between types {sorted({str(x.dtype) for x in ours})}"
    of_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    if (boxed := of_name.get("reduce_op")) is not None:
        op = boxed.op()
        if any(op == each for each in _BITWISE):
            return f"{name} by bits"
        if ours[0].dtype == torch.bool and op == dist.ReduceOp.AVG:
            return f"{name}: a mean of booleans"
    return None


class NcclRules(TorchDispatchMode):
    """Refuse what NCCL would refuse if tensors of the host lay on a GPU."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls += 1
            if problem := nccl_problem(func, args, "cpu"):
                raise RuntimeError(problem)
        return func(*args, **(kwargs or {}))
