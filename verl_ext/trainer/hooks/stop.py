"""The hooks that stop a run: requests, or too many skipped steps."""

from verl_ext.trainer.distributed import RunFailed
from verl_ext.trainer.hooks.base import Hook, StepOutcome
from verl_ext.trainer.hooks.saving import tolerate_failed_save
from verl_ext.trainer.signals import requests


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
