"""Pure packing with numpy alone: lengths in, packs out."""

from verl_ext.packing.order import TOKENS, CostModel, balanced_order, cost_over_ideal, epoch_order, micro_step_costs
from verl_ext.packing.plan import OVER_LENGTH_POLICIES, PackPlan, Spans, cut_spans
from verl_ext.packing.strategies import MOST_TOKENS, STRATEGIES, plan_packs
