"""The activations that layers keep: on the host, or by tile.

`model.activation_offload`: with gradient checkpointing, a layer keeps the hidden state that entered it and nothing
else. That state lies in host memory from the layer's forward to its backward; the copies run beside the computation:

    computation   forward k │ forward k+1    …    recompute k+1, backward │ recompute k, backward
    copies        k → host  │ k+1 → host     …    k → device              │ k-1 → device

`model.tile_tokens`: every part of a layer that reads each token by itself runs over tiles of tokens (tiles.py).

Legend: T tokens of a micro-batch on this rank, H hidden size.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
from torch.utils.checkpoint import checkpoint

from verl_ext.engines.tiles import tile
from verl_ext.options import Options, must, option


@dataclass  # not frozen: a base of verl's own dataclass of the model node
class ActivationOptions(Options):
    """The keys of the model node about the activations that layers keep."""

    prefix: ClassVar[str] = "model"

    activation_offload: bool = option(
        False, "true: hold the hidden states `[T, H]` that gradient checkpointing keeps of each layer in host memory"
    )
    tile_tokens: int | None = option(
        None, "tokens of a rank that a layer processes at a time, except in its attention; null: all at once", least=1
    )


NEEDS_CHECKPOINTS = "model.activation_offload=true needs model.enable_gradient_checkpointing=true; got false"


def apply_activation_options(module: Any, options: ActivationOptions, **of_checkpoints: Any) -> None:
    """Install the options on a model, before adapters and FSDP.

    of_checkpoints: further arguments of `torch.utils.checkpoint`.

    Raises ValueError if no layer is checkpointed, or none can be tiled.
    """
    if options.tile_tokens is not None:
        tile(module, options.tile_tokens)
    if options.activation_offload:
        checkpointed = [layer for layer in module.modules() if getattr(layer, "gradient_checkpointing", False)]
        if not checkpointed:
            raise ValueError(NEEDS_CHECKPOINTS)
        keep_on_host = HostCheckpoints(**of_checkpoints)
        for layer in checkpointed:
            layer._gradient_checkpointing_func = keep_on_host


def check_host_memory(num_layers: int, hidden_size: int, dtype: torch.dtype, tokens: int, ranks: int) -> None:
    """Raise ValueError if a step's hidden states exceed the host's memory.

    `tokens` are those of a rank's micro-batch, `ranks` those of this node.
    """
    of_layer = hidden_size * dtype.itemsize * tokens
    if torch.cuda.is_available():
        of_layer = 1 << (of_layer - 1).bit_length()  # PyTorch rounds page-locked memory up to a power of two
    needed, available = num_layers * of_layer * ranks, available_memory()
    if needed > available:
        sizes = f"{num_layers} layers × {tokens:,} tokens × {hidden_size:,} numbers of each of the node's {ranks} ranks"
        requirement = f"find host memory for {sizes}: {needed / 2**30:.1f} GiB"
        got = f"{available / 2**30:.1f} GiB. Lower data.max_tokens, or share packs among more ranks"
        raise ValueError(must("model.activation_offload=true", requirement, got))


def available_memory() -> int:
    """Return the bytes that this node's processes may still allocate."""
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # there are no control groups, or they are of version 1
        # A container's limit lies below the machine's memory, and any of its parents may have a lower one.
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        (name,) = (group.removeprefix("0::/") for group in groups if group.startswith("0::/"))
        lowest = Path("/sys/fs/cgroup") / name
        for group in (lowest, *lowest.parents[: len(Path(name).parts)]):
            limit = (group / "memory.max").read_text().strip()  # the root of a machine has none
            if limit != "max":
                memory = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(memory["inactive_file"])
                available = min(available, int(limit) - used)
    return available


class _HiddenState:
    """A checkpoint's hidden state: on its device, then on the host."""

    def __init__(self, hidden: torch.Tensor, host: torch.Tensor) -> None:
        self.on_device: torch.Tensor | None = hidden
        self.host = host
        self.device = hidden.device
        self.requires_grad = hidden.requires_grad


class HostCheckpoints:
    """A checkpointing function that keeps hidden states in page-locked host memory.

    It is `torch.utils.checkpoint` without re-entry, whose first argument waits for the backward pass on the host.
    transformers calls it as ``function(layer, hidden, *others)`` with hidden[1, T, H]. Other arguments, which layers
    share, stay on the device. The hidden state of frozen embeddings is a leaf, which autograd itself holds: that one
    is not freed. `options` are further arguments of `torch.utils.checkpoint`.

    All copies run on one stream of their own, so each begins when those before it have ended. PyTorch's allocator keeps
    page-locked memory for the next step, and hands it out when the copies from it have ended.
    """

    def __init__(self, streams: Any = None, **options: Any) -> None:
        """Take streams as of torch.cuda; those of torch.cpu do nothing."""
        self._options = options
        self._streams = streams or (torch.cuda if torch.cuda.is_available() else torch.cpu)
        self._copies = self._streams.Stream()
        self._waiting: list[weakref.ref[_HiddenState]] = []  # waiting for their backward, in forward order
        # The state that backward needs next, its copy on the device, and the event of the copy's end.
        self._next: tuple[weakref.ref[_HiddenState], torch.Tensor, Any] | None = None

    def __call__(self, layer: Callable, hidden: torch.Tensor, *others: Any) -> Any:
        """Run the layer; with gradients, keep its input on the host."""
        if not torch.is_grad_enabled():
            return layer(hidden, *others)
        host = torch.empty(hidden.shape, dtype=hidden.dtype, device="cpu", pin_memory=hidden.device.type != "cpu")
        state = _HiddenState(hidden, host)
        event = self._copy(host, hidden.detach())
        # torch restores the random states of the arguments' devices when it recomputes; an empty tensor names ours.
        output = checkpoint(
            partial(self._run, layer, state), hidden.new_empty(0), *others, use_reentrant=False, **self._options
        )
        self._wait(event)  # from here on, computation may reuse the hidden state's memory
        state.on_device = None
        self._waiting.append(weakref.ref(state))
        return output

    def _run(self, layer: Callable, state: _HiddenState, _: torch.Tensor, *others: Any) -> Any:
        hidden = self._on_device(state) if state.on_device is None else state.on_device
        return layer(hidden, *others)

    def _on_device(self, state: _HiddenState) -> torch.Tensor:
        """Return the hidden state on its device; begin the next copy."""
        if self._next is None or self._next[0]() is not state:
            self._prefetch(state)
        assert self._next is not None
        _, hidden, event = self._next
        self._wait(event)
        self._next = None
        while self._waiting:
            before = self._waiting.pop()()
            if before is not None and before is not state:  # None if its graph was dropped
                self._waiting.append(weakref.ref(before))
                self._prefetch(before)
                break
        return hidden.requires_grad_(state.requires_grad)

    def _prefetch(self, state: _HiddenState) -> None:
        if self._next is not None:  # left by an abandoned backward pass; its memory is reused
            self._wait(self._next[2])
        hidden = torch.empty(state.host.shape, dtype=state.host.dtype, device=state.device)
        self._next = weakref.ref(state), hidden, self._copy(hidden, state.host)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Queue a copy behind computation so far; return its end's event."""
        self._copies.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._copies):
            target.copy_(source, non_blocking=True)
            return self._copies.record_event()

    def _wait(self, event: Any) -> None:
        """Make later computation begin after the event; the host does not wait."""
        self._streams.current_stream().wait_event(event)
