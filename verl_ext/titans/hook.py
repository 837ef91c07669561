"""The hook that writes a trained memory without its base model."""

from typing import Any

import torch.distributed as dist

from verl_ext.checkpoint.save import errors_shared
from verl_ext.files import write_errors, write_json
from verl_ext.titans.checkpoint import save_memory_checkpoint
from verl_ext.titans.configuration import settings_of_weights
from verl_ext.trainer.hang import watch
from verl_ext.trainer.hooks.base import Hook
from verl_ext.trainer.hooks.saving import failed_end

_SETTINGS_OF_A_RUN = ("chunk_size", "output_std")  # settings that another run of the same memory may change


class MemoryHook(Hook):
    """Writes the memory and the settings of its weights at the end of a run."""

    files = ("final_memory_checkpoint.pt", "final_memory_checkpoint.json")

    def post_train(self) -> None:
        """Write both files; end the run if the disk is full."""
        watch.mark("the end of the run", "trainer.save_timeout")
        done = max(self.trainer.first_step, self.trainer.last_step)  # an earlier run may have trained further
        path, settings = (self.run.output / name for name in self.files)
        engine: Any = self.trainer.engine
        memory = engine.memory_state_dict()
        # No rank exits before the memory is written.
        with failed_end(f"{path} cannot be written: "), errors_shared(), write_errors(path.parent):
            if dist.get_rank() == 0:
                save_memory_checkpoint(path, memory, done)
                of_weights = settings_of_weights(self.run.model.hf_config).items()
                write_json(settings, {name: value for name, value in of_weights if name not in _SETTINGS_OF_A_RUN})
