"""What a training step keeps of the decoder layers between forward and backward, and where.

`model.activation_offload`: with gradient checkpointing, all that a layer keeps is the hidden state that entered it. It
lies in host memory from the layer's forward to its backward, copied beside the computation:

    computation   forward k │ forward k+1    …    recompute k+1, backward │ recompute k, backward
    copies        k → host  │ k+1 → host     …    k → device              │ k-1 → device

`model.tile_tokens`: all that reads each token by itself runs over tiles of so many tokens (tiles.py).

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
from verl_ext.values import Options, option


@dataclass  # not frozen: a base of verl's own dataclass of the model node
class ActivationOptions(Options):
    """The keys of the model node that say what is kept of activations."""

    prefix: ClassVar[str] = "model"

    activation_offload: bool = option(
        False, "true: the hidden state `[T, H]` that gradient checkpointing keeps of each layer waits in host memory"
    )
    tile_tokens: int | None = option(
        None, "tokens of a rank that a layer processes at a time, but for its attention; null: all at once", least=1
    )


NEEDS_CHECKPOINTS = "model.activation_offload=true needs model.enable_gradient_checkpointing=true; got false"


def apply_activation_options(module: Any, options: ActivationOptions) -> None:
    """Install what the options ask for on a model of Hugging Face's, before adapters and FSDP wrap it.

    Raises ValueError where no layer is checkpointed, or none can be tiled.
    """
    if options.tile_tokens is not None:
        tile(module, options.tile_tokens)
    if options.activation_offload:
        checkpointed = [layer for layer in module.modules() if getattr(layer, "gradient_checkpointing", False)]
        if not checkpointed:
            raise ValueError(NEEDS_CHECKPOINTS)
        keep_on_host = HostCheckpoints()
        for layer in checkpointed:
            layer._gradient_checkpointing_func = keep_on_host


def check_host_memory(num_layers: int, hidden_size: int, dtype: torch.dtype, tokens: int, ranks: int) -> None:
    """Refuse `model.activation_offload` where the hidden states of a step do not fit into the host's memory.

    Args:
        tokens: of a rank's micro-batch; ranks: of this node.

    Raises ValueError.
    """
    of_layer = hidden_size * dtype.itemsize * tokens
    if torch.cuda.is_available():
        of_layer = 1 << (of_layer - 1).bit_length()  # as PyTorch's allocator rounds what it page-locks
    needed, available = num_layers * of_layer * ranks, available_memory()
    if needed > available:
        raise ValueError(
            f"model.activation_offload=true must find host memory for {num_layers} layers × {tokens:,} tokens × "
            f"{hidden_size:,} numbers of each of the node's {ranks} ranks: {needed / 2**30:.1f} GiB; got "
            f"{available / 2**30:.1f} GiB. Lower data.max_tokens, or share packs among more ranks"
        )


def available_memory() -> int:
    """Bytes that the processes of this node may still take: of the machine, and of their control groups."""
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no control groups, or those of version 1
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        (name,) = (group.removeprefix("0::/") for group in groups if group.startswith("0::/"))
        lowest = Path("/sys/fs/cgroup") / name
        for group in (lowest, *lowest.parents[: len(Path(name).parts)]):
            limit = (group / "memory.max").read_text().strip()  # the root of a machine has none
            if limit != "max":
                kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(kept["inactive_file"])
                available = min(available, int(limit) - used)
    return available


class _Kept:
    """The hidden state of a checkpoint: on its device in the forward of its layer, from then on its copy alone."""

    def __init__(self, hidden: torch.Tensor, host: torch.Tensor) -> None:
        self.on_device: torch.Tensor | None = hidden
        self.host = host
        self.device = hidden.device
        self.requires_grad = hidden.requires_grad


class HostCheckpoints:
    """The checkpointing function of a model's layers: `torch.utils.checkpoint` without re-entry, whose first argument
    waits for the backward pass in page-locked host memory.

    Transformers calls it as ``function(layer, hidden, *others)`` with hidden[1, T, H]; other arguments stay on the
    device, as do those by keyword, which layers share. Hidden states of frozen embeddings are leaves, which autograd
    itself holds: theirs alone is not freed.

    All copies are on one stream of their own, so one begins when those before it have ended; PyTorch's allocator keeps
    page-locked memory for the next step, and gives it out when the copies from it have ended.
    """

    def __init__(self, streams: Any = None) -> None:
        """streams: a module with torch.cuda's streams; torch.cpu's do nothing."""
        self._streams = streams or (torch.cuda if torch.cuda.is_available() else torch.cpu)
        self._copies = self._streams.Stream()
        self._waiting: list[weakref.ref[_Kept]] = []  # for their backward, in the order of their forward
        self._fetched: tuple[weakref.ref[_Kept], torch.Tensor, Any] | None = None

    def __call__(self, layer: Callable, hidden: torch.Tensor, *others: Any) -> Any:
        """The layer's output; without gradients, where nothing is kept, plainly."""
        if not torch.is_grad_enabled():
            return layer(hidden, *others)
        host = torch.empty(hidden.shape, dtype=hidden.dtype, device="cpu", pin_memory=hidden.device.type != "cpu")
        kept = _Kept(hidden, host)
        copied = self._copy(host, hidden.detach())
        # Of the arguments' devices torch restores the random numbers when it recomputes: an empty tensor names it.
        output = checkpoint(partial(self._run, layer, kept), hidden.new_empty(0), *others, use_reentrant=False)
        self._wait(copied)  # what is computed from here on may use the memory of the hidden state
        kept.on_device = None
        self._waiting.append(weakref.ref(kept))
        return output

    def _run(self, layer: Callable, kept: _Kept, _: torch.Tensor, *others: Any) -> Any:
        hidden = self._again(kept) if kept.on_device is None else kept.on_device
        return layer(hidden, *others)

    def _again(self, kept: _Kept) -> torch.Tensor:
        """The hidden state on its device, for the layer to be recomputed; the copy of the layer before it begins."""
        if self._fetched is None or self._fetched[0]() is not kept:
            self._fetch(kept)
        assert self._fetched is not None
        _, hidden, copied = self._fetched
        self._wait(copied)
        self._fetched = None
        while self._waiting:
            before = self._waiting.pop()()
            if before is not None and before is not kept:  # None: its graph was dropped
                self._waiting.append(weakref.ref(before))
                self._fetch(before)
                break
        return hidden.requires_grad_(kept.requires_grad)

    def _fetch(self, kept: _Kept) -> None:
        if self._fetched is not None:  # of a backward pass that was given up: its memory is used again
            self._wait(self._fetched[2])
        hidden = torch.empty(kept.host.shape, dtype=kept.host.dtype, device=kept.device)
        self._fetched = weakref.ref(kept), hidden, self._copy(hidden, kept.host)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Queue a copy behind the computation queued so far, on a stream of its own; the event of the copy's end."""
        self._copies.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._copies):
            target.copy_(source, non_blocking=True)
            return self._copies.record_event()

    def _wait(self, event: Any) -> None:
        """Let what is computed from here on begin after the event; the host does not wait."""
        self._streams.current_stream().wait_event(event)
