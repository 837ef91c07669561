"""The hook for the console's line of a step."""

from verl_ext.trainer.hooks.base import Hook, StepOutcome
from verl_ext.trainer.hooks.tracking import log_tracker_errors


class ConsoleHook(Hook):
    """The hook that prints a step's line after its validation and answers."""

    def pre_step(self, step: int) -> None:
        """Print the measurement before the first step."""
        self._print(step - 1)

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Print the line of the step."""
        self._print(step)

    def _print(self, step: int) -> None:
        with log_tracker_errors(f"the line of step {step} is lost"):
            self.trainer.progress.flush()
