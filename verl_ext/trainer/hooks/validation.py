"""Validation, every `trainer.test_freq` steps and after the last one."""

from verl_ext.trainer.hooks.base import Hook, StepOutcome


class ValidationHook(Hook):
    """The validation: its metrics are logged."""

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Validate if it is due."""
        if self.run.validation is not None and self.run.is_due(step, self.options.test_freq):
            with self.trainer.progress.paused():
                self.trainer.log(self.trainer.validate(), step)
