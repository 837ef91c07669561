"""The hook for validation: step 0, every `trainer.test_freq` steps, the end."""

from verl_ext.trainer.hooks.base import Hook, StepOutcome


class ValidationHook(Hook):
    """The hook that validates and logs the metrics."""

    def pre_step(self, step: int) -> None:
        """Validate before the first step of a new run, as step 0."""
        if step == 1 and self.options.val_before_train:
            self._validate(0)

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Validate if it is due."""
        if self.run.is_due(step, self.options.test_freq, self.options.tests_per_epoch):
            self._validate(step)

    def _validate(self, step: int) -> None:
        if self.run.validation is not None:
            with self.trainer.progress.paused():
                self.trainer.log(self.trainer.validate(), step)
            self.trainer.ask_ranks()
