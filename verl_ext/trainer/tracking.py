"""verl's tracking on rank 0, whose metrics file and tracked runs a resumed run continues.

The ids under which trackers know a run, kept beside its checkpoints so that a resumed run goes on with them.

{"wandb": "dz5g909n"}

wandb and swanlab read an id, and whether it may be gone on with, from the environment; one that is set there wins.

The lock on a run's folder: one run writes in it at a time.

    trainer.default_local_dir/run.lock      who holds it, or held it last: "process 4711 on node-3 since 2026-03-01 …"

Rank 0 of a run holds it. The file stays; what counts is the POSIX record lock on it, which the kernel releases however
its process ends, also over NFS. filelock's `flock` would be inherited by loader processes, which a killed rank leaves
behind for a while. A process loses a record lock when it closes any of its file objects of that file.
"""

import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import orjson
from verl.utils.tracking import Tracking

from verl_ext.config.output import RUN_IDS, RUN_LOCK
from verl_ext.config.run import RunConfig
from verl_ext.files import write_json

# tracker: (variable of its run's id, variable that lets a run of that id be gone on with)
_VARIABLES = {"wandb": ("WANDB_RUN_ID", "WANDB_RESUME"), "swanlab": ("SWANLAB_RUN_ID", "SWANLAB_RESUME")}


def read_run_ids(folder: Path) -> dict[str, str]:
    """What :func:`keep_run_ids` wrote into a run's folder; nothing where it wrote nothing.

    Raises:
        ValueError: the file is no JSON object.
    """
    path = folder / RUN_IDS
    if not path.is_file():
        return {}
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        ids = None
    if not isinstance(ids, dict):
        raise ValueError(f"trainer.default_local_dir: {RUN_IDS} must be a JSON object of run ids; got {path}")
    return ids


def keep_run_ids(folder: Path, earlier: Mapping[str, str], loggers: Mapping[str, Any]) -> None:
    """Write the ids of the runs that verl's ``Tracking.logger`` has begun, and of `earlier` ones that it has not."""
    runs = {
        "wandb": lambda wandb: wandb.run,
        "swanlab": lambda swanlab: swanlab.get_run(),
    }
    begun = {name: getattr(runs[name](loggers[name]), "id", None) for name in _VARIABLES if name in loggers}
    ids = {**earlier, **{name: run_id for name, run_id in begun.items() if run_id}}
    if ids:
        write_json(folder / RUN_IDS, ids)
    else:
        (folder / RUN_IDS).unlink(missing_ok=True)  # of a run that ended before its first checkpoint


@contextmanager
def going_on_with(ids: Mapping[str, str], loggers: Sequence[str]) -> Iterator[None]:
    """The environment in which `loggers` begin their runs with these ids; as it was afterwards."""
    variables: dict[str, str] = {}
    for name in _VARIABLES.keys() & ids.keys() & set(loggers):
        run_id, resume = _VARIABLES[name]
        variables |= {run_id: ids[name], resume: "allow"}
    added = {name: value for name, value in variables.items() if not os.environ.get(name)}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def refuse_running(folder: Path) -> None:
    """Refuse a folder that a run on this or another host is writing in; leaves everything as it is.

    Raises:
        ValueError: the lock is held; the message says by which process.
    """
    path = folder / RUN_LOCK
    if path.is_file():
        with path.open() as file:
            _lock(file, fcntl.LOCK_SH)


def hold(folder: Path) -> TextIO:
    """Lock `folder`, made where it is missing, for as long as this process lives and keeps what is returned.

    On a file system without locks nothing is locked, and a note says so.

    Raises:
        ValueError: as :func:`refuse_running`.
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


METRICS = "metrics.jsonl"
_FILE_PATH = "VERL_FILE_LOGGER_PATH"


def open_tracking(config: RunConfig, first_step: int) -> Tracking:
    """The loggers that `trainer.logger` names.

    verl's ``file`` logger opens its file anew even on resume; the lines up to ``first_step`` are put back here. Unless
    ``VERL_FILE_LOGGER_PATH`` says otherwise it lies beside the checkpoints as ``metrics.jsonl``. wandb and swanlab go
    on with the run that they began before ``first_step``; at step 0 they begin a new one.

    Raises:
        ValueError: a logger cannot begin, for want of a login, a package or a server.
    """
    folder, loggers = Path(config.trainer.default_local_dir), config.trainer.loggers
    kept: list[bytes] = []
    if "file" in loggers:
        path = Path(os.environ.setdefault(_FILE_PATH, str(folder / METRICS)))
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(path, first_step) if first_step else []
        backup = path.with_name(f"{path.name}.before_resume")
        if kept and not backup.exists():
            os.replace(path, backup)  # until they are written again below
    tracking = _begun(config, loggers, read_run_ids(folder) if first_step else {})
    if kept:
        tracking.logger["file"].fp.write(b"".join(kept))
        backup.unlink()
    return tracking


def _begun(config: RunConfig, loggers: list[str], ids: dict[str, str]) -> Tracking:
    """verl's tracking; its runs go on with `ids`, and theirs are kept for a resume."""
    trainer = config.trainer
    try:
        with going_on_with(ids, loggers), _nobody_to_ask():
            tracking = Tracking(
                trainer.project_name,
                trainer.experiment_name,
                default_backend=loggers,
                config=config.values,
            )
    except Exception as error:  # each tracker has exceptions of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"trainer.logger must name trackers that can begin; got {loggers} ({reason}); without a login there are "
            "WANDB_MODE=offline and SWANLAB_MODE=offline"
        ) from error
    keep_run_ids(Path(trainer.default_local_dir), ids, tracking.logger)
    return tracking


@contextmanager
def _nobody_to_ask() -> Iterator[None]:
    """No terminal to read from: a tracker without a login raises instead of asking, while every other rank waits."""
    terminal = sys.stdin
    with open(os.devnull) as nobody:
        sys.stdin = nobody
        try:
            yield
        finally:
            sys.stdin = terminal


def _lines_until(path: Path, step: int) -> list[bytes]:
    """Metric lines of steps up to ``step``; a torn last line of a killed run is left out."""
    backup = path.with_name(f"{path.name}.before_resume")
    source = backup if backup.exists() else path  # a resume that was killed at the wrong moment left its backup
    if not source.exists():
        return []
    kept = []
    for line in source.read_bytes().splitlines(keepends=True):
        try:
            if orjson.loads(line)["step"] <= step:
                kept.append(line)
        except orjson.JSONDecodeError:
            break
    return kept
