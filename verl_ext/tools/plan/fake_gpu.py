"""A GPU that computes nothing and holds no data, only sizes.

Its tensors are fake (torch's ``FakeTensorMode``): they have a shape, a type, a device and a storage with a size.
The real model, engine and FSDP2 run on it operation by operation, autograd and autocast included, on any machine and
for any number of ranks (torch's ``fake`` process group). Tensors of the host stay real, so that code may read lengths
and masks there. A copy from the GPU to the host is fake too, and counted as host memory.

torch without CUDA cannot run autograd on fake CUDA tensors. Python can be the backend of only one device, PrivateUse1,
which is named ``gpu`` here. All of this is global to a process: :mod:`verl_ext.tools.plan.report` starts one for it.
"""

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from verl_ext.cpu_platform import CPUPlatform
from verl_ext.tools.plan.caching_allocator import Event

GPU = "gpu"
OTHER = "other"  # the kind of everything that is allocated outside the steps

# The operations that autocast computes in its own type and in fp32 on CUDA, as far as language models use them:
# https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior
_IN_AUTOCAST_TYPE = "linear matmul mm mv bmm addmm addmv addbmm baddbmm conv1d conv2d prelu"
_IN_FP32 = (
    "layer_norm native_layer_norm group_norm softmax log_softmax exp expm1 log log2 log10 log1p pow rsqrt reciprocal "
    "softplus sum prod cumsum cumprod norm logsumexp mse_loss nll_loss cross_entropy_loss"
)
# CPUs and GPUs have a kernel for these. On the fake GPU, torch would split them into parts with temporary tensors.
_WITH_KERNEL = ("silu_backward", "mish_backward")
_AUTOCAST = "AutocastPrivateUse1"


class _Stream(torch.cpu.Stream):
    """A stream of the host that records events, for FSDP replicas."""

    def record_event(self, event: Any = None) -> Any:
        return event or torch.cpu.Event()


class _GPUModule:
    """The part of ``torch.cuda`` that FSDP, autocast and checkpointing call."""

    Stream, Event = _Stream, torch.cpu.Event
    current_stream, stream = staticmethod(torch.cpu.current_stream), staticmethod(torch.cpu.stream)
    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device, device_count = staticmethod(lambda: 0), staticmethod(lambda: 1)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


class FakePlatform(CPUPlatform):
    """The platform of verl whose device is the fake GPU."""

    device_name = vendor_name = property(lambda self: GPU)

    def current_device(self) -> Any:
        """Return the only device."""
        return f"{GPU}:0"

    def communication_backend_name(self) -> str:
        """Return torch's backend whose collectives do nothing."""
        return "fake"


_registered: list[Any] = []  # keeps each Library alive, because torch drops its kernels together with it


def register_gpu() -> None:
    """Add the fake GPU, with CUDA's autocast, to this process; call once."""
    _setup_privateuseone_for_python_backend(GPU, _GPUModule())
    _registered.append(torch.library.Library("_", "IMPL", _AUTOCAST))
    _registered[-1].fallback(torch.library.fallthrough_kernel)
    kernels = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in _WITH_KERNEL:
        kernels.impl(name, _unreachable)
    casts = torch.library.Library("aten", "IMPL", _AUTOCAST)
    for names, dtype in ((_IN_AUTOCAST_TYPE, None), (_IN_FP32, torch.float32)):
        for packet in (getattr(torch.ops.aten, name) for name in names.split()):
            for overload in packet.overloads():
                if not overload.endswith("out"):
                    op = getattr(packet, overload)
                    casts.impl(op, _autocast(op, dtype))
    _registered.extend((kernels, casts))


def _unreachable(*_: Any, **__: Any) -> None:
    raise AssertionError("the tracker computes shapes before a kernel is called")


