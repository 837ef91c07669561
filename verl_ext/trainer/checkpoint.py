"""The checkpoints in a run's folder, and what a resumed run must share with the run before."""

import functools
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from verl.utils import hdfs_io

from verl_ext.config.checkpoints import (
    MANIFEST,
    PARTIAL,
    SET_ASIDE,
    TRACKER,
    FileFacts,
    Manifest,
    changed_file,
    files_of,
    saved_folders,
    saved_plan,
    step_of,
    unfinished_folders,
)
from verl_ext.config.output import (
    EVALUATION,
    FINAL_MEMORY,
    FLIGHT_RECORDER,
    MEMORY_SETTINGS,
    METRICS,
    REPORT,
    RUN_IDS,
    SPIKES,
    OutputPlan,
    check_ranks,
)
from verl_ext.config.run import RunConfig
from verl_ext.data.dataset import Ranks
from verl_ext.engines.saving import NotWritten, Save, check_readable, errors_shared, is_elastic, tensors_alone
from verl_ext.engines.step import StepEngine
from verl_ext.files import atomic_write, sync, write_errors, write_json
from verl_ext.models.qwen_titans import save_memory_checkpoint
from verl_ext.trainer.distributed import LONG, user_errors_end_the_run
from verl_ext.trainer.hang import watch
from verl_ext.values import nearest_name, show

_GROUPS = ("data.balance", "data.cost", "data.shuffle")
_SEEN = ("skipped_steps", "skipped_in_a_row", "spikes")


