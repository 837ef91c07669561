"""The lock on a run's folder: one run writes in a folder at a time, and its rank 0 holds the lock.

    trainer.default_local_dir/run.lock      who holds it: "process 4711 on node-3 since 2026-03-01 …"

The lock is the POSIX record lock on the file, which the kernel releases however its process ends, also over NFS; the
file is removed where the process ends in order. filelock's `flock` would be inherited by loader processes, which a
killed rank leaves behind for a while. A process loses a record lock when it closes any of its file objects of it.
"""

import errno
import fcntl
import os
import socket
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from verl_ext.config.output import RUN_LOCK
from verl_ext.trainer.distributed import last_acts

_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def refuse_locked(folder: Path) -> None:
    """Refuse a folder that a run on this or another host is writing in; leaves everything as it is.

    Raises:
        ValueError: the lock is held; the message says by which process.
    """
    with suppress(FileNotFoundError), (folder / RUN_LOCK).open() as file:
        _lock(file, fcntl.LOCK_SH)


def lock_folder(folder: Path) -> None:
    """Lock `folder`, made where it is missing, for as long as this process lives, or until :data:`last_acts`.

    On a file system without locks nothing is locked, and a note says so.

    Raises:
        ValueError: as :func:`refuse_locked`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN_LOCK
    file = path.open("a+")  # What its holder wrote must outlive an attempt.
    try:
        if not _lock(file, fcntl.LOCK_EX):
            print(f"note: {folder} cannot be locked (its file system has no locks)", file=sys.stderr)
        is_removed = os.fstat(file.fileno()).st_nlink == 0
        if not is_removed:
            file.truncate(0)
            now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}")
            file.flush()
            last_acts.callback(_release, path, file)
    except BaseException:
        file.close()
        raise
    if is_removed:  # The run before has ended since the file was opened, and the next run would lock another one.
        file.close()
        lock_folder(folder)


def _release(path: Path, file: TextIO) -> None:
    path.unlink(missing_ok=True)  # while it is locked: afterwards it may be another run's
    file.close()


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
