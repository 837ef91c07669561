"""Pure packing: lengths in, packs out. numpy only, no dataset, no config object."""

from verl_ext.packing.checks import check_choice, whole_number
from verl_ext.packing.order import epoch_order
from verl_ext.packing.over_length import OVER_LENGTH_POLICIES, Spans, cut_spans
from verl_ext.packing.plan import PackPlan
from verl_ext.packing.strategies import STRATEGIES, plan_packs

__all__ = [
    "OVER_LENGTH_POLICIES",
    "STRATEGIES",
    "PackPlan",
    "Spans",
    "check_choice",
    "cut_spans",
    "epoch_order",
    "plan_packs",
    "whole_number",
]
