"""The hook for answers: step 0, every `eval.freq` steps, and the end.

    answers.jsonl    the same prompts each time: {"step", "category", "question" (the last user message or null),
                     "prompt", "answer", "expected", "score"}

verl gives trackers these rows as tables. A failure of a user's scorer or of a tracker is a warning, and
training goes on.
"""

import sys

from verl.utils.tracking import ValidationGenerationsLogger

from verl_ext.checkpoint.layout import ANSWERS
from verl_ext.redaction import redacted_text
from verl_ext.trainer.answers import NoAnswers
from verl_ext.trainer.hooks.base import Hook, StepOutcome
from verl_ext.trainer.hooks.tracking import append_lines, continued_lines, log_tracker_errors


class AnswersHook(Hook):
    """The evaluation by answers to `eval.prompts`, with metrics and a table."""

    def pre_train(self) -> None:
        """Keep the table's lines of finished steps."""
        self._tables = ValidationGenerationsLogger(self.options.project_name, self.options.experiment_name)
        if self.trainer.is_rank0 and self.trainer.answers is not None:
            continued_lines(self.run.output / ANSWERS, self.trainer.first_step)

    def pre_step(self, step: int) -> None:
        """Ask before the first step of a new run, as step 0."""
        if step == 1 and self.options.val_before_train:
            self._ask(0)
            self.trainer.ask_ranks()

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Ask if it is due."""
        if self.run.is_due(step, self.run.config.eval.freq or -1):
            self._ask(step)
            self.trainer.ask_ranks()

    def _ask(self, step: int) -> None:
        if self.trainer.answers is None:
            return
        with self.trainer.progress.paused():
            try:
                metrics, table = self.trainer.answers.measure(step)
            except NoAnswers as error:
                if self.trainer.is_rank0:
                    print(f"warning: step {step} has no val/answer: {redacted_text(str(error))}", file=sys.stderr)
                return
            self.trainer.log(metrics, step)
            if self.trainer.is_rank0 and table:
                loss = f"the answers of step {step} are lost"
                append_lines(self.run.output / ANSWERS, table, loss)
                with log_tracker_errors(loss):
                    rows = [[row["prompt"], row["answer"], row["score"]] for row in table]
                    self._tables.log(self.options.loggers, rows, step)
