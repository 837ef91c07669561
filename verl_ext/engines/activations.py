"""What a training step keeps of the decoder layers between forward and backward, and where.

`model.activation_offload`: with gradient checkpointing, all that a layer keeps is the hidden state that entered it. It
lies in host memory from the layer's forward to its backward, copied beside the computation:

    computation   forward k │ forward k+1    …    recompute k+1, backward │ recompute k, backward
    copies        k → host  │ k+1 → host     …    k → device              │ k-1 → device

`model.mlp_tile_tokens`: the MLP of a layer runs over tiles of so many tokens, each computed again for its gradient, so
that `[tile, I]` is all that exists of its intermediate activations: the tiled MLP of ALST
(https://arxiv.org/abs/2506.13996). Its parameters are gathered, and their gradients reduced, as without tiles.

Legend: T tokens of a micro-batch on this rank, H hidden size, I intermediate size of an MLP.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from verl_ext.values import Options, option


@dataclass  # not frozen: a base of verl's own dataclass of the model node
class ActivationOptions(Options):
    """The keys of the model node that say what is kept of activations."""

    prefix: ClassVar[str] = "model"

    activation_offload: bool = option(
        False, "true: the hidden state `[T, H]` that gradient checkpointing keeps of each layer waits in host memory"
    )
    mlp_tile_tokens: int | None = option(
        None, "tokens of a rank that a layer's MLP processes at a time; null: all at once", least=1
    )


NEEDS_CHECKPOINTS = "model.activation_offload=true needs model.enable_gradient_checkpointing=true; got false"


def apply_activation_options(module: Any, options: ActivationOptions) -> None:
    """Install what the options ask for on a model of Hugging Face's, before adapters and FSDP wrap it.

    Raises ValueError where no layer is checkpointed, or none has an MLP that can be tiled.
    """
    if options.mlp_tile_tokens is not None:
        mlps = tileable_mlps(module)
        if not mlps:
            raise ValueError(untileable(type(module).__name__, options.mlp_tile_tokens))
        for mlp in mlps:
            TiledMLP(mlp, options.mlp_tile_tokens)
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


class TiledMLP:
    """The forward of an MLP that reads each token by itself, over tiles of `tile` tokens.

    It takes the place of ``mlp.forward``: hooks around the module, FSDP's among them, run once, and adapters that are
    put inside later are a part of it. A sequence of one tile is computed as it always was.
    """

    def __init__(self, mlp: nn.Module, tile: int) -> None:
        self.mlp, self.tile = mlp, tile
        self.whole = mlp.forward  # the class's own, or a kernel's that was put in its place
        mlp.forward = self._forward

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, H]`` of ``[…, H]``."""
        tokens = x.shape[:-1].numel()
        if tokens <= self.tile:
            return self.whole(x)
        flat = x.reshape(1, tokens, x.shape[-1])
        if torch.is_grad_enabled():
            flat = _Keep.apply(self, flat, *self.trainable())
        return _Run.apply(self, flat).view(x.shape)

    def trainable(self) -> list[torch.Tensor]:
        """The parameters that have gradients, as FSDP has gathered them."""
        return [parameter for parameter in self.mlp.parameters() if parameter.requires_grad]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """``[1, T, H]``, one tile after the other."""
        first = self.whole(x[:, : self.tile])
        output = first.new_empty(*x.shape[:-1], first.shape[-1])
        output[:, : self.tile] = first
        for start in range(self.tile, x.shape[1], self.tile):
            output[:, start : start + self.tile] = self.whole(x[:, start : start + self.tile])
        return output

    def gradients(self, x: torch.Tensor, upstream: torch.Tensor, of_input: bool) -> tuple[torch.Tensor | None, ...]:
        """Of x[1, T, H] (None unless `of_input`) and of each of :meth:`trainable`; those are summed in fp32."""
        parameters = self.trainable()
        sums: list[torch.Tensor] = []
        of_x = torch.empty_like(x) if of_input else None
        for start in range(0, x.shape[1], self.tile):
            at = slice(start, start + self.tile)
            tile = x[:, at].detach().requires_grad_(of_input)
            with torch.enable_grad():
                output = self.whole(tile)
            wanted = [*([tile] if of_input else []), *parameters]
            found = list(torch.autograd.grad(output, wanted, upstream[:, at].to(output.dtype)))
            if of_x is not None:
                of_x[:, at] = found.pop(0)
            if not sums:
                sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
            for total, gradient in zip(sums, found, strict=True):
                total += gradient
            del output, found  # before the next tile
        return of_x, *(total.to(p.dtype) for p, total in zip(parameters, sums, strict=True))

    @property
    def draws(self) -> bool:
        return any(isinstance(part, nn.Dropout) and part.training and part.p > 0 for part in self.mlp.modules())


