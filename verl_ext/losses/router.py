"""The load-balancing loss of mixture-of-experts routers, over all real tokens of an optimizer step.

    L_router = E · Σ_e f_e · p_e     f_e = (1/N) Σ_n Σ_k [expert e is choice k of n]     p_e = (1/N) Σ_n softmax(z_n)_e

n runs over the real tokens of the step in each layer that has a router, N of them in all; z are the router logits.
These are equations 4 to 6 of Switch Transformers (https://arxiv.org/abs/2101.03961) for several choices a token, as
transformers' ``load_balancing_loss_func`` computes them for one batch. f has no gradient.

f and p are those of the whole step. Taken over each micro-batch instead, the loss would depend on packing, ranks and
accumulation, and would ask every micro-batch, often one document, to use all experts alike
(https://arxiv.org/abs/2501.11873).

Legend: T tokens, E experts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class RoutingSums(NamedTuple):
    """What tokens add to the sums of a step, in float64."""

    choices: torch.Tensor  # [E], how often each expert was chosen
    probabilities: torch.Tensor  # [E], the sum of its probabilities; has a gradient
    tokens: torch.Tensor  # [1], the tokens times the layers with a router


def routing_sums(logits: Sequence[torch.Tensor], is_real: torch.Tensor, top_k: int) -> RoutingSums:
    """The sums of one batch: logits ``[T, E]`` of every layer with a router, is_real bool``[T]``, False for padding,
    top_k experts for each token."""
    device, experts = logits[0].device, logits[0].shape[-1]
    choices = torch.zeros(experts, dtype=torch.float64, device=device)
    probabilities = torch.zeros(experts, dtype=torch.float64, device=device)
    is_real = is_real.unsqueeze(-1)
    for layer in logits:
        probability = layer.float().softmax(-1)
        chosen = probability.detach().topk(top_k, dim=-1).indices
        choices.index_add_(0, chosen.flatten(), is_real.expand_as(chosen).flatten().double())
        probabilities = probabilities + probability.masked_fill(~is_real, 0).sum(0, dtype=torch.float64)
    return RoutingSums(choices, probabilities, is_real.sum(0, dtype=torch.float64) * len(logits))


def router_loss(step: RoutingSums, probabilities: torch.Tensor) -> torch.Tensor:
    """The share ``[]`` of a step's L_router that tokens with these ``probabilities`` have; of all its own, L_router."""
    return len(step.choices) * (step.choices * probabilities).sum() / step.tokens.squeeze() ** 2
