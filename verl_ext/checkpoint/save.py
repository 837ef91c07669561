"""The saving of whole checkpoints, while training waits or goes on.

A save is collective and has three parts, so that only whole checkpoints have a checkpoint's name: every rank writes
into `global_step_N.partial`, syncs its files and computes their checksums; rank 0 writes manifest.json about all files;
rank 0 renames the folder, then updates the tracker. A run that is killed in between leaves the previous checkpoint.
"""

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from verl.utils.device import get_torch_device

from verl_ext.checkpoint import layout, state
from verl_ext.checkpoint.copies import SecondStorage
from verl_ext.checkpoint.export import Export, adapter_config
from verl_ext.checkpoint.identity import Identity
from verl_ext.checkpoint.source import ExportFiles
from verl_ext.config.run import RunConfig
from verl_ext.data.tokenized.reports import TrainedChats
from verl_ext.engines.step import StepEngine
from verl_ext.files import atomic_write, sync, write_json
from verl_ext.options import first_line, must, reason_of
from verl_ext.redaction import redacted_text

_LONGEST_WRITE = timedelta(hours=10)  # verl's own limit, for ranks that wait for one that writes most
_NO_CHATS = TrainedChats()


class NotWritten(OSError):
    """A failed write, as on a full disk, which every rank raises."""


