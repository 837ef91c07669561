"""The hooks that stop a run: a watched metric, requests, high losses, or too many skipped steps."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from verl_ext.checkpoint.identity import Watched
from verl_ext.config.best import EARLY_STOP, is_of_answers
from verl_ext.trainer.distributed import RunFailed
from verl_ext.trainer.hooks.base import Hook, StepOutcome
from verl_ext.trainer.hooks.saving import tolerate_failed_save
from verl_ext.trainer.signals import requests


class WatchedHook(Hook):
    """The hook for the best values of watched metrics, which may end the run.

    Measurements before the first step do not count. Every rank takes rank 0's: ranks that share packs reduce sums of
    their own, whose last digits may differ on GPUs, and a checkpoint needs all ranks.
    """

    def pre_train(self) -> None:
        """Go on from the checkpoint's values of the same metrics."""
        before = self.trainer.run_state.watched
        self._watched = {
            key: before[key] if key in before and before[key].metric == metric else Watched(metric)
            for key, metric in self.run.config.watched.items()
        }
        self.trainer.run_state.watched = self._watched
        self._end_after(self.trainer.first_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the measurements of a step; raise RunFailed for a metric that it lacks."""
        for key, best in self._watched.items():
            whole = "val/answer" if is_of_answers(best.metric) else "val/loss"
            if whole not in metrics:
                continue  # not of this measurement
            if best.metric not in metrics:
                raise RunFailed(f"{key} must name a metric that is measured; got {best.metric}, not so at step {step}")
            value = torch.tensor(metrics[best.metric], dtype=torch.float64)
            dist.broadcast(value, src=0, group=self.trainer.hosts)
            if step:
                best.measure(value.item(), step, self.options.early_stop.least if key == EARLY_STOP else 0.0)

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """End the run with this step if the metric no longer improves."""
        self._end_after(step)

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

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Count a high loss, and end the run of all ranks after too many."""
        state, limit, most = self.trainer.run_state, self.options.max_loss, self.options.max_loss_steps
        if limit is None or outcome.sums is None:
            return
        loss = outcome.sums.loss
        state.high_in_a_row = 0 if loss <= limit else state.high_in_a_row + 1  # NaN is high
        if state.high_in_a_row >= most:
            with tolerate_failed_save("the run ends"):
                self.trainer.checkpoints.finish()
            raise RunFailed(
                f"stopping after step {step}: {most} consecutive steps had a loss above trainer.max_loss={limit:g}; "
                f"the last one has {loss:.6g}"
            )


class SkippedStepsHook(Hook):
    """The hook that ends the run after too many consecutive skipped steps."""

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Count a skipped step, and end the run after too many."""
        state, limit = self.trainer.run_state, self.options.max_skipped_steps
        if not outcome.skipped:
            state.skipped_in_a_row = 0
            return
        state.skipped_steps += 1
        state.skipped_in_a_row += 1
        self.trainer.progress.say(
            f"step {step} skipped: no finite gradient, or no target of a weight above 0 ({state.skipped_steps} so far)"
        )
        if state.skipped_in_a_row > limit:
            with tolerate_failed_save("the run ends"):
                self.trainer.checkpoints.finish()
            raise RunFailed(  # on every rank, because all see the same gradient norms
                f"stopping after step {step}: {state.skipped_in_a_row} consecutive steps had a non-finite gradient or "
                f"no weighted target (limit: trainer.max_skipped_steps={limit})"
            )