class _Keep(torch.autograd.Function):
    """Keeps the input of a tiled MLP, and computes the gradients.

    Apart from :class:`_Run`, because a checkpointed layer is recomputed as far as the last tensor that it keeps: where
    that is this input, the MLP is not computed once more before its tiles are.
    """

    @staticmethod
    def forward(ctx: Any, mlp: TiledMLP, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.mlp = mlp
        ctx.state = _State(x) if mlp.draws else None
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        enabled, dtype = ctx.autocast
        with (
            nullcontext() if ctx.state is None else ctx.state.restored(),
            torch.autocast(x.device.type, dtype, enabled=enabled),
        ):
            return None, *ctx.mlp.gradients(x, grad_outputs[0], ctx.needs_input_grad[1])


class _Run(torch.autograd.Function):
    """The output of a tiled MLP; what it gets in the backward pass goes to :class:`_Keep` as it is."""

    @staticmethod
    def forward(ctx: Any, mlp: TiledMLP, x: torch.Tensor) -> torch.Tensor:
        return mlp.run(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad_outputs[0]


class _State:
    """The state of the random numbers of the host and of a tensor's device."""

    def __init__(self, x: torch.Tensor) -> None:
        self._kind = x.device.type
        self._host = torch.get_rng_state()
        self._devices, self._states = get_device_states(x)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """What is drawn inside is drawn as after that state, and changes nothing outside."""
        with torch.random.fork_rng(self._devices, device_type=self._kind):
            torch.set_rng_state(self._host)
            set_device_states(self._devices, self._states, device_type=self._kind)
            yield


# What an MLP may be made of: parts that read the last dimension alone.
_PARTS = (nn.Linear, Conv1D, nn.Dropout, nn.Identity)
_ACTIVATIONS = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}


def tileable_mlps(model: nn.Module) -> list[nn.Module]:
    """The modules named ``mlp`` of a model of transformers' that read each token by itself.

    They are made of linear layers, activations and dropout, and take hidden states alone. Mixtures of experts, whose
    parameters and routers are their own, are none of them.
    """
    named = (getattr(layer, "mlp", None) for layer in model.modules())
    return [mlp for mlp in named if isinstance(mlp, nn.Module) and _reads_each_token(mlp)]


def _reads_each_token(mlp: nn.Module) -> bool:
    if not type(mlp).__module__.startswith("transformers."):
        return False  # remote code, which may do anything between its parts
    takes = list(inspect.signature(type(mlp).forward).parameters.values())[1:]
    parts = [part for part in mlp.modules() if part is not mlp]
    return (
        len(takes) == 1
        and not list(mlp.parameters(recurse=False))
        and all(type(part) in _ACTIVATIONS or type(part) in _PARTS for part in parts)
    )


def untileable(model_class: str, tokens: int) -> str:
    """The line that refuses `model.mlp_tile_tokens` for a model without such an MLP."""
    return (
        f"model.mlp_tile_tokens must be null for {model_class}, none of whose layers has an MLP that reads each token "
        f"by itself; got {tokens}"
    )
