"""Pure packing with numpy alone: lengths in, packs out."""

from verl_ext.packing.cost import TOKENS, CostModel, cost_over_ideal, micro_step_costs
from verl_ext.packing.order import balanced_order, epoch_order
from verl_ext.packing.plan import OVER_LENGTH_POLICIES, PackPlan, Spans, cut_spans
from verl_ext.packing.strategies import MOST_TOKENS, STRATEGIES, plan_packs
