"""The metrics that keep a checkpoint or end a run, as options."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from verl.trainer.config import CheckpointConfig

from verl_ext.options import Options, must, option, spell

_OF_A_BIN = r"(_\d+_(\d+|inf))?"
# The metrics of which more is better.
_GAINS = "accuracy|exact_match|reward_margin|reward_chosen|logp_chosen"
KEEP_BEST, EARLY_STOP = "checkpoint.keep_best", "trainer.early_stop.metric"


def is_of_answers(metric: str) -> bool:
    """Tell whether a metric is a score of answers to `eval.prompts`."""
    return re.fullmatch(rf"val/answer(/.+|{_OF_A_BIN})", metric) is not None


def is_gain(metric: str) -> bool:
    """Tell whether more of a metric is better."""
    return is_of_answers(metric) or re.fullmatch(rf"val/(.+_)?({_GAINS}){_OF_A_BIN}", metric) is not None


def _metric_problem(key: str, metric: str | None) -> str | None:
    """Return a line if a metric is not one of validation; which of these a run has is known with its data."""
    if metric is None or re.fullmatch("val/.+", metric):
        return None
    return must(key, "be a metric of validation, such as val/loss or val/CATEGORY_loss", metric)


@dataclass  # not frozen: a base of verl's own dataclass of the checkpoint node
class BestOptions(Options):
    """The keys of the checkpoint node that verl lacks, or has with another default."""

    prefix: ClassVar[str] = "checkpoint"

    save_lora_only: bool = option(True, "true: checkpoints hold only what is trained, false: the frozen base too")
    keep_best: str | None = option(
        None,
        "metric of validation or answers whose best step is saved at once, kept beyond trainer.max_ckpt_to_keep and "
        "linked as best, such as val/loss or val/CATEGORY_loss (the lowest), val/reward_accuracy, val/reward_margin or "
        "val/answer (the highest); null: none",
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

    metric: str | None = option(None, "metric that must improve, as for keep_best; null: train to the last step")
    patience: int = option(3, "measurements in a row without an improvement, after which the run ends", least=1)
    least: float = option(0.0, "change that an improvement must exceed", least=0)

    def problems(self) -> Iterable[str | None]:
        """Yield a line for an unknown metric, or for options without one."""
        yield _metric_problem(EARLY_STOP, self.metric)
        if self.metric is None and (given := self.changed()):
            got = ", ".join(f"{self.prefix}.{name}={spell(value)}" for name, value in given.items())
            yield f"{EARLY_STOP} is required with {got}; got null"
