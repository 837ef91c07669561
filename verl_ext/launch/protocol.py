"""How a run ends: each event, who writes it, who reads it, and the exit code of a rank.

    exit code      event                               written by                     read by
    0              done                                every rank                     torchrun
    0              a stop below launcher or restarts   ranks: `unfinished`            launcher, which exits with 75
    1              an exception                        its rank: traceback, store     the others, which exit with 3
    2              a mistake in options or data        any rank                       rank 0, which prints a line
    3              a failure that all ranks see        every rank: Ending             rank 0, which prints a line
    3              a loader process died               its rank: Ending               torchrun, which ends others
    3              a rank hangs                        ranks: progress in the store   an overdue rank, which names it
    3              a rank, host or network is lost     nobody                         ranks whose collective fails
    3              torchrun or the launcher is gone    nobody                         every rank, each second
    75             any other stop                      signals; the launcher: `stop`  ranks, which save and end together
    130, 138, 143  a signal before step 1 or a second  signals; the launcher: `stop`  the rank, which ends at once

`stop` and `unfinished` are files in the launcher's folder; a third, `ready`, says that the awaited data is there. Rank
0 passes its line on to torchrun in torchrun's error file.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import psutil

USER_ERROR = 2
TRAINING_FAILED = 3
STOPPED = os.EX_TEMPFAIL  # 75; the same command resumes the run
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOP, UNFINISHED, READY = "stop", "unfinished", "ready"  # files of a launcher's folder
_VARIABLE = "VERL_EXT_LAUNCHER"
_PR_SET_PDEATHSIG = 1  # Linux: sys/prctl.h


@dataclass(eq=False)
class Ending(RuntimeError):
    """The end of a run or a rank that someone has decided on.

    scope: run: every rank raises it, and they end together. rank: this rank alone ends, at once. other: the same, and
    the line is about another rank.
    """

    message: str | None = None  # the line about it; None for a silent end
    code: int = TRAINING_FAILED  # with which the process exits
    scope: Literal["run", "rank", "other"] = "run"
    is_asked: bool = False  # whether a signal asked for it

    def __str__(self) -> str:
        return self.message or ""

    @property
    def is_final(self) -> bool:
        """Whether the same run would only end in the same way again, or was asked to end."""
        return self.code in (0, USER_ERROR, STOPPED) or self.is_asked


@dataclass(frozen=True)
class Launcher:
    """What the processes above a command or a rank tell it, in one environment variable."""

    pid: int | None = None  # the process with which this one ends
    torchrun: int | None = None  # the process that started this rank
    folder: str | None = None  # in which launcher and ranks write
    awaited: Sequence[str] = ()  # the options that name folders of data which are not there yet
    categories: Sequence[str] = ()  # of that training data; () if they are not known yet
    words: Sequence[str] = ()  # those that the user gave to `verl-ext train`
    ray_nodes: int | None = None  # on Ray, the number that the run was planned for
    caller: str | None = None  # the file in which `verl_ext.train` finds the folder of the run

    @classmethod
    def from_environment(cls) -> "Launcher":
        """Return what this process was told."""
        return cls(**json.loads(os.environ.get(_VARIABLE, "{}")))

    def environment(self, **changes: Any) -> dict[str, str]:
        """Return the variable for a process below, which is told the same except for `changes`."""
        return {_VARIABLE: json.dumps(asdict(replace(self, **changes)))}

    def end_with_it(self, number: int = signal.SIGTERM) -> None:
        """Let the kernel signal this process once the launcher, if any, ends."""
        if self.pid is None or sys.platform != "linux":
            return
        if os.getppid() == self.pid:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if not is_running(self.pid):  # the launcher ended before the call of prctl
            os.kill(os.getpid(), number)


def is_running(pid: int | str) -> bool:
    """Tell whether a process of this host exists, zombies excluded."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it has ended, or it is another user's and the system hides it
        return psutil.pid_exists(int(pid))
