"""A step's exact loss: coefficients from data, token losses from logits."""

from verl_ext.losses.modes import MODES, LossSpec, category_weight_table, pack_coefficients, shift_left
from verl_ext.losses.options import HEADS, LossOptions
from verl_ext.losses.preference import (
    Terms,
    kto_baseline,
    preference_slopes,
    preference_terms,
    total_weight,
)
from verl_ext.losses.preference_modes import PREFERENCE_MODES, Sides
from verl_ext.losses.preference_options import PreferenceOptions, checked_formula
from verl_ext.losses.preference_units import Units, row_coefficients, target_coefficients, target_scales
from verl_ext.losses.preference_values import preference_values
from verl_ext.losses.reference import ReferenceOptions
from verl_ext.losses.token_nll import (
    BLOCK_BYTES,
    TOKEN_STATS,
    Coefficients,
    head_terms,
    nll_and_stats,
    row_bytes,
    token_nll,
)
