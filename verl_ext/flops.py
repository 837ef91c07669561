"""Model FLOPs of a training step, and GPU peaks for the MFU.

    per token       2 per element of each matrix that multiplies it; only the experts that it visits count
    per token       4 or 6 per element of a recurrent layer's state (`verl_ext.layers.mixers`)
    per document    heads·(d_qk + d_v)·l² in each layer's causal attention (half of the square); less with a window

These are the FLOPs of a forward pass. A backward pass costs twice as much, or the same for a frozen matrix.
Recomputation (checkpointing, flash attention), norms and embeddings count nothing. The head counts for every token, as
is usual for the MFU, although losses are computed for target tokens alone.

Here l is the number of tokens of a document; d_qk and d_v are the sizes of a head's keys and values.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_ext.packing import CostModel

if TYPE_CHECKING:
    from torch import nn

# Dense bf16 FLOP/s from the data sheets of NVIDIA and AMD. The first key that is in a device's name as whole words
# applies: "A10" is neither an A100 nor an A10G, nor the workstation card RTX A1000.
PEAK_FLOPS = {
    **{"GB300": 2500e12, "B300": 2250e12, "GB200": 2500e12, "B200": 2250e12},
    **{
        "H100 PCIe": 756e12,
        "H100 NVL": 835e12,
        "H100": 989e12,
        "H200 NVL": 835e12,
        "H200": 989e12,
        "GH200": 989e12,
        "H20": 148e12,
    },
    **{"H800 PCIe": 756e12, "H800": 989e12},
    **{"A100": 312e12, "A800": 312e12, "A30": 165e12, "A10G": 70e12, "A10": 125e12, "A40": 149.7e12},
    **{"L40S": 362e12, "L40": 181e12, "L20": 119.5e12, "L4": 121e12},
    **{"MI300X": 1307e12, "MI325X": 1307e12, "MI355X": 2500e12, "MI350X": 2300e12},
}


@dataclass(frozen=True)
class GPU:
    """The memory and the links of a GPU.

    Attributes:
        memory: the total that its driver reports.
        link: bytes per second that it receives from GPUs of its node, from the data sheet.
        network: bytes per second that it receives from other nodes, in the manufacturer's own machines.
    """

    memory: str
    link: str
    network: str


# PEAK_FLOPS holds the peaks of these GPUs.
GPUS = {
    **{"A100-40G": GPU("40960MiB", "300GB", "25GB"), "A100-80G": GPU("81920MiB", "300GB", "25GB")},
    **{"A800-80G": GPU("81920MiB", "200GB", "25GB"), "H800-80G": GPU("81559MiB", "200GB", "50GB")},
    **{"H100-80G": GPU("81559MiB", "450GB", "50GB"), "H200-141G": GPU("143771MiB", "450GB", "50GB")},
    **{"H20-96G": GPU("97871MiB", "450GB", "50GB"), "B200-180G": GPU("183359MiB", "900GB", "50GB")},
    **{"L40S-48G": GPU("46068MiB", "32GB", "25GB"), "MI300X-192G": GPU("196592MiB", "448GB", "50GB")},
}
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k")
_EXPERT = re.compile(r"(^|\.)experts\.\d+(\.|$)")


def peak_flops(device: str) -> float | None:
    """Return a device's peak FLOP/s; None if unknown or a MIG slice."""
    known = {} if re.search(r"\bMIG\b", device) else PEAK_FLOPS
    return next((peak for name, peak in known.items() if re.search(rf"\b{name}\b", device)), None)


def train_flops(model: "nn.Module", hf_config: Any, of_states: float = 0, recomputes: bool = False) -> CostModel | None:
    """Return the FLOPs of training; None for unknown experts or attention.

    Args:
        model: a transformers model with its adapters, before it is sharded.
        hf_config: its config.
        of_states: the forward FLOPs per token in the states of recurrent layers.
        recomputes: whether to count the recomputation of gradient checkpointing too, which is the layers' forward pass.
            The last matrix of each layer counts, although torch does not recompute it.
    """
    text = hf_config.get_text_config()
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        return None
    try:
        per_token = sum(_of_matrices(model, text, recomputes)) + (3 + recomputes) * of_states
    except LookupError:
        return None
    if (heads := getattr(text, "num_attention_heads", None)) is None:
        return CostModel(round(per_token), 0)
    width = (3 + recomputes) * heads * head_width(text)
    windowed, window = windowed_layers(text)
    return CostModel(round(per_token), width * (attention_layers(text) - windowed), width * windowed, window)


def _of_matrices(model: "nn.Module", text: Any, recomputes: bool) -> Iterator[float]:
    """Yield each matrix's FLOPs per token; raise LookupError for unknown experts."""
    from torch import nn  # here, because the help of a plan names GPUs without torch

    experts, chosen = next(filter(None, (getattr(text, name, None) for name in _EXPERTS)), None), chosen_experts(text)
    head: Any = model.get_output_embeddings() if recomputes else None  # type: ignore[operator]
    for path, part in model.named_modules():
        if isinstance(part, nn.Embedding):
            continue
        again = 2 if recomputes and part is not head else 0
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.ndim < 2 or name.endswith(("bias", "_absmax")):
                continue
            share = 1.0 if parameter.is_floating_point() else 2.0  # two numbers of four bits a byte
            is_stacked = parameter.ndim == 3 and not isinstance(part, nn.Conv1d)
            if is_stacked or _EXPERT.search(path):
                if not experts or not chosen or (is_stacked and parameter.shape[0] != experts):
                    raise LookupError(f"{path}.{name}")
                share *= chosen / experts
            yield share * parameter.numel() * ((6 if parameter.requires_grad else 4) + again)


def chosen_experts(hf_config: Any) -> int | None:
    """Return the experts of a layer that a token visits; None if the config names no number."""
    text = hf_config.get_text_config()
    return next(filter(None, (getattr(text, name, None) for name in _CHOSEN)), None)


def head_width(text: Any) -> int:
    """Return d_qk + d_v, the sizes of a head's keys and values."""
    keys = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if rotated := getattr(text, "qk_rope_head_dim", None):  # latent attention has keys in two parts
        keys = text.qk_nope_head_dim + rotated
    return keys + (getattr(text, "v_head_dim", None) or keys)


def attention_layers(text: Any) -> int:
    """Count the softmax-attention layers of a text config, windowed ones included."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    return (
        sum("attention" in kind and kind != "linear_attention" for kind in kinds) if kinds else text.num_hidden_layers
    )


def windowed_layers(text: Any) -> tuple[int, int | None]:
    """Return the layers with sliding-window attention, and the window in tokens."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers  # Mistral: every layer
    layers = sum(kind == "sliding_attention" for kind in kinds)
    return (layers, int(window)) if window and layers else (0, None)