@contextmanager
def errors_shared(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise a rank's error on all ranks, with rank and reason.

    An OSError becomes :class:`NotWritten`, any other error RuntimeError. Collective over a group, or all ranks if it is
    None. In the block, a rank that may fail joins no collectives except those of torch's checkpoints, which share their
    errors already.
    """
    failures: dict[int, BaseException] = {}
    raised: Exception | CheckpointException | None = None
    try:
        yield
    except CheckpointException as error:
        failures, raised = {rank: cause for rank, (cause, _) in error.failures.items()}, error
    except Exception as error:
        failures, raised = {dist.get_rank(): error}, error
    own: list[tuple[bool, str]] = []
    for rank, cause in failures.items():
        words = reason_of(cause) if isinstance(cause, OSError) else first_line(cause)
        own.append((isinstance(cause, OSError), f"rank {rank}: {words}"))
    told: list[list[tuple[bool, str]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(told, own, group)
    if any(told):
        # A program error takes precedence over a full disk.
        is_of_files, words = min(failure for of_rank in told for failure in of_rank)
        if is_of_files:
            raise NotWritten(words)
        raise RuntimeError(words) from raised


class Snapshot:
    """A checkpoint's content at one step, written at once or later."""

    def __init__(self, engine: StepEngine, folder: Path, later: bool = False, files: ExportFiles | None = None) -> None:
        """Collect the content; collective.

        Args:
            engine: an initialised engine.
            folder: the folder to write into.
            later: whether training goes on before :meth:`write`, so that tensors are copied to the host.
            files: the files of the export beside its weights; None: rank 0 reads them.
        """
        get_torch_device().synchronize()  # verl offloads weights and states without waiting for their copies
        self.engine, self.folder = engine, folder
        manager = engine.checkpoint_manager
        self.state: dict[str, torch.Tensor] = {}
        if manager.should_save_model:
            adapters_only = manager.should_save_lora_only and engine._is_lora
            self.state |= state.model_state(engine.module, adapters_only)
        if manager.should_save_optimizer:
            self.state |= state.optimizer_state(engine.module, engine.optimizer)
        self.extra = state.schedule_state(engine) if manager.should_save_extra else None
        if later and self.state:
            engine.host_copies = engine.host_copies or state.HostCopies()
            self.state = engine.host_copies.copy(self.state)
        self.export = Export(engine, files or (ExportFiles(engine, _NO_CHATS) if engine.rank == 0 else None))

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write the content; collective over a group (None: all ranks).

        Raises:
            NotWritten: If a file cannot be written.
        """
        if self.engine.host_copies is not None:
            self.engine.host_copies.wait()
        with errors_shared(group):
            if self.state:
                state.StateWriter(self.folder / state.STATE).write(self.state, group)
        with errors_shared(group):
            if self.engine.rank == 0:
                if self.extra is not None:
                    write_json(self.folder / state.EXTRA, self.extra)
                if self.state and self.engine._is_lora:
                    write_json(self.folder / state.ADAPTERS, adapter_config(self.engine.module))
                self.export.write(self.folder)


class Checkpoints:
    """The checkpoints that a run saves, and the one that it resumes.

    Args:
        config: the config of the run.
        engine: an initialised engine.
        identity: the facts of the run, for its checkpoints.
        resumed: the verified checkpoint from which the run resumes; None for a new run.
        join: a function that waits for the thread that writes a checkpoint.
        chats: the form of the chats in the training data.

    Attributes:
        last: the step of the last whole checkpoint; 0 before the first.
        best: the step of the best value of `checkpoint.keep_best`, which its hook sets; 0 without one.
        not_copied: the checkpoints that `trainer.default_hdfs_dir` lacks.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: StepEngine,
        identity: Identity,
        resumed: layout.Checkpoint | None,
        join: Callable[[threading.Thread], None] = threading.Thread.join,
        chats: TrainedChats = _NO_CHATS,
    ) -> None:
        self.folder = Path(config.trainer.default_local_dir)
        self.options = config.trainer
        self.contents = tuple(config.checkpoint.save_contents)
        self.engine, self.identity, self.resumed = engine, identity, resumed
        self.is_rank0 = dist.get_rank() == 0
        self._later = config.checkpoint.async_save
        # A writer thread's collectives must not meet those of training.
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
        self.last = self.best = 0
        self.not_copied: list[str] = []
        self._join = join
        self._files = ExportFiles(engine, chats) if self.is_rank0 else None
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    def resume(self) -> int:
        """Load the checkpoint to resume from; return its step, or 0; collective.

        Raises ValueError if the checkpoint cannot be read.
        """
        if self.resumed is None:
            return 0
        folder, self.last = self.resumed.folder, self.resumed.manifest.step
        state.load_engine(self.engine, folder)
        if self.is_rank0 and not self.options.eval_only and folder.parent.resolve() == self.folder.resolve():
            # Later checkpoints are damaged, or belong to an abandoned part of the run.
            for later in reversed(layout.saved_folders(self.folder)):
                if layout.step_of(later) > self.last:
                    aside = _set_aside(later)
                    print(f"warning: {later} is of a later step and is set aside as {aside.name}", file=sys.stderr)
            self._track(self.last)
            if not (link := self.folder / layout.BEST).exists():  # of the abandoned part
                link.unlink(missing_ok=True)
        return self.last

    def save(self, step: int, hooks: dict[str, dict[str, Any]]) -> None:
        """Write ``global_step_<step>``, with `checkpoint.async_save` by a thread of each rank; collective.

        hooks: the states of the hooks, which do not change while a thread writes them.

        Raises:
            NotWritten: If a rank cannot write its part; :meth:`finish` raises it if threads write. The new files are
                removed, and earlier checkpoints stay.
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
            snapshot = Snapshot(self.engine, _partial(folder), self._later, self._files)
        best = self.best  # which may change while a thread writes
        if not self._later:
            self._complete(folder, snapshot, hooks, best)
            return

        def complete() -> None:
            try:
                self._complete(folder, snapshot, hooks, best)
            except BaseException as error:  # finish() raises it in the training thread
                self._failure = error

        self._writing = threading.Thread(target=complete, name=f"the checkpoint of step {step}", daemon=True)
        self._writing.start()

    def finish(self) -> None:
        """Wait until the threads have written; raise NotWritten like :meth:`save`."""
        if self._writing is None:
            return
        self._join(self._writing)
        self._writing, failure, self._failure = None, self._failure, None
        if failure is not None:
            raise failure

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

    def _complete(self, folder: Path, snapshot: Snapshot, hooks: dict[str, dict[str, Any]], best: int) -> None:
        """Write a snapshot; turn it into a checkpoint once it is whole."""
        partial = _partial(folder)
        with self._removed_on_failure(folder):
            snapshot.write(self._group)
            # Each rank tells what it wrote, so that rank 0 notices files that a shared folder does not show it.
            own: dict[str, layout.FileFacts] = {}
            with errors_shared(self._group):
                own = layout.files_of_rank(partial, dist.get_rank())
            of_ranks: list[dict[str, layout.FileFacts]] = [{}] * dist.get_world_size()
            dist.all_gather_object(of_ranks, own, self._group)
            with errors_shared(self._group):
                if self.is_rank0:
                    _refuse_unseen(partial, of_ranks)
                    files = {name: facts for files in of_ranks for name, facts in files.items()}
                    layout.Manifest(
                        step=layout.step_of(folder),
                        ranks=len(of_ranks),
                        contents=self.contents,
                        facts=self.identity.saved(),
                        hooks=hooks,
                        files=files,
                    ).write(partial)
                    # The rename comes after everything is on the disk: a folder of this name is whole.
                    for path in (partial / layout.MANIFEST, *filter(Path.is_dir, partial.rglob("*")), partial):
                        sync(path)
                    if folder.exists():
                        _set_aside(folder)
                    os.replace(partial, folder)
                    sync(self.folder)
                    self._track(layout.step_of(folder))
        if self.is_rank0:
            if best == layout.step_of(folder):
                self._link_best(best)
            self._remove_oldest(best)
        dist.barrier(self._group)
        self.last = layout.step_of(folder)
        self._copy(folder)

    def _copy(self, folder: Path) -> None:
        """Copy a checkpoint to `trainer.default_hdfs_dir`; a failure is a warning."""
        if not self.options.default_hdfs_dir:
            return
        storage = SecondStorage(self.options.default_hdfs_dir)
        try:
            with errors_shared(self._group):
                if self.is_rank0:
                    storage.put(folder)
        except NotWritten as error:
            self.not_copied.append(folder.name)
            if self.is_rank0:
                told = f"{folder} is not copied to trainer.default_hdfs_dir={storage.place}: {error}"
                print(f"warning: {redacted_text(told)}", file=sys.stderr, flush=True)

    def _track(self, step: int) -> None:
        with atomic_write(self.folder / layout.TRACKER) as written:
            written.write_text(str(step))
            sync(written)
        sync(self.folder)

    def link_resumed_best(self, step: int) -> None:
        """Let the link `best` name the best step of a resumed run, if the run's folder has its checkpoint."""
        if self.is_rank0 and (self.folder / f"global_step_{step}").is_dir():
            self._link_best(step)

    def _link_best(self, step: int) -> None:
        """Let the link `best` name a step's checkpoint, or warn."""
        try:
            with atomic_write(self.folder / layout.BEST) as link:
                link.symlink_to(f"global_step_{step}")
        except OSError as error:  # some file systems have no links
            told = f"{self.folder / layout.BEST} cannot be a link to global_step_{step}: {error.strerror}"
            print(f"warning: {told}", file=sys.stderr)

    def _remove_oldest(self, best: int) -> None:
        """Keep `trainer.max_ckpt_to_keep` checkpoints and the best, including those from before a resume."""
        kept, link = self.options.max_ckpt_to_keep, self.folder / layout.BEST
        # The link differs from the best step if that could not be saved.
        spared = {f"global_step_{best}", os.readlink(link) if link.is_symlink() else ""}
        for old in layout.saved_folders(self.folder)[: -kept if kept else 0]:
            if old.name in spared:
                continue
            try:
                os.replace(old, _partial(old))  # so that no partial checkpoint has a checkpoint's name
                shutil.rmtree(_partial(old))
            except OSError as error:
                print(f"warning: {old} cannot be removed: {error.strerror}", file=sys.stderr)


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{layout.PARTIAL}")


def _set_aside(folder: Path) -> Path:
    """Rename a checkpoint so that nothing reads it; return its new path."""
    aside = folder.with_name(f"{folder.name}{layout.SET_ASIDE}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    return aside


def _refuse_unseen(folder: Path, of_ranks: list[dict[str, layout.FileFacts]]) -> None:
    """Raise ValueError if this rank misses a file that another wrote."""
    for rank, files in enumerate(of_ranks):
        for name, facts in files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != facts.bytes:
                got = f"{folder.parent}, where rank 0 does not see what rank {rank} wrote: {folder.name}/{name}"
                raise ValueError(must("trainer.default_local_dir", "be a folder that all ranks share", got))
