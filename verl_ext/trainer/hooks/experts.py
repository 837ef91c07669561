"""The hook that tells how evenly a step's tokens choose the experts of a mixture.

train/expert_rows_max    with parallel.expert_parallel: the rows that reach the experts of the fullest rank over those
                         of a rank on average, in the layer where this is the most
experts.jsonl            with trainer.log_experts, a line for each logged step, beside the run's checkpoints: step,
                         layers (their numbers) and shares (of a layer's choices, those of each expert)
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from verl.utils.device import get_device_id

from verl_ext.checkpoint.layout import EXPERTS
from verl_ext.parallel.experts import expert_layers
from verl_ext.trainer.hooks.base import Hook, StepOutcome, Training
from verl_ext.trainer.hooks.tracking import append_lines, continued_lines

_DIGITS = 5  # of a share


class ExpertsHook(Hook):
    """The hook that counts rows and choices of experts, recomputed ones as often as all others."""

    def __init__(self, trainer: Training) -> None:
        super().__init__(trainer)
        self._layers = [*expert_layers(trainer.engine.module)]
        self._counts: list[torch.Tensor] = []

    def pre_train(self) -> None:
        """Count choices from now on, and keep the file's lines of finished steps."""
        if not self.options.log_experts:
            return
        device: Any = get_device_id()
        for layer in self._layers:
            self._counts.append(torch.zeros(layer.num_experts, dtype=torch.int64, device=device))
            layer.register_forward_pre_hook(lambda _, args, counts=self._counts[-1]: _count(counts, args[1]))
        if self.trainer.is_rank0:
            continued_lines(self.run.output / EXPERTS, self.trainer.first_step)

    def pre_step(self, step: int) -> None:
        """Forget what validations and answers have counted."""
        for layer in self._layers:
            if hasattr(layer, "expert_share"):
                layer.expert_share.rows = 0
        for counts in self._counts:
            counts.zero_()

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Sum the counts of all ranks at a step that is logged."""
        if outcome.sums is None or not self.run.is_due(step, self.options.log_freq):
            return
        if shares := [layer.expert_share for layer in self._layers if hasattr(layer, "expert_share")]:
            device: Any = get_device_id()
            rows = torch.tensor([share.rows for share in shares], dtype=torch.float64, device=device)
            of_ranks = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
            dist.all_gather(of_ranks, rows)
            rows = torch.stack(of_ranks)
            rows = rows[:, rows.sum(0) > 0]  # without the experts of images
            outcome.metrics["train/expert_rows_max"] = float((rows / rows.mean(0)).max())
        if self._counts:
            total = torch.cat(self._counts)
            dist.all_reduce(total)
            of_layers = [counts / counts.sum().clamp(min=1) for counts in total.split([*map(len, self._counts)])]
            if self.trainer.is_rank0:
                row = {"step": step, "layers": self._numbers()}
                row["shares"] = [[round(share, _DIGITS) for share in shares.tolist()] for shares in of_layers]
                append_lines(self.run.output / EXPERTS, [row], f"experts of step {step} are lost")

    def _numbers(self) -> list[int]:
        """Return the number of each layer, as the names of its weights have it."""
        names = {part: name for name, part in self.trainer.engine.module.named_modules()}
        found = (re.search(r"\.(\d+)\.", names[layer]) for layer in self._layers)
        return [int(number[1]) if number else at for at, number in enumerate(found)]


def _count(counts: torch.Tensor, index: torch.Tensor) -> None:
    """Add the choices ``index[T, k]``, without waiting for the device."""
    chosen = index.reshape(-1).long()
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
