"""The hooks of the training loop, and their table in call order."""

from collections.abc import Sequence

from verl_ext.custom import named_object
from verl_ext.options import must, spell
from verl_ext.trainer.hooks.answers import AnswersHook
from verl_ext.trainer.hooks.base import Hook, StepOutcome, closing, load_states, states_of
from verl_ext.trainer.hooks.console import ConsoleHook
from verl_ext.trainer.hooks.experts import ExpertsHook
from verl_ext.trainer.hooks.hang import HangHook
from verl_ext.trainer.hooks.profile import ProfileHook
from verl_ext.trainer.hooks.progress import ProgressHook
from verl_ext.trainer.hooks.saving import SavingHook
from verl_ext.trainer.hooks.spikes import SpikeHook
from verl_ext.trainer.hooks.stop import HighLossHook, SkippedStepsHook, StopHook, WatchedHook
from verl_ext.trainer.hooks.tracking import TrackingHook
from verl_ext.trainer.hooks.validation import ValidationHook

HOOKS: tuple[type[Hook], ...] = (
    ProfileHook,
    ProgressHook,
    SpikeHook,
    SkippedStepsHook,
    HighLossHook,
    ExpertsHook,
    TrackingHook,
    ValidationHook,
    AnswersHook,
    ConsoleHook,  # after all whose metrics are on a step's line
    WatchedHook,  # after the measurements of a step, before its checkpoint
    StopHook,
    SavingHook,
    HangHook,  # The last one, because its call starts the time of the next batch.
)


def hook_classes(names: Sequence[str]) -> tuple[type[Hook], ...]:
    """Return the table with the classes of `trainer.hooks` before the console.

    So the metrics that they log are on a step's line, and what they change is in its checkpoint. Raises ValueError for
    a name that is not a subclass of Hook, or a class whose name another hook has.
    """
    own: list[type[Hook]] = []
    for name in names:
        found = named_object("trainer.hooks", name)
        if not (isinstance(found, type) and issubclass(found, Hook)):
            needed = "name subclasses of verl_ext.trainer.hooks.Hook"
            raise ValueError(must("trainer.hooks", needed, f"{name}, which is {spell(found)}"))
        if found.__name__ in {hook.__name__ for hook in (*HOOKS, *own)}:  # by which checkpoints know their states
            needed = "name classes of different names, also from those of the trainer's own hooks"
            raise ValueError(must("trainer.hooks", needed, f"a second {found.__name__}"))
        own.append(found)
    console = HOOKS.index(ConsoleHook)
    return (*HOOKS[:console], *own, *HOOKS[console:])
