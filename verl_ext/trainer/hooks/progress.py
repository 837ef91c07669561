"""The hook for the bar over steps, their tokens and FLOPs."""

from verl_ext.trainer.hooks.base import Hook, StepOutcome


class ProgressHook(Hook):
    """The hook that moves the bar and counts tokens and model FLOPs."""

    state_names = ("total_tokens", "total_target_tokens")
    total_tokens = total_target_tokens = 0

    def pre_train(self) -> None:
        """Print the finished steps, and read each pack's tokens and FLOPs."""
        trainer, flops = self.trainer, self.trainer.engine.train_flops
        self._pack_flops = None if flops is None or not trainer.is_rank0 else self.run.train_set.facts(flops).costs
        done, total = trainer.first_step, self.run.total_steps
        if done >= total:
            trainer.progress.say(f"nothing to train: step {done} of {total} is done")
        elif done:
            trainer.progress.say(f"resumed after step {done} of {total}")

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Move the bar by a step, and count its tokens."""
        packs = self.run.plan.packs(step - 1)
        tokens = int(self.run.packs.document_tokens[packs].sum())
        self.total_tokens += tokens
        self.total_target_tokens += int(self.run.packs.targets[packs].sum())
        outcome.metrics["train/total_tokens"] = self.total_tokens
        outcome.metrics["train/total_target_tokens"] = self.total_target_tokens
        flops = None if self._pack_flops is None else float(self._pack_flops[packs].sum())
        self.trainer.progress.step(tokens, flops)

    def close(self) -> None:
        """Close the bar."""
        self.trainer.progress.close()
