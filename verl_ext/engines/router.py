"""The router loss of a mixture-of-experts model, exact for the optimizer step.

    L_router = E · Σ_e f_e · p_e     f_e = (1/N) Σ_n Σ_k [expert e is choice k of n]     p_e = (1/N) Σ_n softmax(z_n)_e

n runs over the real tokens of the step in each layer that has a router, N of them in all; z are the router logits: eq.
4 to 6 of Switch Transformers (https://arxiv.org/abs/2101.03961) for several choices a token. f has no gradient. Taken
over each micro-batch instead, as transformers computes it in each forward, the loss would depend on packing, ranks and
accumulation, and would ask every micro-batch to use all experts alike (https://arxiv.org/abs/2501.11873).

Hooks record the logits of the routers that transformers declares (``_can_record_outputs``).

Legend: T tokens, E experts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers.utils.output_capturing import OutputRecorder

from verl_ext.options import must


class RoutingSums(NamedTuple):
    """The sums of a step or of some tokens, in float64."""

    choices: torch.Tensor  # [E], the number of times that each expert was chosen
    probabilities: torch.Tensor  # [E], the sum of each expert's probabilities; it has a gradient
    tokens: torch.Tensor  # [1], the number of tokens times that of layers with a router


def router_loss(step: RoutingSums, probabilities: torch.Tensor) -> torch.Tensor:
    """Return the share of L_router of tokens with these ``probabilities``."""
    return len(step.choices) * (step.choices * probabilities).sum() / step.tokens.squeeze() ** 2


def asks_for_router_loss(hf_config: Any) -> bool:
    """Tell whether a config has transformers add a router loss."""
    text = hf_config.get_text_config()
    return bool(getattr(text, "output_router_logits", False)) and getattr(text, "router_aux_loss_coef", None) != 0


def has_router_loss(model_class: type | None, hf_config: Any) -> bool:
    """Tell whether :class:`RouterLoss` supports models of this class and config."""
    needs = ("router_aux_loss_coef", "num_experts_per_tok")
    return _router_of(model_class) is not None and all(hasattr(hf_config, name) for name in needs)


def _router_of(model_class: type | None) -> OutputRecorder | None:
    """Return a model class's declared router, or None.

    It names the router's module class and the index of its logits.
    """
    declared = (getattr(model_class, "_can_record_outputs", None) or {}).get("router_logits")
    return declared if isinstance(declared, OutputRecorder) and declared.layer_name is None else None


class RouterLoss:
    """A recorder of router logits, and a rank's share of the loss.

    Raises ValueError if transformers declares no routers for this model.
    """

    def __init__(self, module: nn.Module, hf_config: Any) -> None:
        self.coefficient = float(hf_config.router_aux_loss_coef)
        self.top_k = int(hf_config.num_experts_per_tok)
        self.value = torch.full((), torch.nan)
        self._step: RoutingSums | None = None
        self._logits: list[torch.Tensor] | None = None
        routers = {
            part: router.index
            for model in module.modules()
            if (router := _router_of(type(model))) is not None
            for part in model.modules()
            if isinstance(part, router.target_class)
        }
        if not routers:
            needed = f"be false for {type(hf_config).__name__}: transformers declares no routers for it"
            raise ValueError(must("model.override_config.output_router_logits", needed, True))
        for part, index in routers.items():
            part.register_forward_hook(lambda _, __, output, index=index: self._record(output[index]))

    def _record(self, logits: torch.Tensor) -> None:
        if self._logits is not None:  # not in evaluation, nor when a backward pass recomputes a layer
            self._logits.append(logits.flatten(0, -2))  # [T, E]

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """Yield a list of every router's ``[T, E]`` logits inside."""
        logits: list[torch.Tensor] = []
        self._logits = logits
        try:
            yield logits
        finally:
            self._logits = None

    def begin_step(self) -> None:
        """Forget the last routing; :meth:`measure` or :meth:`share` sums the next."""
        self._step = None

    def measure(self, micro_batches: Sequence[RoutingSums]) -> None:
        """Sum routing over micro-batches and ranks; set ``value``, the step's loss."""
        total = torch.stack([torch.cat([part.detach() for part in sums]) for sums in micro_batches]).sum(0)
        dist.all_reduce(total)
        experts = len(total) // 2
        self._step = RoutingSums(*total.split([experts, experts, 1]))
        self.value = router_loss(self._step, self._step.probabilities)

    def sums(self, logits: Sequence[torch.Tensor], copies: torch.Tensor) -> RoutingSums:
        """Return a micro-batch's part of the step's sums.

        logits are ``[T, E]`` of every layer with a router; copies int64``[T]`` the documents that have a token, each of
        which counts, 0 for padding.
        """
        device, experts = logits[0].device, logits[0].shape[-1]
        choices = torch.zeros(experts, dtype=torch.float64, device=device)
        probabilities = torch.zeros(experts, dtype=torch.float64, device=device)
        weight = copies.unsqueeze(-1).double()
        for layer in logits:
            probability = layer.float().softmax(-1)
            chosen = probability.detach().topk(self.top_k, dim=-1).indices
            choices.index_add_(0, chosen.flatten(), weight.expand_as(chosen).flatten())
            of_tokens = probability.masked_fill(weight == 0, 0) * weight.float()
            probabilities = probabilities + of_tokens.sum(0, dtype=torch.float64)
        return RoutingSums(choices, probabilities, weight.sum(0) * len(logits))

    def share(self, logits: Sequence[torch.Tensor], copies: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's share of the loss, a weighted scalar.

        It has a gradient and is multiplied by the number of ranks, over which FSDP averages gradients.
        """
        sums = self.sums(logits, copies)
        if self._step is None:
            self.measure([sums])
        assert self._step is not None
        return self.coefficient * dist.get_world_size() * router_loss(self._step, sums.probabilities)