def _autocast(op: Callable, dtype: torch.dtype | None) -> Callable:
    """Return the operation with floating-point GPU tensors in `dtype` (None: autocast's)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        target = dtype or torch.get_autocast_dtype(GPU)

        def cast(x: torch.Tensor) -> torch.Tensor:
            is_cast = x.is_floating_point() and x.dtype != torch.float64 and x.device.type == GPU
            return x.to(target) if is_cast else x

        with torch.autocast(GPU, enabled=False):
            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
            return op(*args, **kwargs)

    return run


_nested = itertools.count(10**6)  # above the numbers that real nested tensors have


class _NoData(FakeTensorMode):
    """A fake tensor mode for a device unknown to torch's build."""

    avoid_device_init = property(lambda self: True)  # type: ignore[assignment]

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> Any:
        """Return a symbol for the row length of a nested tensor."""
        return torch._C._get_nested_int(next(_nested), 1)


class MemoryTracker(TorchDispatchMode):
    """A counter of a device's memory, by the kind of its use.

    Args:
        device: type of the device whose tensors are counted, ``gpu`` or ``cpu``.
        fake: whether tensors of that device hold no data. False counts the tensors of a real run.
        block: bytes that the size of each storage is rounded up to.

    Attributes:
        kind: the kind of allocations from now on; :meth:`allocating` sets it temporarily.
        now, peak: bytes by kind on the device, at present and when their sum was highest.
        host_now, host_peak: bytes of copies from the device to the host.
        events: each change of a block on the device: its number, its bytes after it and the number of the stream, until
            :meth:`take_events`. Blocks and streams are numbered in the order in which they are first seen.
        on_range: is called with the name of each profiler range (``torch.profiler.record_function``) that begins, and
            may return a function to call when that range ends.
        on_collective: is called with each operation of ``c10d`` and its arguments.
    """

    def __init__(self, device: str, fake: bool = True, block: int = 1) -> None:
        super().__init__()
        self.device, self.block = device, block
        self.kind = OTHER
        self.now: dict[str, int] = defaultdict(int)
        self.peak: dict[str, int] = {}
        self.host_now = self.host_peak = 0
        self.events: list[Event] = []
        self.on_range: Callable[[str], Callable[[], Any] | None] = lambda name: None
        self.on_collective: Callable[[Any, Any], None] = lambda func, args: None
        self._ranges: list[Callable[[], Any] | None] = []
        self._total = self._peak_total = 0
        self._fake = _NoData() if fake else None
        self._blocks: dict[int, _Block] = {}
        self._numbers = itertools.count()
        self._streams: dict[Any, int] = {}

    def __enter__(self) -> "MemoryTracker":
        self._resize = resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (block := self._blocks.get(id(storage))) is not None:
                self._add(block, self._rounded(size, block) - block.bytes)
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[assignment, method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    @contextmanager
    def allocating(self, kind: str) -> Iterator[None]:
        """Count allocations inside the context as of this kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def forget_peak(self) -> None:
        """Measure the peak from now on."""
        self._peak_total, self.host_peak = 0, self.host_now
        self._keep_peak()

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    def assign(self, kind: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Count tensors (of a DTensor, the local part) as of this kind."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                with torch.no_grad():
                    tensor = tensor.to_local()
            if tensor is None or not self._is_counted(tensor):
                continue
            storage = tensor.untyped_storage()
            if (block := self._blocks.get(id(storage))) is None:
                self._count(tensor, kind)
            elif not block.on_host:
                self.now[block.kind] -= block.bytes
                self.now[kind] += block.bytes
                block.kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor and active_fake_mode() is None:
            return args[0].fake_device  # without the rest: half of all calls are autograd's, which asks for devices
        if any(map(_is_wrapper, types)):
            return NotImplemented  # torch calls the operation again on the tensors inside
        kwargs = kwargs or {}
        if active_fake_mode() is not None:  # DTensor computes shapes
            return func(*args, **kwargs)
        self._follow_ranges(func, args)
        if func.namespace == "c10d":
            self.on_collective(func, args)
        given = [*_tensors(args), *_tensors(kwargs.values())]
        if not self._is_on_device(given, kwargs):
            result = func(*args, **kwargs)
        elif func is torch.ops.aten._local_scalar_dense.default:
            return _number(args[0])
        elif func is torch.ops.aten.is_pinned.default:
            return False
        else:
            assert self._fake is not None
            with self._fake:
                if not all(isinstance(tensor, FakeTensor) for tensor in given):
                    args, kwargs = tree_map_only(torch.Tensor, _without_data, (args, kwargs))
                kwargs.pop("pin_memory", None)
                result = _SHAPES.get(func, func)(*args, **kwargs)
        for tensor in _tensors((result,)):
            if self._is_counted(tensor):
                self._count(tensor, self.kind)
        return result

    def _follow_ranges(self, func: Any, args: Any) -> None:
        if func is torch.ops.profiler._record_function_enter_new.default:
            self._ranges.append(self.on_range(args[0]))
        elif func is torch.ops.profiler._record_function_exit._RecordFunction and self._ranges:
            end = self._ranges.pop()
            if end is not None:
                end()

    def _is_on_device(self, given: list[torch.Tensor], kwargs: Any) -> bool:
        """Tell whether an operation returns fake tensors.

        It does if one of its inputs is fake, or if it makes a tensor on the fake GPU or in page-locked memory.
        """
        if self._fake is None:
            return False
        device = kwargs.get("device")
        if kwargs.get("pin_memory") or (device is not None and torch.device(device).type == GPU):
            return True
        return any(isinstance(tensor, FakeTensor) for tensor in given)

    def _is_counted(self, tensor: torch.Tensor) -> bool:
        if _is_wrapper(type(tensor)):
            return False  # the tensors inside have been counted
        return tensor.device.type == self.device or isinstance(tensor, FakeTensor)

    def _count(self, tensor: torch.Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._blocks:
            return
        block = _Block(kind, tensor.device.type != self.device, next(self._numbers))
        block.reference = weakref.ref(storage, lambda _: self._add(self._blocks.pop(key), -block.bytes))
        self._blocks[key] = block
        self._add(block, self._rounded(storage.nbytes(), block))

    def _rounded(self, size: int, block: "_Block") -> int:
        if block.on_host and self.block > 1 and size:  # PyTorch rounds page-locked memory up to a power of two
            return 1 << (size - 1).bit_length()
        return size if block.on_host else -(-size // self.block) * self.block

    def _add(self, block: "_Block", size: int) -> None:
        block.bytes += size
        if block.on_host:
            self.host_now += size
            self.host_peak = max(self.host_peak, self.host_now)
            return
        stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
        self.events.append((block.number, block.bytes, stream))
        self.now[block.kind] += size
        self._total += size
        self._keep_peak()

    def _keep_peak(self) -> None:
        if self._total > self._peak_total:
            self._peak_total, self.peak = self._total, dict(self.now)


@dataclass(eq=False)
class _Block:
    """The memory behind a storage."""

    kind: str
    on_host: bool
    number: int
    bytes: int = 0
    reference: Any = None


def _is_wrapper(cls: type) -> bool:
    """Tell whether tensors of a class, as DTensors, contain other tensors."""
    return hasattr(cls, "__tensor_flatten__")


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments or results."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return an experts' grouped product, whose shape torch knows in bf16."""
    return torch.ops.aten._grouped_mm(left.bfloat16(), right.bfloat16(), *args, **kwargs).to(left.dtype)


# Operations whose shapes torch does not know, or does not know for fake tensors of this device.
_SHAPES: dict[Any, Callable] = {
    torch.ops.aten._pin_memory.default: torch.empty_like,
    torch.ops.aten.addmm.dtype_out: lambda *_, out, **__: out,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
}


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor in place of a real one."""
    if isinstance(tensor, FakeTensor):
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _number(tensor: torch.Tensor) -> bool | int | float:
    """Return 1 for a fake number; flags are true, skipping no step."""
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
