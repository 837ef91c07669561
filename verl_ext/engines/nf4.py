"""Frozen weights in NF4: four bits a number, and a scale for each block of 64 numbers along a row.

    weight [out, in]  ─►  weight         uint8 [out, in/2]    two numbers a byte
                          weight_absmax  uint8 [out, in/16]   the bytes of the blocks' fp32 scales

Experts have a dimension before these. Both are ordinary frozen parameters, which FSDP2 shards by their first dimension,
and casts to no other type because they are integers. A weight is dequantized in a forward and again in the backward
pass, so that no layer keeps it. The numbers are those of bitsandbytes, whose kernels run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from verl_ext.parallel.experts import FACTORS

BLOCK, SCALES = 64, "_absmax"
NF4_EXPERTS = "verl_ext_nf4"  # our experts among those of transformers
EXPERTS = ("gate_up_proj", "up_proj", "down_proj")  # the weights of experts in transformers' interface
_PACKED = "packed_weights"
_MOST = 2**31  # numbers of one call: the kernels count in int32
_RANKS = 8  # grouped products on GPUs want rows of 16 bytes


def quantize(weight: torch.Tensor, nested: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight's packed rows and the bytes of its scales; experts are quantized one by one.

    nested: whether the scales are those that bitsandbytes gets when it quantizes the scales too.
    """
    from bitsandbytes import functional as bnb  # here and below: an optional package

    if weight.dim() == 3:
        of_experts = [quantize(one, nested) for one in weight]
        return torch.stack([packed for packed, _ in of_experts]), torch.stack([scales for _, scales in of_experts])
    plain = weight.detach().contiguous()
    packed, state = bnb.quantize_4bit(plain, blocksize=BLOCK, quant_type="nf4", compress_statistics=nested)
    absmax: Any = state.absmax
    if nested:
        absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
    rows = len(weight)
    return packed.view(rows, -1), absmax.float().view(rows, -1).view(torch.uint8)


