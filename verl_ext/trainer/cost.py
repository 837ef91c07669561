"""The cost of a document to a model: the floating-point operations of a forward pass.

    per token and layer    2·h·(heads + 2·kv_heads)·d    query, key and value projections
                           2·heads·d·h                   output projection
                           2·matrices·h·f                MLP; of a mixture of experts, those that a token visits
    per token              2·h·V                         head
    per document, layer    2·heads·d·l²                  causal attention: half of 4·heads·d·l²

h hidden size, d head size, f MLP size, V vocabulary, l tokens. A backward pass costs about twice the forward in every
row, so the ratio holds for a training step. The unit is 2·heads·d operations: one layer's attention costs l².
"""

from typing import Any

from verl_ext.attention import HeadPadding
from verl_ext.flops import attention_layers, windowed_layers
from verl_ext.packing import TOKENS, CostModel

# Operations that a GPU does while its link moves one bf16 element: 400 TFLOP/s against 400 GB/s. An order of magnitude.
_OPERATIONS_PER_ELEMENT = 2000


def cost_model(kind: str, hf_config: Any, ulysses: int) -> CostModel:
    """Return the cost model that `data.cost` names: `tokens`, or `flops` from a Hugging Face config.

    Ulysses divides a pack's tokens and the heads of its attention by its number of ranks, which leaves their ratio but
    for zero heads; to every token's cost it adds the exchange of queries, keys, values and outputs. Keys and values
    that travel between groups of ranks are those of long documents, whose attention costs far more.
    """
    if kind == "tokens":
        return TOKENS
    text, ranks = hf_config.get_text_config(), ulysses
    hidden, layers = text.hidden_size, text.num_hidden_layers
    if (heads := getattr(text, "num_attention_heads", None)) is None:
        return TOKENS  # no attention: every token costs the same
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
    """Count operations per token of one layer's MLP; of dense and sparse layers, those of a sparse one."""
    size = getattr(text, "intermediate_size", None)
    experts = getattr(text, "num_experts_per_tok", None)
    if experts:
        expert = getattr(text, "moe_intermediate_size", None) or size or 4 * hidden
        size = (experts + (getattr(text, "n_shared_experts", None) or 0)) * expert
        size += getattr(text, "shared_expert_intermediate_size", None) or 0
    if not size:
        return 2 * 2 * hidden * 4 * hidden  # GPT-2: two matrices of 4·h
    return 2 * 3 * hidden * size
