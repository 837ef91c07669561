"""The hook for verl's profiler between the two steps of `trainer.profile_interval`."""

from verl_ext.trainer.hooks.base import Hook, StepOutcome


class ProfileHook(Hook):
    """The hook for the profiler of verl's worker."""

    def pre_step(self, step: int) -> None:
        """Start the profiler before its first step."""
        if step == self.options.profile_interval[0]:
            self.trainer.client.start_profile()

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Step the profiler, and stop it after its last step."""
        first, last = self.options.profile_interval
        if first <= step <= last:
            self.trainer.client.step_profile()
        if step == last:
            self.trainer.client.stop_profile()
