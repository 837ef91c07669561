"""The base class of hooks, and the outcome of a step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from verl_ext.metrics import StepSums
from verl_ext.trainer.batch import StepBatch

if TYPE_CHECKING:
    from verl_ext.trainer.trainer import SFTTrainer


@dataclass
class StepOutcome:
    """The outcome of one optimizer step.

    Attributes:
        batch: this rank's share of the step.
        grad_norm: the gradient norm over all ranks, before clipping; NaN if nothing was computed.
        lr: the learning rate that the step used.
        sums: the loss and the counts of all ranks; None if they were not requested or nothing was computed.
        nll: ℓ_t of this rank's micro-batches if spikes are watched and something was computed.
    """

    batch: StepBatch
    grad_norm: float
    lr: float
    sums: StepSums | None
    nll: list[torch.Tensor] | None = None

    @property
    def skipped(self) -> bool:
        """Whether the step changed no parameter: its gradient norm is not finite."""
        return not math.isfinite(self.grad_norm)


class Hook:
    """A watcher of the training loop.

    Every rank has the same hooks and calls them in the same order, so that a hook may use collectives. A file that a
    hook writes into the run's folder must be in `NOTES` of verl_ext.checkpoint.layout.

    Args:
        trainer: the trainer, with a built model and a loaded checkpoint.
    """

    def __init__(self, trainer: "SFTTrainer") -> None:
        self.trainer, self.run, self.options = trainer, trainer.run, trainer.config.trainer

    def pre_train(self) -> None:
        """Act before this process's first step; ValueError and OSError end the run."""

    def pre_step(self, step: int) -> None:
        """Act before a step, counted from 1.

        After a stop request `stop` follows, not `post_step`.
        """

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Act after a step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Receive the metrics of :meth:`SFTTrainer.log`."""

    def stop(self, step: int) -> None:
        """Act after a stop request; `step` was the last step."""

    def post_train(self) -> None:
        """Act after the last step of the run."""

    def close(self) -> None:
        """Act when training has ended normally, complete or stopped."""
