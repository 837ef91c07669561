"""verl's checkpoints for a run whose data position is its step number."""

import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig
from verl.utils.checkpoint import CheckpointHandler

from verl_ext.config.output import EVALUATION, FINAL_MEMORY, REPORT, TRACKER
from verl_ext.engines.step import StepEngine
from verl_ext.models.qwen_titans import save_memory_checkpoint
from verl_ext.trainer.tracking import METRICS

_STEP_FOLDER = re.compile(r"global_step_(\d+)")


class PlanState:
    """What stands in for the data loader in verl's checkpoints.

    The packs of every step follow from the dataset, the budget, the strategy and the seed, so a checkpoint needs no
    loader position: only these, to refuse a resume that would silently train on other packs. How packs of like cost
    are grouped follows from the layout of the ranks, which a resume may change: it keeps the groups that it began with.

    Attributes:
        fingerprint: what must be the same in a resumed run, by dotted key.
        grouping: `Run.grouping` of this run, and of the checkpoint once one is loaded.
        folder: of the run, for messages.
    """

    def __init__(self, fingerprint: dict[str, Any], grouping: dict[str, Any], folder: str) -> None:
        self.fingerprint = fingerprint
        self.grouping = grouping
        self.folder = folder

    def state_dict(self) -> dict[str, Any]:
        """Saved beside the model as verl saves a loader's state."""
        return {**self.fingerprint, "grouping": self.grouping}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare with what the checkpoint was trained on.

        Raises:
            ValueError: a key differs, so the step number would mean other packs.
        """
        for key, value in self.fingerprint.items():
            if key in state and state[key] != value:
                raise ValueError(
                    f"{key} is {value}, but the run in {self.folder} was trained with {state[key]}: resume with that, "
                    "or choose another trainer.default_local_dir, or trainer.overwrite=true"
                )
        self.grouping = state.get("grouping", self.grouping)


class Checkpoints:
    """Saves and resumes through verl's ``CheckpointHandler``.

    Args:
        config: the composed configuration.
        engine: an initialised engine.
        plan: fingerprint of the step plan.
        lora: LoRA rank, alpha and task for verl's metadata file, or None.
    """

    def __init__(self, config: DictConfig, engine: StepEngine, plan: PlanState, lora: dict[str, Any] | None) -> None:
        trainer = config.trainer
        self.folder = Path(trainer.default_local_dir)
        self.engine = engine
        self.handler = CheckpointHandler(
            engine=engine,
            train_dataloader=plan,
            default_local_dir=trainer.default_local_dir,
            max_ckpt_to_keep=trainer.max_ckpt_to_keep,
            default_hdfs_dir=trainer.default_hdfs_dir,
            resume_mode=trainer.resume_mode,
            resume_from_path=trainer.resume_from_path,
            lora_train_meta=lora,
        )

    def resume(self) -> int:
        """Load the checkpoint that `trainer.resume_mode` means; its step, 0 without one."""
        step = self.handler.load_checkpoint()
        if step:
            # verl's retention counts only what this process has saved.
            self.engine.checkpoint_manager.previous_saved_paths = [str(p) for p in saved_folders(self.folder)]
        return step

    def save(self, step: int) -> None:
        """Write ``global_step_<step>``."""
        self.handler.save_checkpoint(step=step)


def saved_folders(folder: Path) -> list[Path]:
    """Checkpoint folders below ``folder``, oldest step first."""
    steps = ((_STEP_FOLDER.fullmatch(path.name), path) for path in folder.glob("global_step_*"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in steps if match)]


def save_final_memory(engine: StepEngine, folder: Path, step: int) -> None:
    """The memory alone, of a model that has one, as final_memory_checkpoint.pt; collective."""
    memory = engine.memory_state_dict()
    if memory and dist.get_rank() == 0:
        save_memory_checkpoint(folder / FINAL_MEMORY, memory, step)


def clear_output(folder: Path) -> None:
    """Remove what an earlier run wrote, as `trainer.overwrite=true` asks; other files stay."""
    for path in saved_folders(folder):
        shutil.rmtree(path)
    for name in (TRACKER, REPORT, EVALUATION, FINAL_MEMORY, METRICS, f"{METRICS}.before_resume"):
        (folder / name).unlink(missing_ok=True)
