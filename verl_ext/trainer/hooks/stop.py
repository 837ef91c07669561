"""The hooks that stop a run: a watched metric, requests, high losses, or too many skipped steps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl_ext.config.best import EARLY_STOP, KEEP_BEST, is_gain, is_of_answers
from verl_ext.launch.protocol import Ending
from verl_ext.options import must
from verl_ext.trainer.hooks.base import Hook, StepOutcome, Training
from verl_ext.trainer.hooks.saving import tolerate_failed_save
from verl_ext.trainer.signals import requests


@dataclass
class Watched:
    """The best value of a metric so far.

    Attributes:
        metric: its name; an accuracy or a score is better if it is higher, a loss if it is lower.
        value: the best value; None before the first measurement.
        step: the step of that value.
        waited: the measurements since.
    """

    metric: str
    value: float | None = None
    step: int = 0
    waited: int = 0

    def measure(self, value: float, step: int, least: float = 0.0) -> None:
        """Take a measurement, which is an improvement by more than `least`."""
        gain = math.inf
        if self.value is not None:
            gain = value - self.value if is_gain(self.metric) else self.value - value
        if math.isfinite(value) and gain > least:
            self.value, self.step, self.waited = value, step, 0
        else:
            self.waited += 1


class WatchedHook(Hook):
    """The hook for the best values of watched metrics, which may end the run.

    Measurements before the first step do not count. Every rank takes rank 0's: ranks that share packs reduce sums of
    their own, whose last digits may differ on GPUs, and a checkpoint needs all ranks.
    """

    def __init__(self, trainer: Training) -> None:
        super().__init__(trainer)
        self._watched = {key: Watched(metric) for key, metric in self.run.config.watched.items()}

    def state(self) -> dict[str, Any]:
        """Return the best value of each metric, by the option that names it."""
        return {"watched": {key: vars(best) for key, best in self._watched.items()}}

    def load(self, state: dict[str, Any]) -> None:
        """Continue with the checkpoint's values of the same metrics, which may end the run before a step."""
        for key, saved in state["watched"].items():
            best = Watched(**saved)
            if key == KEEP_BEST:
                self.trainer.checkpoints.link_resumed_best(best.step)
            if key in self._watched and self._watched[key].metric == best.metric:
                self._take(key, best)
        self._end_after(self.trainer.first_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the measurements of a step; raise Ending for a metric that it lacks."""
        for key, best in self._watched.items():
            whole = "val/answer" if is_of_answers(best.metric) else "val/loss"
            if whole not in metrics:
                continue  # not of this measurement
            if best.metric not in metrics:
                raise Ending(must(key, "name a metric that is measured", f"{best.metric}, which step {step} lacks"))
            value = torch.tensor(metrics[best.metric], dtype=torch.float64)
            dist.broadcast(value, src=0, group=self.trainer.hosts)
            if step:
                best.measure(value.item(), step, self.options.early_stop.least if key == EARLY_STOP else 0.0)
                self._take(key, best)

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """End the run with this step if the metric no longer improves."""
        self._end_after(step)

    def _take(self, key: str, best: Watched) -> None:
        self._watched[key] = best
        if key == KEEP_BEST:
            self.trainer.checkpoints.best = best.step

    def _end_after(self, step: int) -> None:
        best = self._watched.get(EARLY_STOP)
        if best is None or best.waited < self.options.early_stop.patience or step >= self.run.total_steps:
            return
        self.trainer.last_step = step
        since = "has never been finite" if best.value is None else f"is best at step {best.step}, {best.value:.6g}"
        self.trainer.progress.say(
            f"trainer.early_stop: {best.metric} {since}, {best.waited} measurements ago: the run ends after step "
            f"{step} of {self.run.total_steps}"
        )


class StopHook(Hook):
    """The hook for a stop request on which the ranks agreed.

    It comes before the saving hook, because the launcher must know even if the save takes long.
    """

    def stop(self, step: int) -> None:
        """Print the signal that stops the run, and the last step."""
        requests.write_unfinished_marker()
        signal = requests.pending or "a signal to another rank"
        self.trainer.progress.say(
            f"{signal}: stopping after step {step} of {self.run.total_steps}. Run the same command to resume."
        )


class HighLossHook(Hook):
    """The hook that ends a run whose loss stays above `trainer.max_loss`."""

    state_names = ("high_in_a_row",)
    high_in_a_row = 0

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Count a high loss, and end the run of all ranks after too many."""
        limit, most = self.options.max_loss, self.options.max_loss_steps
        if limit is None or outcome.sums is None:
            return
        loss = outcome.sums.loss
        self.high_in_a_row = 0 if loss <= limit else self.high_in_a_row + 1  # NaN is high
        if self.high_in_a_row >= most:
            with tolerate_failed_save("the run ends"):
                self.trainer.checkpoints.finish()
            raise Ending(
                f"stopping after step {step}: {most} consecutive steps had a loss above trainer.max_loss={limit:g}; "
                f"the last one has {loss:.6g}"
            )


class SkippedStepsHook(Hook):
    """The hook that ends the run after too many consecutive skipped steps."""

    state_names = ("skipped_steps", "skipped_in_a_row")
    skipped_steps = skipped_in_a_row = 0

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Count a skipped step, and end the run after too many."""
        limit = self.options.max_skipped_steps
        self.skipped_steps += outcome.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if outcome.skipped else 0
        outcome.metrics["train/skipped_steps"] = self.skipped_steps
        if not outcome.skipped:
            return
        self.trainer.progress.say(
            f"step {step} skipped: no finite gradient, or no target of a weight above 0 ({self.skipped_steps} so far)"
        )
        if self.skipped_in_a_row > limit:
            with tolerate_failed_save("the run ends"):
                self.trainer.checkpoints.finish()
            raise Ending(  # on every rank, because all see the same gradient norms
                f"stopping after step {step}: {self.skipped_in_a_row} consecutive steps had a non-finite gradient or "
                f"no weighted target (limit: trainer.max_skipped_steps={limit})"
            )
