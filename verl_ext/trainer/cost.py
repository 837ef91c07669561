"""The cost of a document: the floating-point operations of a forward pass.

    per token and layer    2·h·(heads + 2·kv_heads)·d    query, key and value projections
                           2·heads·d·h                   output projection
                           2·matrices·h·f                MLP; of experts, only those that a token visits
    per token              2·h·V                         head
    per document, layer    2·heads·d·l²                  causal attention: half of 4·heads·d·l²

h is the hidden size, d the head size, f the MLP size, V the vocabulary, l the tokens. A backward pass costs about twice
the forward pass in every row, so the ratios hold for training. In units of 2·heads·d, one layer's attention costs l².
"""

from typing import Any

from verl_ext.attention import HeadPadding
from verl_ext.flops import attention_layers, windowed_layers
from verl_ext.packing import TOKENS, CostModel

# GPU operations in the time in which its link moves one bf16 element (400 TFLOP/s, 400 GB/s): an order of magnitude.
_OPERATIONS_PER_ELEMENT = 2000


def cost_model(kind: str, hf_config: Any, ulysses: int) -> CostModel:
    """Return the cost model of `data.cost`: `tokens`, or `flops` from a Hugging Face config.

    Ulysses divides a pack's tokens and its attention heads by the number of ranks. This keeps their ratio, except for
    padded zero heads, and adds the exchange of queries, keys, values and outputs to every token's cost. Keys and values
    that travel between groups of ranks belong to long documents, whose attention costs far more.
    """
    if kind == "tokens":
        return TOKENS
    text, ranks = hf_config.get_text_config(), ulysses
    hidden, layers = text.hidden_size, text.num_hidden_layers
    if (heads := getattr(text, "num_attention_heads", None)) is None:
        return TOKENS  # without attention, every token costs the same
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head = getattr(text, "head_dim", None) or hidden // heads
    projections = 2 * hidden * head * (2 * heads + 2 * kv_heads)
    padded = HeadPadding.from_heads(heads, kv_heads, ranks)
    moved = head * (2 * padded.heads + 2 * padded.kv_heads) * (ranks - 1) / ranks
    per_token = layers * (projections + _mlp(text, hidden) + _OPERATIONS_PER_ELEMENT * moved)
    per_token += 2 * hidden * text.vocab_size
    windowed, window = windowed_layers(text)
    return CostModel(round(per_token / (2 * padded.heads * head)), attention_layers(text) - windowed, windowed, window)


def _mlp(text: Any, hidden: int) -> float:
    """Count the operations per token of a layer's MLP; of a sparse layer if dense and sparse layers mix."""
    size = getattr(text, "intermediate_size", None)
    experts = getattr(text, "num_experts_per_tok", None)
    if experts:
        expert = getattr(text, "moe_intermediate_size", None) or size or 4 * hidden
        size = (experts + (getattr(text, "n_shared_experts", None) or 0)) * expert
        size += getattr(text, "shared_expert_intermediate_size", None) or 0
    if not size:
        return 2 * 2 * hidden * 4 * hidden  # GPT-2: two matrices of 4·h
    return 2 * 3 * hidden * size
