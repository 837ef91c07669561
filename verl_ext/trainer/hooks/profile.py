"""The hook for verl's profiler between the two steps of `trainer.profile_interval`."""

from verl_ext.trainer.hooks.base import Hook, StepOutcome


class ProfileHook(Hook):
    """The hook for the profiler of verl's worker.

    A resume inside the interval profiles the rest of it; the end of a run or a stop inside it writes the trace so far.
    """

    _is_on = False

    def pre_train(self) -> None:
        """Say so if the interval has no step of this run."""
        first, last = self.options.profile_interval
        done, total = self.trainer.first_step, self.run.total_steps
        if last > 0 and max(first, done + 1) > min(last, total):
            of = f"the steps {done + 1} to {total} of this run" if done < total else "a run without steps"
            self.trainer.progress.say(f"trainer.profile_interval=[{first}, {last}] has none of {of}: no profile")

    def pre_step(self, step: int) -> None:
        """Start the profiler before its first step."""
        first, last = self.options.profile_interval
        if first <= step <= last and not self._is_on:
            self._is_on = True
            self.trainer.client.start_profile()

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Step the profiler, and stop it after its last step."""
        if self._is_on:
            self.trainer.client.step_profile()
        if step == self.options.profile_interval[1]:
            self._end()

    def stop(self, step: int) -> None:
        """Write the trace so far."""
        self._end()

    def post_train(self) -> None:
        """Write the trace so far, if the interval is longer."""
        self._end()

    def _end(self) -> None:
        if self._is_on:
            self._is_on = False
            self.trainer.client.stop_profile()
