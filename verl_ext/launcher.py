"""Torchrun as our commands start it: it ends with them, tells no tracebacks of its own, and hands on requests to stop.

    launch/node.sh    ─►  verl-ext preflight
                      ─►  torchrun                  ─►  python -m verl_ext.fsdp_sft_trainer, once a rank
    verl-ext train    ─►  torchrun, by run_torchrun ─►  the same

torchrun loads `torchrun_plugin` by the entry point ``torchrun.handlers`` of this package, which is meant for rendezvous
backends and is the only place in its process that a package can reach. For other programs' ranks nothing changes.
"""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import psutil

STOPPED = os.EX_TEMPFAIL  # 75, as of launch/node.sh: the same command resumes
_OUR_RANKS = ("verl_ext.fsdp_sft_trainer", "verl_ext/fsdp_sft_trainer.py")
_PR_SET_PDEATHSIG = 1  # Linux: sys/prctl.h


def run_torchrun(arguments: Sequence[str]) -> int:
    """Run torchrun; return the exit code of the first rank that failed, 0, or STOPPED after a request to stop.

    A SIGTERM, SIGINT or SIGUSR1 is a request, which the ranks of this machine read (verl_ext/trainer/signals.py): they
    save and end together, while torchrun itself would end them. The signal handlers stay after the call.
    """
    with tempfile.TemporaryDirectory(prefix="verl-ext-") as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        environment |= {"VERL_EXT_REQUESTS": folder, "VERL_EXT_LAUNCHER": str(os.getpid())}

        def ask(number: int, _: object) -> None:
            name = signal.Signals(number).name
            with open(Path(folder) / "stop", "a") as requests:
                requests.write(f"{name}\n")
            print(f"\n{name}: the ranks are asked to save and to end", file=sys.stderr, flush=True)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, ask)
        line = [sys.executable, "-c", f"from {__name__} import main; main()", *arguments]
        # A session of its own: the terminal's Ctrl-C is for this process alone.
        code = subprocess.Popen(line, env=environment, start_new_session=True).wait()
        return STOPPED if (Path(folder) / "unfinished").exists() else code


def main() -> None:
    """Be torchrun; exit with the code of the first rank that failed, which has said why."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # here: seconds
    from torch.distributed.run import main as run_ranks

    logging.disable(logging.ERROR)
    try:
        run_ranks(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            raise SystemExit(failure.exitcode) from None
        name = signal.Signals(-failure.exitcode).name  # a rank that a signal ended could say nothing
        print(f"error: rank {rank} was ended by {name}", file=sys.stderr)
        raise SystemExit(128 - failure.exitcode) from None


def end_with_launcher() -> None:
    """Have the kernel end this process when its launcher is gone; do nothing without a launcher."""
    launcher = os.environ.get("VERL_EXT_LAUNCHER")
    if launcher is None or sys.platform != "linux":
        return
    if os.getppid() == int(launcher):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if not is_running(launcher):  # it ended before this was asked for
        os.kill(os.getpid(), signal.SIGTERM)


def is_running(pid: int | str) -> bool:
    """Tell whether a process of this host is there and not a zombie."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it is gone, or another user's that the system hides
        return psutil.pid_exists(int(pid))


def torchrun_plugin() -> Any:
    """Prepare a torchrun that starts ranks of this package; return a rendezvous backend that refuses its name."""
    if any(word.endswith(_OUR_RANKS) for word in sys.argv[1:]):
        os.environ["VERL_EXT_TORCHRUN"] = str(os.getpid())  # for its ranks
        end_with_launcher()
        sys.excepthook = _end_quietly
    return _no_backend


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Leave the last word to the ranks if torchrun ends because of a signal; else print the traceback."""
    if kind.__name__ not in ("SignalException", "KeyboardInterrupt"):
        sys.__excepthook__(kind, error, trace)


def _no_backend(_: Any) -> NoReturn:
    raise ValueError("--rdzv_backend must be one of torchrun's; got verl_ext, which has none")
