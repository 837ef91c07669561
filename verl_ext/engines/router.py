"""The router loss of a mixture-of-experts model, exact for the optimizer step: hooks record its routers' logits.

transformers computes the loss in each forward, for that batch alone and with one-hot tensors of every token, choice and
expert; here the routers that it declares (``_can_record_outputs``) are recorded instead.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.utils.output_capturing import OutputRecorder

from verl_ext.losses.router import RoutingSums, router_loss, routing_sums


def asks_for_router_loss(hf_config: Any) -> bool:
    """Whether a model's config has transformers add a router loss: ``output_router_logits`` and a coefficient."""
    text = hf_config.get_text_config()
    return bool(getattr(text, "output_router_logits", False)) and getattr(text, "router_aux_loss_coef", None) != 0


def has_router_loss(model_class: type | None, hf_config: Any) -> bool:
    """Whether :class:`RouterLoss` can be taken of a model of this class and config."""
    needs = ("router_aux_loss_coef", "num_experts_per_tok")
    return _router_of(model_class) is not None and all(hasattr(hf_config, name) for name in needs)


def _router_of(model_class: type | None) -> OutputRecorder | None:
    """The router that transformers declares for a model class: its module's class, and which output are the logits."""
    declared = (getattr(model_class, "_can_record_outputs", None) or {}).get("router_logits")
    return declared if isinstance(declared, OutputRecorder) and declared.layer_name is None else None


class RouterLoss:
    """Records the router logits of a module's forwards, and turns them into a rank's share of a step's loss.

    hf_config: the model's, of which ``router_aux_loss_coef`` and ``num_experts_per_tok`` are read.
    Raises ValueError where transformers declares no routers for this model.
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
            raise ValueError(
                f"model.override_config.output_router_logits must be false for {type(hf_config).__name__}: "
                "transformers declares no routers for it; got true"
            )
        for part, index in routers.items():
            part.register_forward_hook(lambda _, __, output, index=index: self._record(output[index]))

    def _record(self, logits: torch.Tensor) -> None:
        if self._logits is not None:  # neither in evaluation nor where a backward pass computes a layer again
            self._logits.append(logits.flatten(0, -2))

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """A list that holds every router's ``[T, E]`` logits of the forward inside."""
        logits: list[torch.Tensor] = []
        self._logits = logits
        try:
            yield logits
        finally:
            self._logits = None

    def begin_step(self) -> None:
        """Forget the last step's routing. :meth:`measure` sums that of the next one, else its only micro-batch does."""
        self._step = None

    def measure(self, micro_batches: Sequence[RoutingSums]) -> None:
        """Sum over a step's micro-batches and over all ranks, in one all-reduce; sets ``value``, the step's loss."""
        total = torch.stack([torch.cat([part.detach() for part in sums]) for sums in micro_batches]).sum(0)
        dist.all_reduce(total)
        experts = len(total) // 2
        self._step = RoutingSums(*total.split([experts, experts, 1]))
        self.value = router_loss(self._step, self._step.probabilities)

    def sums(self, logits: Sequence[torch.Tensor], is_real: torch.Tensor) -> RoutingSums:
        """What a micro-batch adds to the step's sums."""
        return routing_sums(logits, is_real, self.top_k)

    def share(self, logits: Sequence[torch.Tensor], is_real: torch.Tensor) -> torch.Tensor:
        """A micro-batch's share of the step's loss, weighted by ``router_aux_loss_coef``: a scalar with a gradient.

        It is multiplied by the number of ranks, over which FSDP averages gradients.
        """
        sums = self.sums(logits, is_real)
        if self._step is None:
            self.measure([sums])
        assert self._step is not None
        return self.coefficient * dist.get_world_size() * router_loss(self._step, sums.probabilities)
