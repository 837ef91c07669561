"""The hook for checkpoints: when due, at the best step, at the end, at a stop."""

import contextlib
import sys
import time
from collections.abc import Iterator

import torch.distributed as dist

from verl_ext.checkpoint.save import NotWritten
from verl_ext.config.run import AFTER_EACH_EPOCH
from verl_ext.launch.protocol import Ending
from verl_ext.trainer.distributed import RunRanks
from verl_ext.trainer.hang import watch
from verl_ext.trainer.hooks.base import Hook, StepOutcome, states_of


class SavingHook(Hook):
    """The hook for checkpoints; only the last one's failure ends the run.

    Changed data files end the run too; they are compared before each checkpoint and after each epoch.
    """

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Save a checkpoint if one is due."""
        is_due = self.run.is_due(step, self.options.save_freq, self.options.saves_per_epoch)
        saves = is_due or step in (self.trainer.checkpoints.best, self.trainer.last_step)
        if saves or self.run.is_due(step, AFTER_EACH_EPOCH):
            with self.trainer.progress.paused(), self._training_waits(step):
                self._refuse_changed_data()
                if saves:
                    self._save(step)
            self.trainer.ask_ranks()

    def stop(self, step: int) -> None:
        """Save a checkpoint of the last completed step unless there is one."""
        checkpoints = self.trainer.checkpoints
        with self._training_waits(step), tolerate_failed_save("the run ends"):
            with tolerate_failed_save():
                checkpoints.finish()
            if checkpoints.last != step:
                self._refuse_changed_data()
                checkpoints.save(step, states_of(self.trainer.hooks))
                checkpoints.finish()

    def post_train(self) -> None:
        """Fail if a checkpoint has no copy."""
        watch.mark("the end of the run", "trainer.save_timeout")
        if missing := self.trainer.checkpoints.not_copied:
            raise Ending(
                f"trainer.default_hdfs_dir={self.options.default_hdfs_dir} lacks {', '.join(missing)}, whose copies "
                f"failed (warnings above); training is done, and {self.run.output} has what it keeps"
            )

    def _save(self, step: int) -> None:
        checkpoints, since = self.trainer.checkpoints, time.perf_counter()
        with tolerate_failed_save():  # finish the previous checkpoint, which threads write
            checkpoints.finish()
        is_last = step == self.trainer.last_step
        with failed_end() if is_last else tolerate_failed_save():
            checkpoints.save(step, states_of(self.trainer.hooks))
            if is_last:
                checkpoints.finish()
        self.trainer.log({"train/save_pause": time.perf_counter() - since}, step)

    @contextlib.contextmanager
    def _training_waits(self, step: int) -> Iterator[None]:
        """Watch the block under a save's limit; print above the bar."""
        with self.trainer.progress.aside(), watch.within("trainer.save_timeout", f"the checkpoint of step {step}"):
            yield

    def _refuse_changed_data(self) -> None:
        """End the run before a checkpoint if its data's content has changed."""
        if self.run.content is None:
            return
        if changed := next(filter(None, RunRanks().gather(self.run.files.changed())), None):
            with tolerate_failed_save():
                self.trainer.checkpoints.finish()  # the checkpoint of the unchanged data
            self.run.files.verify_content(self.run.content, changed, RunRanks())


@contextlib.contextmanager
def tolerate_failed_save(then: str = "training goes on") -> Iterator[None]:
    """Turn NotWritten, which every rank raises, into a warning."""
    try:
        yield
    except NotWritten as error:
        if dist.get_rank() == 0:
            print(f"warning: {then} without a checkpoint: {error}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def failed_end(what: str = "") -> Iterator[None]:
    """End the run if its result cannot be written; its line names `what`."""
    try:
        yield
    except NotWritten as error:
        raise Ending(f"the end of the run is not saved: {what}{error}") from error
