"""The hook for hang limits, which change after the first step."""

from verl_ext.trainer.hang import watch
from verl_ext.trainer.hooks.base import Hook, StepOutcome


class HangHook(Hook):
    """The hook that tells the hang watch which step begins."""

    def pre_train(self) -> None:
        """Begin the phase of the first step."""
        watch.mark(f"step {self.trainer.first_step + 1}")

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Replace the limits of the first step after it."""
        if step == self.trainer.first_step + 1:  # The first step compiles and may take minutes, unlike the others.
            self.trainer.limit_collectives(first_step=False)
        watch.mark(f"step {step + 1}", "trainer.hang_timeout")
