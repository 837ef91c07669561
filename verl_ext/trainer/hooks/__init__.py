"""The hooks of the training loop, and their table in call order."""

from verl_ext.trainer.hooks.answers import AnswersHook
from verl_ext.trainer.hooks.base import Hook, StepOutcome
from verl_ext.trainer.hooks.console import ConsoleHook
from verl_ext.trainer.hooks.hang import HangHook
from verl_ext.trainer.hooks.profile import ProfileHook
from verl_ext.trainer.hooks.progress import ProgressHook
from verl_ext.trainer.hooks.saving import SavingHook
from verl_ext.trainer.hooks.spikes import SpikeHook
from verl_ext.trainer.hooks.stop import EarlyStopHook, SkippedStepsHook, StopHook
from verl_ext.trainer.hooks.tracking import TrackingHook
from verl_ext.trainer.hooks.validation import ValidationHook

HOOKS: tuple[type[Hook], ...] = (
    ProfileHook,
    ProgressHook,
    SpikeHook,
    SkippedStepsHook,
    TrackingHook,
    ValidationHook,
    AnswersHook,
    ConsoleHook,  # after all whose metrics are on a step's line
    EarlyStopHook,  # after the measurements of a step, before its checkpoint
    StopHook,
    SavingHook,
    HangHook,  # The last one, because its call starts the time of the next batch.
)
