"""The metrics that keep a checkpoint or end a run, as options."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from verl.trainer.config import CheckpointConfig

from verl_ext.options import Options, option, spell

_WATCHABLE = re.compile(r"val/((loss|answer)(_\d+_(\d+|inf))?|answer/.+|.+_loss)")
KEEP_BEST, EARLY_STOP = "checkpoint.keep_best", "trainer.early_stop.metric"


def is_of_answers(metric: str) -> bool:
    """Tell whether a metric is a score of answers: more is better."""
    return re.fullmatch(r"val/answer(/.+|_\d+_(\d+|inf))?", metric) is not None


def _metric_problem(key: str, metric: str | None) -> str | None:
    """Return a line if no validation has a metric of this form."""
    if metric is None or _WATCHABLE.fullmatch(metric):
        return None
    forms = "val/loss, val/CATEGORY_loss, val/loss_FROM_TO, val/answer, val/answer/CATEGORY or val/answer_FROM_TO"
    return f"{key} must be {forms}; got {spell(metric)}"


@dataclass  # not frozen: a base of verl's own dataclass of the checkpoint node
class BestOptions(Options):
    """The keys of the checkpoint node that verl lacks."""

    prefix: ClassVar[str] = "checkpoint"

    keep_best: str | None = option(
        None,
        "metric whose best step is saved at once, kept beyond trainer.max_ckpt_to_keep and linked as best: val/loss, "
        "val/CATEGORY_loss, val/loss_FROM_TO (the lowest), val/answer, val/answer/CATEGORY, val/answer_FROM_TO (the "
        "highest); null: none",
    )

    def problems(self) -> Iterable[str | None]:
        """Yield a line for a metric that no run has."""
        yield _metric_problem(KEEP_BEST, self.keep_best)


@dataclass
class RunCheckpointConfig(CheckpointConfig, BestOptions):
    """verl's configuration of checkpoints with our keys."""


@dataclass(frozen=True)
class EarlyStopOptions(Options):
    """The keys that end a run before its last step."""

    prefix: ClassVar[str] = "trainer.early_stop"

    metric: str | None = option(
        None, "metric, as in checkpoint.keep_best, that must go on improving; null: train to the last step"
    )
    patience: int = option(3, "measurements in a row without an improvement, after which the run ends", least=1)
    least: float = option(0.0, "change that an improvement must exceed", least=0)

    def problems(self) -> Iterable[str | None]:
        """Yield a line for an unknown metric, or for options without one."""
        yield _metric_problem(EARLY_STOP, self.metric)
        if self.metric is None and (given := self.changed()):
            got = ", ".join(f"{self.prefix}.{name}={spell(value)}" for name, value in given.items())
            yield f"{EARLY_STOP} is required with {got}; got null"
