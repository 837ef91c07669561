"""Token-wise work by tiles, `model.tile_tokens`; attention sees the whole sequence.

```
              tiles of [tile, H]                   whole                      tiles of [tile, H]
 hidden ─► norm, q k v, their norms, rotation ─► attention ─► output projection, residual, norm, MLP, residual ─►
```

Both parts of a layer are the layer's own forward on a tile, which the attention interface interrupts. The first part
ends where attention is called; the second runs with the output of attention in its place. Each tile is computed again
for its gradient, so that a layer keeps its input, the inputs of attention and its output. ALST does so for MLPs
(https://arxiv.org/abs/2506.13996); here it is done for every part that reads each token by itself. Parameters are
gathered, and their gradients reduced, once a layer, as without tiles.

Legend: B rows (1 for a pack), T tokens of a micro-batch on this rank, H hidden size, E head size.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers import AttentionInterface
from transformers.activations import ACT2CLS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from verl_ext.layers import MIXERS
from verl_ext.options import must

Function = Callable[..., tuple[torch.Tensor, ...]]


class TiledModule:
    """A token-wise module's forward, over tiles of `size` tokens.

    It takes the place of ``module.forward``. So hooks around the module, FSDP's among them, run once, and adapters that
    are put inside later are a part of it. A sequence of one tile runs through the module's own forward.
    """

    def __init__(self, module: nn.Module, size: int) -> None:
        self.module, self.size = module, size
        self.own_forward: Any = module.forward  # of the class, or a kernel that was put in its place
        module.forward = self._forward

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[…, H]`` to ``[…, H]``, or ``[B, T, heads, E]`` likewise."""
        flat = x.flatten(0, min(x.dim(), 3) - 2).unsqueeze(0)  # [1, T, …]
        if flat.shape[1] <= self.size:
            return self.own_forward(x)
        (output,) = _TiledFunction(self.module, self.size, lambda _, part: (self.own_forward(part),))(flat)
        return output.view(x.shape)


