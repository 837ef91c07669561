"""A torchrun that ends with our commands and prints no tracebacks.

torchrun loads `torchrun_plugin` through this package's entry point ``torchrun.handlers``. It is meant for rendezvous
backends, but it is the only way for a package to run code in torchrun's process. Other programs' ranks are unaffected.
"""

import ctypes
import logging
import os
import signal
import sys
from types import TracebackType
from typing import Any, NoReturn

import psutil

USER_ERROR = 2
TRAINING_FAILED = 3
STOPPED = os.EX_TEMPFAIL  # 75; the same command resumes the run
_OUR_RANKS = ("verl_ext.fsdp_sft_trainer", "verl_ext/fsdp_sft_trainer.py")
_PR_SET_PDEATHSIG = 1  # Linux: sys/prctl.h


def main() -> None:
    """Run torchrun; exit with the code of the first failed rank."""
    end_with_launcher()  # now, because the imports below take seconds
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run_ranks

    if not any(word.startswith("--max_restarts") for word in sys.argv):  # whose starts torchrun reports
        logging.disable(logging.ERROR)
    try:
        run_ranks(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            raise SystemExit(failure.exitcode) from None
        name = signal.Signals(-failure.exitcode).name  # a rank that a signal ended could not print an error
        print(f"error: rank {rank} was ended by {name}", file=sys.stderr)
        raise SystemExit(128 - failure.exitcode) from None


def end_with_launcher(number: int = signal.SIGTERM) -> None:
    """Let the kernel signal this process once its launcher, if any, ends."""
    launcher = os.environ.get("VERL_EXT_LAUNCHER")
    if launcher is None or sys.platform != "linux":
        return
    if os.getppid() == int(launcher):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if not is_running(launcher):  # the launcher ended before the call of prctl
        os.kill(os.getpid(), number)


def is_running(pid: int | str) -> bool:
    """Tell whether a process of this host exists, zombies excluded."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it has ended, or it is another user's and the system hides it
        return psutil.pid_exists(int(pid))


def torchrun_plugin() -> Any:
    """Prepare a torchrun of our ranks; return a backend that refuses."""
    if any(word.endswith(_OUR_RANKS) for word in sys.argv[1:]):
        os.environ["VERL_EXT_TORCHRUN"] = str(os.getpid())  # its ranks read this
        end_with_launcher()
        sys.excepthook = _end_quietly
    return _no_backend


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback unless a signal ends torchrun."""
    if kind.__name__ not in ("SignalException", "KeyboardInterrupt"):  # after these, the ranks print the last lines
        sys.__excepthook__(kind, error, trace)


def _no_backend(_: Any) -> NoReturn:
    raise ValueError("--rdzv_backend must be one of torchrun's; got verl_ext, which has none")
