"""The bar over the steps of a run."""

from typing import TYPE_CHECKING

from verl_ext.trainer.hooks.base import Hook, StepOutcome

if TYPE_CHECKING:
    from verl_ext.trainer.trainer import SFTTrainer


class ProgressHook(Hook):
    """The trainer's bar, which counts the tokens of all ranks."""

    def __init__(self, trainer: "SFTTrainer") -> None:
        super().__init__(trainer)
        self._pack_tokens = self.run.train_set.pack_tokens()
        done, total = trainer.first_step, self.run.total_steps
        if done >= total:
            trainer.progress.say(f"nothing to train: step {done} of {total} is done")
        elif done:
            trainer.progress.say(f"resumed after step {done} of {total}")

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Move the bar by a step."""
        self.trainer.progress.step(int(self._pack_tokens[self.run.plan.packs(step - 1)].sum()))

    def close(self) -> None:
        """End the bar."""
        self.trainer.progress.close()