class TiledLayer:
    """A decoder layer's forward over tiles, except its attention.

    1. Run the layer on each tile up to its attention, which raises :class:`_AttentionReached`.
    2. Attend once, over all tokens.
    3. Run the layer on each tile again, with attention's output for the tile in attention's place.
    """

    def __init__(self, layer: Any, size: int) -> None:
        self.layer, self.size, self.own_forward = layer, size, layer.forward
        self.names = list(inspect.signature(layer.forward).parameters)[1:]
        kind: Any = type(layer)
        layer.tiled, layer.__class__ = self, _tiled_class(kind)

    def forward(self, hidden: torch.Tensor, *others: Any, **kwargs: Any) -> Any:
        """Run the layer on ``hidden[B, T, H]`` and arguments cut by token."""
        kwargs |= dict(zip(self.names, others, strict=False))
        has_cache = any(kwargs.get(name) is not None for name in _CACHES)
        shape = hidden.shape[:2]  # for the halves, which autograd keeps: with a tensor of their own, they would leak
        if shape[1] <= self.size or has_cache:
            return self.own_forward(hidden, **kwargs)
        name = next(part.config._attn_implementation for part in self.layer.modules() if hasattr(part, "config"))
        if name not in ALL_ATTENTION_FUNCTIONS:
            raise ValueError(f"model.tile_tokens needs attention that transformers looks up by name; got {name}")
        attention: Callable = ALL_ATTENTION_FUNCTIONS[name]
        attention_call: list[tuple] = []  # the module, and its arguments beside queries, keys and values
        other_outputs: list[Any] = []  # the rest of the tuple that the layer returns; None if it returns a tensor

        def first_half(tile_slice: slice, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            try:
                with _attention_is(_raise_reached, name):
                    self.own_forward(x, **_of_tile(kwargs, tile_slice, shape))
            except _AttentionReached as reached:
                attention_call[:] = [reached.call]
                return reached.heads
            raise ValueError(
                f"model.tile_tokens: {type(self.layer).__name__} does not call transformers' attention interface"
            )

        def second_half(tile_slice: slice, x: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor]:
            with _attention_is(lambda *_, **__: (attended, None), name):
                output = self.own_forward(x, **_of_tile(kwargs, tile_slice, shape))
            is_tensor = isinstance(output, torch.Tensor)
            other_outputs[:] = [None if is_tensor else output[1:]]  # not the tensor: its graph would hold `attended`
            return (output if is_tensor else output[0],)

        # Attention alone needs all tokens, so it runs between the two halves, outside of the tiles.
        heads = _TiledFunction(self.layer, self.size, first_half)(hidden)
        ((module, args, keywords),) = attention_call
        keywords |= {key: kwargs[key] for key in keywords if key in kwargs}  # for all tokens, not those of a tile
        attended, *_ = attention(module, *(x.transpose(1, 2) for x in heads), *args, **keywords)
        del heads  # now, because the second half needs the memory
        (hidden,) = _TiledFunction(self.layer, self.size, second_half)(hidden, attended)
        return hidden if other_outputs[0] is None else (hidden, *other_outputs[0])


@cache
def _tiled_class(kind: Any) -> type:
    """Return a layer's class whose forward is that of its :class:`TiledLayer`.

    Gradient checkpointing, which transformers 5.23 puts around the forward of classes, is then around all tiles.
    """

    @wraps(kind.forward)
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return layer.tiled.forward(*args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _of_tile(keywords: dict[str, Any], tile_slice: slice, shape: Sequence[int]) -> dict[str, Any]:
    """Return a layer's arguments for a tile of ``shape[B, T]``, masks whole."""

    def cut(x: torch.Tensor) -> torch.Tensor:
        assert not x.requires_grad, "gradients of a layer go through its hidden states"
        if x.dim() > 2 and x.shape[1:3] == shape:  # angles of time, height and width: [3, B, T, …]
            return x[:, :, tile_slice]
        return x[:, tile_slice] if x.dim() > 1 and x.shape[1] == shape[1] else x

    return {key: x if key == "attention_mask" else tree_map_only(torch.Tensor, cut, x) for key, x in keywords.items()}


def tile_slices(tokens: int, size: int) -> list[slice]:
    """Cut tokens into tiles; a plan replaces it by fewer."""
    return [slice(start, start + size) for start in range(0, tokens, size)]


class _AttentionReached(Exception):
    """The end of a layer's forward where it calls attention."""

    def __init__(self, heads: tuple[torch.Tensor, ...], call: tuple) -> None:
        self.heads, self.call = heads, call


def _raise_reached(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **keywords: Any
) -> Any:
    """Raise queries, keys and values ``[B, T, heads, E]``, with all arguments."""
    raise _AttentionReached(tuple(x.transpose(1, 2) for x in (query, key, value)), (module, args, keywords))


@contextmanager
def _attention_is(function: Callable, name: str) -> Iterator[None]:
    """Make `function` the attention that layers call by this name."""
    before = ALL_ATTENTION_FUNCTIONS[name]
    AttentionInterface.register(name, function)
    try:
        yield
    finally:
        AttentionInterface.register(name, before)


class _TiledFunction:
    """A function of whole sequences, made from one of tiles.

    function: maps a slice of tokens and tensors ``[B, size, …]`` to tensors ``[B, size, …]``.
    """

    def __init__(self, module: nn.Module, size: int, function: Function) -> None:
        self.module, self.size, self.function = module, size, function
        self.upstream: tuple[torch.Tensor, ...] = ()

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Map tensors ``[B, T, …]`` to tensors ``[B, T, …]``."""
        parameters = self.trainable() if torch.is_grad_enabled() else []
        link = _GradientHalf.apply(self, len(inputs), *inputs, *parameters)
        return _OutputHalf.apply(self, link, *(x.detach() for x in inputs))

    def trainable(self) -> list[torch.Tensor]:
        """Return the parameters that need gradients, as FSDP has gathered them."""
        parameters: list[torch.Tensor] = [p for p in self.module.parameters() if p.requires_grad]
        assert not any(isinstance(parameter, DTensor) for parameter in parameters), "FSDP must gather around the tiles"
        return parameters

    def outputs(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the outputs, tile by tile."""
        outputs: tuple[torch.Tensor, ...] = ()
        for tile_slice in tile_slices(inputs[0].shape[1], self.size):
            parts = self.function(tile_slice, *(x[:, tile_slice] for x in inputs))
            outputs = outputs or tuple(x.new_empty(x.shape[0], inputs[0].shape[1], *x.shape[2:]) for x in parts)
            for whole, part in zip(outputs, parts, strict=True):
                whole[:, tile_slice] = part
            del parts  # before the next tile
        return outputs

    def gradients(
        self, inputs: tuple[torch.Tensor, ...], upstream: tuple[torch.Tensor, ...], needed: tuple[bool, ...]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of needed inputs and trainable parameters, summed in fp32."""
        parameters = self.trainable()
        of_inputs = [torch.empty_like(x) if need else None for x, need in zip(inputs, needed, strict=True)]
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for tile_slice in tile_slices(inputs[0].shape[1], self.size):
            # Each tile's graph exists only here: its forward runs again, and its memory is free before the next.
            tiles = [x[:, tile_slice].detach().requires_grad_(need) for x, need in zip(inputs, needed, strict=True)]
            with torch.enable_grad():
                pairs = [
                    (part, whole[:, tile_slice].to(part.dtype))
                    for part, whole in zip(self.function(tile_slice, *tiles), upstream, strict=True)
                    if part.requires_grad
                ]
            sources = [x for x in tiles if x.requires_grad] + parameters
            parts, of_parts = zip(*pairs, strict=True)
            gradients = iter(torch.autograd.grad(parts, sources, of_parts, allow_unused=True))
            del pairs, parts, of_parts
            for total in of_inputs:
                if total is not None:
                    gradient = next(gradients)
                    total[:, tile_slice] = 0 if gradient is None else gradient
            # A parameter's gradient adds over all tiles; in bf16 the sum would lose the small ones.
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    total = sums[index]
                    if total is None:
                        sums[index] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
                    else:
                        total += gradient
            del gradients  # before the next tile
        return [*of_inputs, *(None if s is None else s.to(p.dtype) for p, s in zip(parameters, sums, strict=True))]

    @property
    def draws(self) -> bool:
        return any(isinstance(part, nn.Dropout) and part.training and part.p > 0 for part in self.module.modules())


class _GradientHalf(torch.autograd.Function):
    """The half of tiled work that keeps inputs and computes gradients.

    An empty tensor leads from it to :class:`_OutputHalf`. It is a function of its own because a checkpointed layer is
    recomputed only up to the last tensor that it keeps. If that is one of these inputs, the whole work is not repeated
    before its tiles are.
    """

    @staticmethod
    def forward(ctx: Any, work: _TiledFunction, inputs: int, *tensors: torch.Tensor) -> torch.Tensor:
        kind = tensors[0].device.type
        ctx.work, ctx.random_state = work, _random_state(tensors[0]) if work.draws else nullcontext
        ctx.autocast = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.save_for_backward(*tensors[:inputs])
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = ctx.saved_tensors
        upstream, ctx.work.upstream = ctx.work.upstream, ()
        with ctx.random_state(), ctx.autocast():
            return None, None, *ctx.work.gradients(inputs, upstream, ctx.needs_input_grad[2 : 2 + len(inputs)])


class _OutputHalf(torch.autograd.Function):
    """The half of tiled work that computes outputs, before :class:`_GradientHalf`.

    Its backward runs first and leaves the outputs' gradients to that half.
    """

    @staticmethod
    def forward(ctx: Any, work: _TiledFunction, link: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.work, ctx.inputs = work, len(inputs)
        return work.outputs(inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.work.upstream = grad_outputs
        return None, grad_outputs[0].new_empty(0), *([None] * ctx.inputs)


def _random_state(x: torch.Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Return a context of the present random states of a tensor's device."""
    kind, host, (devices, states) = x.device.type, torch.get_rng_state(), get_device_states(x)

    @contextmanager
    def restored() -> Iterator[None]:
        with torch.random.fork_rng(devices, device_type=kind):
            torch.set_rng_state(host)
            set_device_states(devices, states, device_type=kind)
            yield

    return restored


# The parts that token-wise modules may be made of: they read the last dimension alone.
_PARTS = (nn.Linear, Conv1D, nn.Dropout, nn.Identity)
_ACTIVATIONS = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
# The arguments that a layer may have: they have a row for each token, or only its attention reads them.
_CACHES = ("cache", "past_key_values", "layer_past")  # from transformers 5.24 on the first
_ARGUMENTS = {
    *("hidden_states", "position_ids", "position_embeddings", "attention_mask", *_CACHES),
    *("use_cache", "encoder_hidden_states", "encoder_attention_mask", "kwargs"),
}


def tile(model: nn.Module, tokens: int) -> None:
    """Tile a model's token-wise work; raise ValueError if it has none."""
    layers, modules = tileable(model)
    if not layers + modules:
        raise ValueError(untileable(type(model).__name__, tokens))
    for layer in layers:
        TiledLayer(layer, tokens)
    for module in modules:
        TiledModule(module, tokens)


def tileable(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the layers that can be tiled, and others' MLPs and norms.

    They read each token by itself, layers apart from their attention, and are made of linear layers, norms, activations
    and dropout. Mixtures of experts are not among them, because they have parameters and routers of their own.
    """
    layers = [layer for layer in model.modules() if _is_tileable_layer(layer)]
    inside = {part for layer in layers for part in layer.modules()}
    rest = [part for part in model.modules() if part not in inside]
    inner = [mlp for part in rest if isinstance(mlp := getattr(part, "mlp", None), nn.Module)]
    mlps = [mlp for mlp in inner if len(inspect.signature(type(mlp).forward).parameters) == 2 and _is_known(mlp)]
    return layers, mlps + [part for part in rest if is_norm(part)]


def _is_tileable_layer(layer: nn.Module) -> bool:
    if not isinstance(layer, GradientCheckpointingLayer) or not _is_known(layer):
        return False
    names = set(inspect.signature(type(layer).forward).parameters) - {"self"}
    return names <= _ARGUMENTS and any(getattr(part, "is_causal", False) for part in layer.modules())


def _is_known(module: nn.Module) -> bool:
    """Tell whether known parts of transformers hold all of its parameters."""
    return all(
        type(part) in _ACTIVATIONS
        or type(part) in _PARTS
        or is_norm(part)
        or (
            type(part).__name__ not in MIXERS
            and type(part).__module__.startswith("transformers.")
            and any(True for _ in part.children())
            and not list(part.parameters(recurse=False))
        )
        for part in module.modules()
    )


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module is one of transformers' norms."""
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm")) and not list(module.children())


def untileable(model_class: str, tokens: int) -> str:
    """Return the line that refuses `model.tile_tokens` for a model."""
    needed = f"be null for {model_class}, none of whose layers reads each token by itself but for attention"
    return must("model.tile_tokens", needed, tokens)
