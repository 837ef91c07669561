"""A run's folder: the lock on it, verl's checkpoints in it, and what a resumed run must share with the run before.

    trainer.default_local_dir/run.lock      who holds it, or held it last: "process 4711 on node-3 since 2026-03-01 …"

One run writes in a folder at a time; its rank 0 holds the lock. The file stays: what counts is the POSIX record lock on
it, which the kernel releases however its process ends, also over NFS. filelock's `flock` would be inherited by loader
processes, which a killed rank leaves behind for a while. A process loses a record lock when it closes any of its file
objects of that file.
"""

import errno
import fcntl
import os
import re
import shutil
import socket
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from verl.utils.checkpoint import CheckpointHandler

from verl_ext.config.output import EVALUATION, FINAL_MEMORY, MEMORY_SETTINGS, REPORT, RUN_IDS, RUN_LOCK, TRACKER
from verl_ext.config.run import RunConfig
from verl_ext.engines.step import StepEngine
from verl_ext.files import write_json
from verl_ext.models.qwen_titans import save_memory_checkpoint
from verl_ext.trainer.tracking import METRICS


class PlanState:
    """What stands in for the data loader in verl's checkpoints.

    The packs of every step follow from the dataset, the budget, the strategy and the seed, so a checkpoint needs no
    loader position: only these, to refuse a resume that would silently train on other packs, or another model. How
    packs of like cost are grouped follows from the layout of the ranks, which a resume may change: it keeps the groups
    that it began with.

    Attributes:
        fingerprint: what must be the same in a resumed run, by dotted key.
        grouping: `Run.grouping` of this run, and of the checkpoint once one is loaded.
        skipped_steps: of the run so far, those before a resume included.
        skipped_in_a_row: of these, the last ones without a trained step between them.
        folder: of the run, for messages.
    """

    def __init__(self, fingerprint: dict[str, Any], grouping: dict[str, Any], folder: str) -> None:
        self.fingerprint = fingerprint
        self.grouping = grouping
        self.skipped_steps = self.skipped_in_a_row = 0
        self.folder = folder

    def state_dict(self) -> dict[str, Any]:
        """Saved beside the model as verl saves a loader's state."""
        skipped = {"skipped_steps": self.skipped_steps, "skipped_in_a_row": self.skipped_in_a_row}
        return {**self.fingerprint, "grouping": self.grouping, **skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what the checkpoint was trained on; ValueError as :meth:`check`."""
        self.check(state)
        self.grouping = state.get("grouping", self.grouping)
        self.skipped_steps = state.get("skipped_steps", 0)  # a checkpoint of an earlier version has none
        self.skipped_in_a_row = state.get("skipped_in_a_row", 0)

    def check_saved(self, checkpoint: str) -> None:
        """:meth:`check` of a `global_step_N` folder, before a model is loaded."""
        saved = Path(checkpoint) / "data_0.pt"
        if saved.is_file():
            self.check(torch.load(saved, map_location="cpu", weights_only=False))

    def check(self, state: dict[str, Any]) -> None:
        """Compare with what a checkpoint was trained on.

        Raises:
            ValueError: a key differs, so that the step number would mean other packs, or the weights another model.
        """
        for key, value in self.fingerprint.items():
            if key in state and state[key] != value:
                raise ValueError(
                    f"{key} is {value}, but the run in {self.folder} was trained with {state[key]}: resume with that, "
                    "or choose another trainer.default_local_dir, or trainer.overwrite=true"
                )


_OF_A_RUN = ("chunk_size", "output_std")  # settings that another run of the same memory may change
_STEP_FOLDER = re.compile(r"global_step_(\d+)")


class Checkpoints:
    """Saves and resumes through verl's ``CheckpointHandler``.

    Args:
        config: the run's.
        engine: an initialised engine.
        plan: fingerprint of the step plan.
    """

    def __init__(self, config: RunConfig, engine: StepEngine, plan: PlanState) -> None:
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
            lora_train_meta=_lora_metadata(config.values["model"]),
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


def _lora_metadata(model: dict[str, Any]) -> dict[str, Any] | None:
    """What verl writes beside a LoRA checkpoint."""
    if not model["lora_rank"] and model["lora_adapter_path"] is None:
        return None
    return {"r": int(model["lora_rank"]), "lora_alpha": int(model["lora_alpha"] or 0), "task_type": "CAUSAL_LM"}


def saved_folders(folder: Path) -> list[Path]:
    """Checkpoint folders below ``folder``, oldest step first."""
    steps = ((_STEP_FOLDER.fullmatch(path.name), path) for path in folder.glob("global_step_*"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in steps if match)]


def save_final_memory(engine: StepEngine, folder: Path, step: int, settings: dict[str, Any] | None) -> None:
    """The memory alone, of a model that has one, as final_memory_checkpoint.pt, and in a .json beside it those of its
    `settings` that its weights are of; collective."""
    memory = engine.memory_state_dict()
    if memory and dist.get_rank() == 0:
        assert settings is not None
        save_memory_checkpoint(folder / FINAL_MEMORY, memory, step)
        write_json(folder / MEMORY_SETTINGS, {name: value for name, value in settings.items() if name not in _OF_A_RUN})


def clear_output(folder: Path) -> None:
    """Remove what an earlier run wrote, as `trainer.overwrite=true` asks; other files stay."""
    for path in saved_folders(folder):
        shutil.rmtree(path)
    metrics = (METRICS, f"{METRICS}.before_resume")
    for name in (TRACKER, REPORT, EVALUATION, FINAL_MEMORY, MEMORY_SETTINGS, RUN_IDS, *metrics):
        (folder / name).unlink(missing_ok=True)


_HELD = (errno.EACCES, errno.EAGAIN)


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def refuse_locked(folder: Path) -> None:
    """Refuse a folder that a run on this or another host is writing in; leaves everything as it is.

    Raises:
        ValueError: the lock is held; the message says by which process.
    """
    path = folder / RUN_LOCK
    if path.is_file():
        with path.open() as file:
            _lock(file, fcntl.LOCK_SH)


def lock_folder(folder: Path) -> TextIO:
    """Lock `folder`, made where it is missing, for as long as this process lives and keeps what is returned.

    On a file system without locks nothing is locked, and a note says so.

    Raises:
        ValueError: as :func:`refuse_locked`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / RUN_LOCK).open("a+")  # what its holder wrote must outlive an attempt
    try:
        if not _lock(file, fcntl.LOCK_EX):
            print(f"note: {folder} cannot be locked (its file system has no locks)", file=sys.stderr)
        file.truncate(0)
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}")
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def _lock(file: TextIO, kind: int) -> bool:
    """Lock an open run.lock; False where its file system has no locks, ValueError where another process has it."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            file.seek(0)
            folder = Path(file.name).parent
            raise ValueError(
                "trainer.default_local_dir must be a folder that no other run is writing in; got "
                f"{folder}, which is held by {file.read() or 'another process'}: end that run, or choose another folder"
            ) from None
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True
