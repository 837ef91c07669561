"""What torch notices of a loader process's death, told where a batch is asked for.

torch raises its notice from a signal handler, wherever the program is: in the middle of a training step it may be taken
for something else there, or be swallowed. Here it waits until the next batch is asked for. A process that dies while a
batch is waited for is told at once.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class LoadingFailed(RuntimeError):
    """A batch that cannot be made, in one line. It happens to one rank; the others know nothing of it."""


class WorkerDeaths:
    """Stands between the program and the SIGCHLD handler that torch's loader installs."""

    def __init__(self) -> None:
        self._torchs: Callable[..., Any] | None = None
        self._notice: RuntimeError | None = None
        self._waiting = False
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def listen(self) -> None:
        """To be called when a loader's processes have started."""
        self._processes = multiprocessing.active_children()
        installed = signal.getsignal(signal.SIGCHLD)
        # torch installs its handler in the main thread alone
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and callable(installed) and installed != self._on_signal:
            self._torchs = installed
            signal.signal(signal.SIGCHLD, self._on_signal)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Around the wait for a batch: a death, also an earlier one, is a ``LoadingFailed``."""
        self._waiting = True
        try:
            if self._notice is not None:
                notice, self._notice = self._notice, None
                raise notice
            yield
        except Exception as error:
            death = _death(error, self._processes)
            if death is None or os.environ.get("VERL_EXT_FULL_ERROR"):
                raise
            raise LoadingFailed(death) from error
        finally:
            self._waiting = False

    def _on_signal(self, signum: int, frame: Any) -> None:
        assert self._torchs is not None
        try:
            self._torchs(signum, frame)
        except RuntimeError as notice:
            if self._waiting:
                raise
            self._notice = notice


def _death(error: BaseException, processes: list[multiprocessing.process.BaseProcess]) -> str | None:
    """One line on the process that died, from torch's notice or a notice behind it; None for any other error."""
    found: list[tuple[str, str]] = []
    behind: BaseException | None = error
    while behind is not None:
        if match := re.match(r"DataLoader worker \((pid.*?)\) (is killed by signal: [^.]*|exited)", str(behind)):
            found.append((f"a loader process ({match[1]})", match[2].replace("is killed", "was killed")))
        behind = behind.__cause__ or behind.__context__
    if not found and isinstance(error, (ConnectionError, EOFError, FileNotFoundError)):
        # Its batch is here, the shared memory of the batch is not: the process hands it over when it is asked for.
        found.append(("a loader process", "exited before its batch was taken"))
    if not found:
        return None
    found += _killed(processes)
    process, fate = min(found, key=lambda entry: "signal" not in entry[1])  # what names the signal says more
    if "Bus error" in fate:
        advice = "shared memory (/dev/shm) that is too small, or a data file that was cut short, does that"
    else:
        advice = "where the host ran out of memory, give the job more of it"
    return f"{process} {fate}; {advice}, or lower data.num_workers or data.prefetch_factor"


def _killed(processes: list[multiprocessing.process.BaseProcess]) -> list[tuple[str, str]]:
    """What torch no longer knows where its loader saw the closed pipe, and took the exit code, before the signal."""
    codes = [(process.pid, process.exitcode) for process in processes]
    return [
        (f"a loader process (pid {pid})", f"was killed by signal: {signal.strsignal(-code)}")
        for pid, code in codes
        if code is not None and code < 0
    ]
