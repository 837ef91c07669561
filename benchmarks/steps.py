"""The trainer's own optimizer step, one batch at a time."""

from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.trainer import SFTTrainer, StepOutcome, UpcomingStep


def take_step(trainer: SFTTrainer, batch: StepBatch, summed: bool) -> StepOutcome:
    """Take a step; every rank joins with its own batch."""
    counts = trainer.engine.is_mp_src_rank_with_outputs()
    return trainer.train_step(UpcomingStep(batch, counts, trainer.hosts), summed=summed)