def dequantized_nf4(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of packed rows."""
    import bitsandbytes  # noqa: F401  (its operations; the function around this one transposes a weight of one row)

    assert packed.dtype == scales.dtype == torch.uint8, "bitsandbytes reads the bytes of any type without a word"
    if packed.dim() == 3 and 2 * packed.numel() >= _MOST:
        return torch.stack([dequantized_nf4(*one, dtype) for one in zip(packed, scales, strict=True)])
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    absmax = scales.view(torch.float32)
    return torch.ops.bitsandbytes.dequantize_4bit.default(packed, absmax, BLOCK, "nf4", shape, dtype)


def empty(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight's packed rows and scales without content, on its device."""
    *rows, columns = weight.shape
    packed, scales = (weight.new_empty((*rows, columns // part), dtype=torch.uint8) for part in (2, BLOCK // 4))
    return packed, scales


def put(layer: nn.Module, name: str, packed: torch.Tensor, scales: torch.Tensor) -> None:
    """Give a layer a packed weight in the place of its own."""
    setattr(layer, name, nn.Parameter(packed, requires_grad=False))
    put_scales(layer, name, scales)


def put_scales(layer: nn.Module, name: str, scales: torch.Tensor) -> None:
    """Give a layer the scales of a weight, and the forward that reads them."""
    setattr(layer, name + SCALES, nn.Parameter(scales, requires_grad=False))
    if type(layer) is nn.Linear:
        layer.__class__ = NF4Linear


def packed_weights(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the layers with a packed weight, and its name in them."""
    return [
        (layer, name.removesuffix(SCALES))
        for layer in model.modules()
        for name, _ in layer.named_parameters(recurse=False)
        if name.endswith(SCALES)
    ]


def dequantized(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model with their names, and fp32 weights in the place of packed ones."""
    for name, tensor in tensors.items():
        if (scales := tensors.get(name + SCALES)) is not None:
            yield name, dequantized_nf4(tensor, scales, torch.float32)
        elif not name.endswith(SCALES):
            yield name, tensor


class _Product(torch.autograd.Function):
    """x·Wᵀ of a packed W; with offs, the ends of groups of rows of x, the products of experts."""

    @staticmethod
    def forward(ctx: Any, x: Any, packed: Any, scales: Any, offs: Any, is_transposed: bool) -> torch.Tensor:
        """Multiply, and keep the packed weight alone."""
        ctx.save_for_backward(packed, scales, offs)
        ctx.is_transposed, weight = is_transposed, dequantized_nf4(packed, scales, x.dtype)
        if offs is None:
            return functional.linear(x, weight)
        return functional.grouped_mm(x, weight if is_transposed else weight.mT, offs=offs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient of x."""
        (gradient,), (packed, scales, offs) = gradients, ctx.saved_tensors
        weight = dequantized_nf4(packed, scales, gradient.dtype)
        if offs is None:
            return gradient @ weight, None, None, None, None
        weight = weight.mT if ctx.is_transposed else weight
        return functional.grouped_mm(gradient, weight, offs=offs), None, None, None, None


def project(layer: Any, name: str, x: torch.Tensor, offs: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x by a layer's packed weight, with the adapters that PEFT has put on the weight itself."""
    if torch.is_autocast_enabled(kind := x.device.type):  # outside of the function, so that the gradient is cast back
        x = x.to(torch.get_autocast_dtype(kind))
    is_transposed = getattr(layer, "is_transposed", False)
    y = _Product.apply(x, getattr(layer, name), getattr(layer, name + SCALES), offs, is_transposed)
    # PEFT adds the product of the factors to the weight; two thin products make no tensor of the weight's size.
    for down, up, scaling in vars(layer).get(FACTORS, {}).get(name, ()):
        down, up = down.to(y.dtype), up.to(y.dtype)  # [E, r, in], [E, out, r]
        if offs is None:
            y = y + functional.linear(functional.linear(x, down[0]), up[0]) * scaling
            continue
        missing = -down.shape[1] % _RANKS
        down, up = functional.pad(down, (0, 0, 0, missing)), functional.pad(up, (0, missing)).contiguous()
        low = functional.grouped_mm(x, down.mT, offs=offs)
        y = y + functional.grouped_mm(low, up.mT, offs=offs) * scaling
    return y


class NF4Linear(nn.Linear):
    """A frozen linear layer with a packed weight, which PEFT adapts as any other."""

    W_q = property(lambda self: self.weight)  # tells PEFT's DoRA that the layer has dequantize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x·Wᵀ + b."""
        y = project(self, "weight", x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dequantize(self) -> nn.Parameter:
        """Return the weight."""
        packed = self.__dict__.get(_PACKED, {}).get("weight", self.weight)
        scales: Any = self.weight_absmax
        return nn.Parameter(dequantized_nf4(packed, scales, torch.float32), requires_grad=False)


def experts_forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the experts of transformers' interface by grouped products of packed weights.

    Args:
        self: a layer of experts.
        hidden: the hidden states ``[N, H]``.
        index: the experts of each token ``[N, k]``.
        weights: their weights ``[N, k]``.
    """
    of_token = index.size(-1)
    experts, order = index.reshape(-1).sort()
    counted = experts.float() if hidden.device.type == "cpu" else experts.int()  # as histc takes them
    counts = torch.histc(counted, bins=self.num_experts, min=0, max=self.num_experts - 1)
    offs = counts.cumsum(0, dtype=torch.int32)

    def apply(name: str, x: torch.Tensor) -> torch.Tensor:
        y = project(self, name, x, offs)
        return y + getattr(self, f"{name}_bias")[experts].to(y.dtype) if self.has_bias else y

    up = apply("gate_up_proj" if self.has_gate else "up_proj", hidden[order // of_token])
    down = apply("down_proj", self._apply_gate(up) if self.has_gate else self.act_fn(up))
    down = (down * weights.reshape(-1)[order, None])[order.argsort()]
    return down.view(len(hidden), of_token, -1).sum(1).to(hidden.dtype)


@contextmanager
def whole_shapes(model: nn.Module) -> Iterator[None]:
    """Show weights of the whole shape, without memory, in the place of packed ones while PEFT adds adapters.

    PEFT reads the sizes of adapters on weights from the shape, and their type from that of the weight.
    """
    hidden = packed_weights(model)
    for layer, name in hidden:
        packed = getattr(layer, name)
        layer.__dict__.setdefault(_PACKED, {})[name] = packed
        shape = (*packed.shape[:-1], 2 * packed.shape[-1])
        shown = torch.zeros((), device=packed.device).expand(shape)
        setattr(layer, name, nn.Parameter(shown, requires_grad=False))
    try:
        yield
    finally:
        for layer, name in hidden:
            setattr(layer, name, layer.__dict__[_PACKED].pop(name))


def hand_over_adapters(adapted: nn.Module) -> None:
    """Let PEFT's adapters of packed weights give their factors to the layers, in place.

    PEFT itself would add the product of the factors to the packed bytes.
    """
    from peft.tuners.lora.layer import ParamWrapper  # heavy, and there with adapters only

    for part in adapted.modules():
        if isinstance(part, ParamWrapper) and hasattr(part.get_base_layer(), part.parameter_name + SCALES):
            part.__class__ = _handing_over(ParamWrapper)


@cache
def _handing_over(wrapper: Any) -> Any:
    def factors_of(self: Any, active: list[str]) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        count = self.num_experts
        factors = [(self.lora_A[a].weight, self.lora_B[a].weight, self.scaling[a]) for a in active if a in self.lora_A]
        return [
            (down.view(count, -1, down.shape[1]), up.view(len(up), -1, count).permute(2, 0, 1), scaling)
            for down, up, scaling in factors
        ]

    @contextmanager
    def activate(self: Any, active: list[str]) -> Iterator[None]:
        given = vars(self.get_base_layer()).setdefault(FACTORS, {})
        given[self.parameter_name] = factors_of(self, active)
        try:
            yield
        finally:
            del given[self.parameter_name]

    members = {"_activate_lora": activate, "factors_of": factors_of, "__module__": wrapper.__module__}
    return type(wrapper.__name__, (wrapper,), members)
