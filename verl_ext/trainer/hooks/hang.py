"""The limits of a hang, which change when the first step has ended."""

from typing import TYPE_CHECKING

from verl_ext.trainer.distributed import limit_collectives
from verl_ext.trainer.hang import watch
from verl_ext.trainer.hooks.base import Hook, StepOutcome

if TYPE_CHECKING:
    from verl_ext.trainer.trainer import SFTTrainer


class HangHook(Hook):
    """The watch over hangs, which is told which step begins."""

    def __init__(self, trainer: "SFTTrainer") -> None:
        super().__init__(trainer)
        watch.mark(f"step {trainer.first_step + 1}")

    def post_step(self, step: int, outcome: StepOutcome) -> None:
        """Let the limits of the first step end with it."""
        if step == self.trainer.first_step + 1:  # The first step compiles and may take minutes: the others may not.
            limit_collectives_of(self.trainer, first_step=False)
        watch.mark(f"step {step + 1}", "trainer.hang_timeout")


def limit_collectives_of(trainer: "SFTTrainer", first_step: bool) -> None:
    """Let a collective of training take as long as `trainer.nccl_timeout` or the limit of a hang says."""
    engine = trainer.engine
    meshes = (engine.device_mesh, engine.ulysses_device_mesh, engine.context_device_mesh)
    limit_collectives(trainer.config.trainer.collective_timeout(first_step), filter(None, meshes))