class RunState:
    """What a checkpoint was made with, and how far the run was.

    The packs of every step follow from the dataset, the budget, the strategy and the seed, so a checkpoint needs no
    loader position: only these, to refuse a resume that would silently train on other packs, or another model. How
    packs of like cost are grouped follows from the layout of the ranks, which a resume may change: it keeps the groups
    that it began with.

    Attributes:
        fingerprint: what must be the same in a resumed run, by dotted key.
        grouping: `Run.grouping` of this run, and of the checkpoint once one is loaded.
        skipped_steps: of the run so far, those before a resume included.
        skipped_in_a_row: of these, the last ones without a trained step between them.
        spikes: steps of the run so far whose loss was a spike; recent_losses: of the last trained steps.
        folder: of the run, for messages.
        allowed: keys that may differ, `trainer.allow_resume_mismatch`.
    """

    def __init__(
        self, fingerprint: dict[str, Any], grouping: dict[str, Any], folder: str, allowed: Sequence[str] = ()
    ) -> None:
        self.fingerprint = _as_json(fingerprint)
        self.grouping = grouping
        self.skipped_steps = self.skipped_in_a_row = self.spikes = 0
        self.recent_losses: list[float] = []
        self.folder = folder
        self.allowed = allowed

    def state_dict(self) -> dict[str, Any]:
        """What is saved with the model."""
        seen = {name: getattr(self, name) for name in _SEEN}
        return {**self.fingerprint, "grouping": self.grouping, **seen, "recent_losses": list(self.recent_losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what the checkpoint was trained on; ValueError as :meth:`check`.

        Packs stay grouped as they were, unless an option that groups them is allowed to change.
        """
        self.check(state)
        changed = any(state.get(key, value) != value for key, value in self.fingerprint.items() if key in _GROUPS)
        grouping = self.grouping if changed else state.get("grouping", self.grouping)
        losses = state.get("recent_losses", [])
        seen = {name: state.get(name, 0) for name in _SEEN}  # a checkpoint of an earlier version has none
        kinds = _is_like(grouping, self.grouping) and isinstance(losses, list)
        if not kinds or any(type(n) is not int for n in seen.values()) or any(type(x) is not float for x in losses):
            raise ValueError(f"a checkpoint must say how far its run was; that of {self.folder} has {show(seen)}")
        self.grouping, self.recent_losses = grouping, losses
        vars(self).update(seen)

    def check_allowed(self) -> None:
        """Raises ValueError for a name in `allowed` that no checkpoint remembers."""
        names = [_name(key) for key in self.fingerprint]
        for name in self.allowed:
            if name not in names:
                nearest = nearest_name(name, names)
                raise ValueError(
                    f"trainer.allow_resume_mismatch must name what a checkpoint remembers; got {name}"
                    + (f" (nearest: {nearest})" if nearest else f", not among {', '.join(sorted(set(names)))}")
                )

    def check(self, state: dict[str, Any]) -> None:
        """Compare with what a checkpoint was trained on.

        Raises:
            ValueError: a key differs, so that the step number would mean other packs, or the weights another model.
        """
        for key, value in self.fingerprint.items():
            name = _name(key)
            if key in state and _as_json(state[key]) != value and name not in self.allowed:
                raise ValueError(
                    f"{key} is {value}, but the run in {self.folder} was trained with {state[key]}: resume with that, "
                    f"or allow the change by trainer.allow_resume_mismatch=[{name}], or choose another "
                    "trainer.default_local_dir, or trainer.overwrite=true"
                )


def _name(key: str) -> str:
    """The option of a key such as "packs in data.train_dir"."""
    return next((word.strip("(),") for word in key.split() if "." in word), key)


def _is_like(grouping: Any, own: dict[str, Any]) -> bool:
    """Whether what a checkpoint says is a grouping as this run's."""
    if not isinstance(grouping, dict) or grouping.keys() != own.keys():
        return False
    if not own:
        return True
    size, cost = grouping["group_size"], grouping["cost"]
    numbers = isinstance(cost, list) and all(x is None or type(x) in (int, float) for x in cost)
    return type(size) is int and size >= 1 and numbers and 0 < len(cost) <= len(own["cost"])


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


_OF_A_RUN = ("chunk_size", "output_std")  # settings that another run of the same memory may change


class Checkpoints:
    """Saves and resumes the checkpoints of a run.

    A save is collective and has three parts, so that a checkpoint's name stands for a whole one: every rank writes
    into `global_step_N.partial`, has its files on the disk and takes their checksums; rank 0 writes manifest.json of
    all of them; rank 0 renames the folder, then the tracker. What is killed in between leaves the checkpoint before.

    Args:
        config: the run's.
        engine: an initialised engine.
        plan: what the checkpoints are made with.
        resumed: the checkpoint that the run resumes from, verified; None: it begins anew.
    """

    def __init__(self, config: RunConfig, engine: StepEngine, plan: RunState, resumed: Path | None) -> None:
        self.folder = Path(config.trainer.default_local_dir)
        self.options = config.trainer
        self.contents = tuple(config.values["checkpoint"]["save_contents"])
        self.engine, self.plan, self.resumed = engine, plan, resumed
        self.is_rank0 = dist.get_rank() == 0
        self._later = config.values["checkpoint"].get("async_save", False)
        # A writer thread's collectives must not meet the training's, and ranks wait for the one that writes most.
        self._group = dist.new_group(backend="gloo", timeout=LONG)
        self.last = 0  # the step of the last whole checkpoint, 0 before the first
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    def resume(self) -> int:
        """Load the checkpoint that the run resumes from; its step, 0 without one."""
        if self.resumed is None:
            return 0
        reading = (
            nullcontext if self.options.allow_pickled_checkpoints else functools.partial(tensors_alone, self.resumed)
        )
        with user_errors_end_the_run(), reading():
            check_readable(self.resumed)
        with reading():
            self.engine.load_checkpoint(str(self.resumed))
        self.plan.load_state_dict(saved_plan(self.resumed))
        self.last = step = step_of(self.resumed)
        if self.is_rank0 and not self.options.eval_only and self.resumed.parent.resolve() == self.folder.resolve():
            self._set_aside_later(step)
        return step

    def _set_aside_later(self, step: int) -> None:
        """Set aside checkpoints of later steps, which are damaged or of an abandoned part of the run."""
        for later in reversed(saved_folders(self.folder)):
            if step_of(later) > step:
                aside = later.with_name(f"{later.name}{SET_ASIDE}")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(later, aside)
                print(f"warning: {later} is of a later step and is set aside as {aside.name}", file=sys.stderr)
        self._track(step)

    def save(self, step: int) -> None:
        """Write ``global_step_<step>``; collective. With `checkpoint.async_save` a thread of each rank writes it.

        Raises:
            NotWritten: a rank could not write its part, where threads write from :meth:`finish`; what was written is
                removed, earlier checkpoints are as before.
        """
        assert self._writing is None, "the checkpoint before is finished first"
        folder = self.folder / f"global_step_{step}"
        if self.is_rank0:
            print(f"Saving checkpoint to: {folder}")
        with self._removed_on_failure(folder):
            with errors_shared():
                if self.is_rank0:
                    shutil.rmtree(_partial(folder), ignore_errors=True)
                    _partial(folder).mkdir(parents=True)
            collected = self.engine.collected(_partial(folder), later=self._later)
        plan = self.plan.state_dict()
        if not self._later:
            self._complete(folder, collected, plan)
            return
        name, arguments = f"the checkpoint of step {step}", (folder, collected, plan)
        self._writing = threading.Thread(target=self._complete_aside, args=arguments, name=name, daemon=True)
        self._writing.start()

    def finish(self) -> None:
        """Wait until a checkpoint that threads write is whole; NotWritten as :meth:`save`."""
        if self._writing is None:
            return
        watch.join(self._writing)
        self._writing, failure, self._failure = None, self._failure, None
        if failure is not None:
            raise failure

    def _complete_aside(self, folder: Path, collected: Save, plan: dict[str, Any]) -> None:
        try:
            self._complete(folder, collected, plan)
        except BaseException as error:  # raised by finish(), in the thread that trains
            self._failure = error

    @contextmanager
    def _removed_on_failure(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self.is_rank0:
                shutil.rmtree(_partial(folder), ignore_errors=True)
            if isinstance(error, NotWritten):
                raise NotWritten(f"{folder} cannot be written: {error}") from error
            raise

    def _complete(self, folder: Path, collected: Save, plan: dict[str, Any]) -> None:
        """Write what was collected, and make it a checkpoint once it is whole."""
        with self._removed_on_failure(folder):
            collected.write(self._group)
            own: dict[str, FileFacts] = {}
            with errors_shared(self._group):
                own = files_of(_partial(folder), dist.get_rank())
            of_ranks: list[dict[str, FileFacts]] = [{}] * dist.get_world_size()
            dist.all_gather_object(of_ranks, own, self._group)
            with errors_shared(self._group):
                if self.is_rank0:
                    self._seal(folder, of_ranks, plan)
                    self._publish(_partial(folder), folder)
        if self.is_rank0:
            self._remove_oldest()
            if hdfs := self.options.default_hdfs_dir:
                hdfs_io.makedirs(hdfs, exist_ok=True)
                hdfs_io.copy(src=str(folder), dst=hdfs, dirs_exist_ok=True)
        dist.barrier(self._group)
        self.last = step_of(folder)

    def _seal(self, folder: Path, of_ranks: list[dict[str, FileFacts]], plan: dict[str, Any]) -> None:
        """Write manifest.json of what every rank wrote."""
        partial = _partial(folder)
        for rank, files in enumerate(of_ranks):
            _refuse_unseen(partial, rank, files)
        files = {name: facts for files in of_ranks for name, facts in files.items()}
        elastic = is_elastic(self.engine)
        Manifest(step_of(folder), len(of_ranks), self.contents, plan, elastic, files).write(partial)
        for path in (partial / MANIFEST, *(path for path in partial.rglob("*") if path.is_dir()), partial):
            sync(path)

    def _publish(self, partial: Path, folder: Path) -> None:
        aside = folder.with_name(f"{folder.name}{SET_ASIDE}")
        if folder.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(folder, aside)
        os.replace(partial, folder)
        sync(self.folder)
        self._track(step_of(folder))

    def _track(self, step: int) -> None:
        with atomic_write(self.folder / TRACKER) as written:
            written.write_text(str(step))
            sync(written)
        sync(self.folder)

    def _remove_oldest(self) -> None:
        """Keep `trainer.max_ckpt_to_keep`, those from before a resume included; the newest is whole by now."""
        kept = self.options.max_ckpt_to_keep
        for old in saved_folders(self.folder)[: -kept if kept else 0]:
            try:
                os.replace(old, _partial(old))  # never half a checkpoint under a checkpoint's name
                shutil.rmtree(_partial(old))
            except OSError as error:
                print(f"warning: {old} cannot be removed: {error.strerror}", file=sys.stderr)


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{PARTIAL}")


def _refuse_unseen(folder: Path, rank: int, files: dict[str, FileFacts]) -> None:
    for name, facts in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != facts.bytes:
            raise ValueError(
                "trainer.default_local_dir must be a folder that all ranks share; got "
                f"{folder.parent}, where rank 0 does not see what rank {rank} wrote: {folder.name}/{name}"
            )


def remove_unfinished(folder: Path) -> None:
    """Remove partial files and folders of runs that were killed."""
    for path in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def save_final_memory(engine: StepEngine, folder: Path, step: int, settings: dict[str, Any] | None) -> None:
    """The memory alone, of a model that has one, as final_memory_checkpoint.pt, and in a .json beside it those of its
    `settings` that its weights are of; collective. NotWritten: on every rank, where the disk is full."""
    memory = engine.memory_state_dict()
    try:
        with errors_shared(), write_errors(folder):  # no rank goes on, and exits, before it is written
            if memory and dist.get_rank() == 0:
                assert settings is not None
                save_memory_checkpoint(folder / FINAL_MEMORY, memory, step)
                of_weights = {name: value for name, value in settings.items() if name not in _OF_A_RUN}
                write_json(folder / MEMORY_SETTINGS, of_weights)
    except NotWritten as error:
        raise NotWritten(f"{folder / FINAL_MEMORY} cannot be written: {error}") from error


def remove_run_files(folder: Path) -> None:
    """Remove what an earlier run wrote, as `trainer.overwrite=true` asks; other files stay."""
    for path in (*saved_folders(folder), *unfinished_folders(folder)):
        shutil.rmtree(path)
    shutil.rmtree(folder / FLIGHT_RECORDER, ignore_errors=True)
    lines = (f"{name}{ending}" for name in (METRICS, SPIKES) for ending in ("", ".before_resume", ".before_restart"))
    for name in (TRACKER, REPORT, EVALUATION, FINAL_MEMORY, MEMORY_SETTINGS, RUN_IDS, *lines):
        (folder / name).unlink(missing_ok=True)


def verified(output: OutputPlan, ranks: Ranks) -> Path | None:
    """The checkpoint that a run resumes from, its files compared with their checksums; collective.

    Raises:
        ValueError: none is, or the one that was named is not.
    """
    said = list(output.damaged)
    for named in filter(None, (output.checkpoint, *output.earlier)):
        checkpoint = Path(named)
        wrong = next(filter(None, ranks.gather(changed_file(checkpoint, ranks.rank, ranks.size))), None)
        if wrong is None:
            check_ranks(checkpoint, ranks.size)
            if said and ranks.rank == 0:
                print(*(f"warning: {line}" for line in said), sep="\n", file=sys.stderr)
                print(f"warning: going on from {checkpoint} in its place", file=sys.stderr, flush=True)
            return checkpoint
        said.append(f"{checkpoint} is damaged: {wrong}")
    if said:
        raise ValueError("; ".join(said) + ": choose another trainer.default_local_dir, or trainer.overwrite=true")
    return None
