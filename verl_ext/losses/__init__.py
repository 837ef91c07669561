"""A step's exact loss: coefficients from data, token losses from logits."""

from verl_ext.losses.modes import (
    HEADS,
    MODES,
    LossOptions,
    LossSpec,
    category_weight_table,
    pack_coefficients,
    shift_left,
)
from verl_ext.losses.token_nll import BLOCK_BYTES, MEASURES, head_terms, row_bytes, token_measures, token_nll
