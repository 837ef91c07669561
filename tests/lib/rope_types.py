"""Rotary embeddings of every type, for small models."""

import verl_ext.attention.packed  # noqa: F401  registers the attention with transformers
from tests.lib.tiny_model import SHAPE as ONE_SHAPE

POSITIONS = 16  # beyond these, dynamic and longrope choose other frequencies
SHAPE = {name: value for name, value in ONE_SHAPE.items() if name != "head_dim"} | {
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 4.0, 8.0]}
BY_TYPE = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": POSITIONS},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": POSITIONS,
    },
    "longrope": {**_FACTORS, "original_max_position_embeddings": POSITIONS},
    "proportional": {"factor": 4.0, "partial_rotary_factor": 0.5},
}
