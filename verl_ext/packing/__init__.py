"""Pure packing: lengths in, packs out. numpy only, no dataset, no config object."""

from verl_ext.packing.balance import balanced_order
from verl_ext.packing.checks import check_choice, whole_number
from verl_ext.packing.cost import TOKENS, CostModel, cost_over_ideal
from verl_ext.packing.order import epoch_order
from verl_ext.packing.over_length import OVER_LENGTH_POLICIES, Spans, cut_spans
from verl_ext.packing.plan import PackPlan
from verl_ext.packing.strategies import STRATEGIES, plan_packs

__all__ = [
    "OVER_LENGTH_POLICIES",
    "STRATEGIES",
    "TOKENS",
    "CostModel",
    "PackPlan",
    "Spans",
    "balanced_order",
    "check_choice",
    "cost_over_ideal",
    "cut_spans",
    "epoch_order",
    "plan_packs",
    "whole_number",
]
