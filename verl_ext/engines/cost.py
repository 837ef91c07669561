"""The cost of documents: the engine's FLOPs, and Ulysses' exchange.

    per token       6 per element of each matrix (:func:`verl_ext.flops.train_flops`), of a recurrent layer's state
    per document    3·heads·(d_qk + d_v)·l² in each layer's causal attention, zero heads of Ulysses included
    per token       3·(heads + kv_heads)·(d_qk + d_v)·(n − 1)/n elements that n ranks of Ulysses exchange in each layer

l is the number of tokens of a document; d_qk and d_v are the sizes of a head's keys and values.
"""

from dataclasses import replace
from typing import Any

from verl_ext.flops import attention_layers, head_width, train_flops
from verl_ext.layers import mixers_of
from verl_ext.packing import CostModel
from verl_ext.parallel.ulysses import HeadPadding

# GPU operations in the time in which its link moves one bf16 element (400 TFLOP/s, 400 GB/s): an order of magnitude.
_OPERATIONS_PER_ELEMENT = 2000


def computed_flops(module: Any, hf_config: Any, ulysses: int, recomputes: bool = False) -> CostModel | None:
    """Return a step's FLOPs with Ulysses' zero heads; None if unknown.

    Args:
        module: the model, before it is sharded or on the meta device.
        hf_config: its config.
        ulysses: the ranks that share the attention heads of a pack.
        recomputes: whether gradient checkpointing computes the layers' forward pass again.
    """
    states = sum(mixer.state_flops(layer) for layer, mixer in mixers_of(module))
    flops = train_flops(module, hf_config, states, recomputes)
    if flops is None or (padding := _padding(hf_config, ulysses)) is None:
        return flops
    padded = padding.heads / hf_config.get_text_config().num_attention_heads
    return replace(flops, quadratic=round(flops.quadratic * padded), windowed=round(flops.windowed * padded))


def balancing_cost(module: Any, hf_config: Any, ulysses: int) -> CostModel | None:
    """Return the cost that balances packs; None if it is unknown.

    Its unit is the cost of one layer's attention. Ulysses divides tokens and heads of a pack by the number of ranks,
    which keeps their ratio. Keys and values that travel between groups of ranks belong to long documents, whose
    attention costs far more.
    """
    flops, text = computed_flops(module, hf_config, ulysses), hf_config.get_text_config()
    if flops is None:
        return None
    padding, layers = _padding(hf_config, ulysses), attention_layers(text)
    if padding is None or not layers:
        return CostModel(1, 0)  # without attention, every token costs the same
    elements = 3 * layers * (padding.heads + padding.kv_heads) * head_width(text) * (ulysses - 1) / ulysses
    unit = (flops.quadratic + flops.windowed) / layers
    linear = round((flops.linear + _OPERATIONS_PER_ELEMENT * elements) / unit)
    return CostModel(linear, round(flops.quadratic / unit), round(flops.windowed / unit), flops.window)


def _padding(hf_config: Any, ulysses: int) -> HeadPadding | None:
    """Return the heads with Ulysses' zero heads; None without attention."""
    text = hf_config.get_text_config()
    if (heads := getattr(text, "num_attention_heads", None)) is None:
        return None
    return HeadPadding.from_heads(heads, getattr(text, "num_key_value_heads", None) or heads, ulysses)
