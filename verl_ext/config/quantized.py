"""Weights that a folder stores quantized, and that transformers dequantizes as it loads them.

An FP8 weight `w` [m, n] lies beside `w_scale_inv`, a scale for each block. MXFP4 has the weights of experts, `w`
[E, 32k, m], as `w_blocks` [E, m, k, 16], two numbers a byte, and `w_scales` [E, m, k].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from verl_ext.options import first_line, must

# What FP8 adds to the name of a weight, without its `.weight` where the second is set.
_OF_FP8 = (("_scale_inv", ""), (".scale", ".weight"), (".activation_scale", ".weight"))


@dataclass
class PlainHeaders:
    """The tensors without storage that a quantized folder's become, by name.

    Attributes:
        tensors: with the names and shapes of the plain model; what belongs to no weight keeps its name.
        lacking: the scales that are not there.
        reshaped: the scales whose shape does not fit their weight, each with what it must be.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)


def quantization_of(hf_config: Any) -> dict[str, Any]:
    """Return a config's quantization, {} for plain weights."""
    quantization = getattr(hf_config, "quantization_config", None) or {}
    return quantization if isinstance(quantization, dict) else quantization.to_dict()


def dequantize(hf_config: Any) -> None:
    """Make transformers dequantize weights (GPT-OSS' MXFP4) as it loads them, in place.

    Raises ValueError if it cannot, because quantized weights have no gradients.
    """
    if not (values := quantization_of(hf_config)):
        return
    method = str(values.get("quant_method"))
    method_class: Any = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if method_class is None or "dequantize" not in signature(method_class).parameters:
        plain_weights = "weights that are not quantized, or that transformers dequantizes as it loads them (mxfp4, fp8)"
        raise ValueError(must("model.path", f"hold {plain_weights}", f"quant_method={method}"))
    try:
        method_class.from_dict(values)
    except Exception as error:  # of values that are not blocks
        raise ValueError(must("model.path", f"have a quantization_config of {method}", first_line(error))) from error
    hf_config.quantization_config = {**values, "dequantize": True}


def plain_headers(stored: Mapping[str, torch.Tensor], quantization: Mapping[str, Any]) -> PlainHeaders | None:
    """Return what the headers of a quantized folder become; None for a format that is not known here."""
    readers = {"fp8": _plain_fp8, "mxfp4": _plain_mxfp4}
    reader = readers.get(str(quantization.get("quant_method")))
    return None if reader is None else reader(stored, quantization)


def _plain_fp8(stored: Mapping[str, torch.Tensor], quantization: Mapping[str, Any]) -> PlainHeaders:
    """Drop the scales that belong to a weight, and compare their block sizes with the config."""
    headers, block = PlainHeaders(), quantization.get("weight_block_size", (128, 128))
    scales: dict[str, str] = {}  # of each weight
    for name, tensor in stored.items():
        weights = [name.removesuffix(end) + instead for end, instead in _OF_FP8 if name.endswith(end)]
        if not weights or weights[0] not in stored:
            headers.tensors[name] = tensor
        elif not name.endswith(".activation_scale"):
            scales[weights[0]] = name
    for name, weight in list(headers.tensors.items()):
        if (scale := scales.get(name)) is None:
            if weight.dtype.is_floating_point and weight.element_size() == 1:
                headers.lacking.append(f"{name}_scale_inv")
            continue
        has = stored[scale].shape
        if not weight.dtype.is_floating_point:  # two numbers of four bits a byte, in blocks of their own
            headers.tensors[name] = weight.new_empty(*weight.shape[:-1], 2 * weight.shape[-1])
        elif block is not None and weight.ndim >= 2:
            rows, columns = (-(-size // part) for size, part in zip(weight.shape[-2:], block, strict=True))
            if list(has) != (needed := [*weight.shape[:-2], rows, columns]):
                headers.reshaped.append(f"{scale} {list(has)} for {needed}")
            # Upstream: transformers 5.10 takes a block's size from the number of scales, so that a last block that is
            # smaller than the others moves them all. To go when it takes that of the config.
            elif any(size % part and size > part for size, part in zip(weight.shape[-2:], block, strict=True)):
                headers.reshaped.append(
                    f"{scale}, whose weight {list(weight.shape)} has blocks of {list(block)} in part"
                )
    return headers


def _plain_mxfp4(stored: Mapping[str, torch.Tensor], quantization: Mapping[str, Any]) -> PlainHeaders:
    """Join blocks and scales of experts to the weights that they become."""
    headers = PlainHeaders()
    for name, tensor in stored.items():
        weight, blocks = name.removesuffix("_scales"), name.removesuffix("_blocks")
        if name.endswith("_blocks") and tensor.ndim == 4:
            experts, rows, groups, half = tensor.shape
            headers.tensors[blocks] = tensor.new_empty(experts, 2 * groups * half, rows)
            if (scales := stored.get(f"{blocks}_scales")) is None:
                headers.lacking.append(f"{blocks}_scales")
            elif scales.shape != tensor.shape[:-1]:
                headers.reshaped.append(f"{blocks}_scales {list(scales.shape)} for {list(tensor.shape[:-1])}")
        elif not name.endswith("_scales") or f"{weight}_blocks" not in stored:
            headers.tensors[name] = tensor
    return headers
