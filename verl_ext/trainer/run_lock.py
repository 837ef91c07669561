"""The lock on a run's folder: one run writes in it at a time.

    trainer.default_local_dir/run.lock      who holds it, or held it last: "process 4711 on node-3 since 2026-03-01 …"

Rank 0 of a run holds it. The file stays; what counts is the POSIX record lock on it, which the kernel releases however
its process ends, also over NFS. filelock's `flock` would be inherited by loader processes, which a killed rank leaves
behind for a while. A process loses a record lock when it closes any of its file objects of that file.
"""

import errno
import fcntl
import os
import socket
import sys
from datetime import datetime
from pathlib import Path
from typing import TextIO

from verl_ext.config.output import RUN_LOCK

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
