"""What of a model is quantized, and reading it so: each tensor alone, as transformers reads it, after its conversions.

So the host's memory holds the packed model and a few copies of its largest tensor. Head, embeddings, norms, routers,
towers, what the class keeps in fp32, and layers that are trained whole stay as they are.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from verl_ext.engines.new_rows import is_whole
from verl_ext.engines.nf4 import (
    EXPERTS,
    NF4_EXPERTS,
    SCALES,
    dequantized_nf4,
    empty,
    experts_forward,
    put,
    put_scales,
    quantize,
)
from verl_ext.layers import mixers_of
from verl_ext.layers.towers import outside_text

METHOD = "verl_ext_nf4"  # our quantizer among those of transformers


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight to quantize: `name` of a layer at `path`."""

    path: str
    layer: nn.Module
    name: str

    @property
    def full_name(self) -> str:
        """The name of the weight in the model."""
        return f"{self.path}.{self.name}"

    @property
    def weight(self) -> Any:
        """The weight now."""
        return getattr(self.layer, self.name)


def targets(model: Any, whole: Iterable[str] = ()) -> list[QuantizedWeight]:
    """Return the weights to quantize: the linear layers that bitsandbytes takes, and experts in one tensor.

    whole: `modules_to_save`, layers that are trained whole.
    """
    skipped = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    outside = tuple(f"{name}." for name in outside_text(model))
    # Kernels of Mamba 2 read this layer's weight themselves.
    read = {getattr(layer, "out_proj", None) for layer, mixer in mixers_of(model) if mixer.time == "state_space"}
    found = []
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            is_plain = type(layer) is nn.Linear and layer not in read and not is_whole(path, whole)
            names = ["weight"] if is_plain and not any(path == s or path.endswith(s) for s in skipped) else []
        else:
            names = [name for name in EXPERTS if hasattr(layer, "is_transposed") and hasattr(layer, name)]
        found += [QuantizedWeight(path, layer, name) for name in names if not f"{path}.".startswith(outside)]
    return [target for target in found if target.weight.is_floating_point()]


@contextmanager
def quantized_while_read(hf_config: Any, nested: bool, whole: Iterable[str], is_empty: bool) -> Iterator[None]:
    """Let transformers quantize a model that it reads by this config inside the block.

    is_empty: whether the rank's weights are thrown away, as verl does on all ranks but one.
    """
    values = {"quant_method": METHOD, "nested": nested, "whole": list(whole), "is_empty": is_empty}
    hf_config.quantization_config = values
    try:
        yield
    finally:
        del hf_config.quantization_config


def quantize_rest(model: Any, nested: bool, whole: Iterable[str] = ()) -> None:
    """Quantize in memory what no file had, in place; without content on a device without it, as in a plan."""
    for target in targets(model, whole):
        weight, has_content = target.weight, target.weight.device.type in ("cpu", "cuda")
        put(target.layer, target.name, *(quantize(weight, nested) if has_content else empty(weight)))
    if any(hasattr(layer, name + SCALES) for layer in model.modules() for name in EXPERTS):
        model.set_experts_implementation(NF4_EXPERTS)


@torch.no_grad()
def round_to_nf4(model: Any, nested: bool, whole: Iterable[str] = ()) -> None:
    """Give a plain model the numbers that training had in NF4, in place and in its own type."""
    for target in targets(model, whole):
        weight = target.weight
        weight.copy_(dequantized_nf4(*quantize(weight, nested), torch.float32))


@register_quantization_config(METHOD)
class NF4Config(QuantizationConfigMixin):
    """The values of :func:`quantized_while_read`."""

    def __init__(self, nested: bool, whole: list[str], is_empty: bool, quant_method: str = METHOD) -> None:
        self.quant_method: Any = quant_method
        self.nested, self.whole, self.is_empty = nested, whole, is_empty


@register_quantizer(METHOD)
class NF4Quantizer(HfQuantizer, ConversionOps):
    """Quantizes tensor by tensor, on the rank's GPU if there is one."""

    quantization_config: Any

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config, **{**kwargs, "pre_quantized": False})
        self._targets: dict[str, QuantizedWeight] = {}

    def is_serializable(self) -> bool:
        """Return False: exports hold plain weights."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained on it."""
        return True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self._targets = {target.full_name: target for target in targets(model, self.quantization_config.whole)}
        for target in self._targets.values():  # the weight stays, because a tensor is read in its placeholder's type
            put_scales(target.layer, target.name, empty(target.weight)[1])

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Tell whether a tensor is a weight to quantize."""
        return param_name in self._targets

    def get_quantize_ops(self) -> Any:
        """Return itself, which converts."""
        return self

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the packed rows and scales of a weight, by name."""
        ((name, value),) = input_dict.items()
        weight, options = value[0] if isinstance(value, list) else value, self.quantization_config
        self._targets[name].layer._is_hf_initialized = True  # type: ignore[assignment]
        if options.is_empty:
            packed, scales = empty(weight.to("meta"))
        elif torch.cuda.is_available():  # a core quantizes 20 million numbers a second
            packed, scales = (x.to(weight.device) for x in quantize(weight.cuda(), options.nested))
        else:
            packed, scales = quantize(weight, options.nested)
        return {name: packed, name + SCALES: scales}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.remove_quantization_config(model)  # exports hold plain weights
        for part in model.modules():
            if hasattr(part, "config"):
                vars(part.config).pop("_is_quantized", None)


ALL_EXPERTS_FUNCTIONS.register(NF4_EXPERTS, experts_forward)
