"""A torchrun that ends with our commands, prints no tracebacks, and forwards stop requests.

    launch/node.sh    ─►  verl-ext preflight
                      ─►  torchrun                  ─►  python -m verl_ext.fsdp_sft_trainer, once a rank
    verl-ext train    ─►  torchrun, by run_torchrun ─►  the same

torchrun loads `torchrun_plugin` through this package's entry point ``torchrun.handlers``. It is meant for rendezvous
backends, but it is the only way for a package to run code in torchrun's process. Other programs' ranks are unaffected.
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

STOPPED = os.EX_TEMPFAIL  # 75, as in launch/node.sh; the same command resumes the run
_OUR_RANKS = ("verl_ext.fsdp_sft_trainer", "verl_ext/fsdp_sft_trainer.py")
_PR_SET_PDEATHSIG = 1  # Linux: sys/prctl.h


def run_torchrun(arguments: Sequence[str]) -> int:
    """Run torchrun; return 0, the first failed rank's exit code, or STOPPED after a stop request.

    SIGTERM, SIGINT and SIGUSR1 become stop requests, which this machine's ranks read (verl_ext/trainer/signals.py):
    they save and end together, whereas torchrun would end them. The signal handlers stay after the call.
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
        # In a session of its own, torchrun does not receive the terminal's Ctrl-C, which is for this process alone.
        code = subprocess.Popen(line, env=environment, start_new_session=True).wait()
        return STOPPED if (Path(folder) / "unfinished").exists() else code


def main() -> None:
    """Run torchrun here; exit with the code of the first failed rank, which has printed its error."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # takes seconds to import
    from torch.distributed.run import main as run_ranks

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


def end_with_launcher() -> None:
    """Let the kernel end this process when its launcher ends; do nothing without a launcher."""
    launcher = os.environ.get("VERL_EXT_LAUNCHER")
    if launcher is None or sys.platform != "linux":
        return
    if os.getppid() == int(launcher):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if not is_running(launcher):  # the launcher ended before the call of prctl
        os.kill(os.getpid(), signal.SIGTERM)


def is_running(pid: int | str) -> bool:
    """Tell whether a process of this host exists and is not a zombie."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it has ended, or it is another user's and the system hides it
        return psutil.pid_exists(int(pid))


def torchrun_plugin() -> Any:
    """Prepare a torchrun that starts ranks of this package; return a rendezvous backend that refuses its name."""
    if any(word.endswith(_OUR_RANKS) for word in sys.argv[1:]):
        os.environ["VERL_EXT_TORCHRUN"] = str(os.getpid())  # its ranks read this
        end_with_launcher()
        sys.excepthook = _end_quietly
    return _no_backend


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback unless a signal ends torchrun; the ranks print the last lines then."""
    if kind.__name__ not in ("SignalException", "KeyboardInterrupt"):
        sys.__excepthook__(kind, error, trace)


def _no_backend(_: Any) -> NoReturn:
    raise ValueError("--rdzv_backend must be one of torchrun's; got verl_ext, which has none")
