"""The positions that a model has, for documents to stay within.

A pack may be longer than they are, because positions restart with every document.
"""

from typing import Any

from verl_ext.config.support import model_class
from verl_ext.layers.mixers import positions_of_padding


def check_positions(longest_document: int, max_tokens: int, hf_config: Any) -> None:
    """Raise ValueError if a document reaches positions that the model does not have.

    Positions restart with every document, so a pack may be longer than the model's positions; a document, of at most
    min(longest_document, max_tokens) tokens, may not.
    """
    positions = model_positions(hf_config)
    longest = min(longest_document, max_tokens)
    if positions is not None and longest > positions:
        raise ValueError(
            f"data.max_tokens must be at most the model's {positions} positions while a document is longer than those; "
            f"got {max_tokens} and a longest document of {longest} tokens: lower it with data.over_length=drop, "
            "truncate or split, or extend the model by model.override_config"
        )


def model_positions(hf_config: Any) -> int | None:
    """Return the positions that a model was made for, its RoPE scaling included; None if its config names none.

    Some configs (Llama 3) give max_position_embeddings with the scaling included, others (YaRN for Qwen) without: the
    larger reading is taken.
    """
    text = hf_config.get_text_config()
    positions = base = getattr(text, "max_position_embeddings", None)
    if not positions:
        return None
    ropes = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    ropes += [inner for rope in ropes if isinstance(rope, dict) for inner in rope.values()]  # one for each layer type
    for rope in ropes:
        if isinstance(rope, dict) and rope.get("factor"):
            positions = max(positions, int(rope["factor"] * (rope.get("original_max_position_embeddings") or base)))
    cls = model_class(hf_config)
    return int(positions) - (positions_of_padding(cls, text) if cls is not None else 0)
