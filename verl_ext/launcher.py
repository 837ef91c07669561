"""The processes between launch/node.sh and the ranks: how they end with the launcher, and quietly after a signal.

    launch/node.sh  ─►  verl-ext preflight
                    ─►  torchrun  ─►  python -m verl_ext.fsdp_sft_trainer, once a rank

torchrun loads `torchrun_plugin` by the entry point ``torchrun.handlers`` of this package, which is meant for rendezvous
backends and is the only place in its process that a package can reach. For other programs' ranks nothing changes.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

_OUR_RANKS = ("verl_ext.fsdp_sft_trainer", "verl_ext/fsdp_sft_trainer.py")
_PR_SET_PDEATHSIG = 1  # Linux: sys/prctl.h


def end_with_launcher() -> None:
    """Have the kernel end this process when launch/node.sh, which started it, is gone; without a launcher, nothing."""
    launcher = os.environ.get("VERL_EXT_LAUNCHER")
    if launcher is None or sys.platform != "linux":
        return
    if os.getppid() == int(launcher):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if not is_running(launcher):  # it ended before this was asked for
        os.kill(os.getpid(), signal.SIGTERM)


def is_running(pid: int | str) -> bool:
    """Whether a process is there and not a zombie; True where there is no /proc to ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not Path("/proc/self").exists()


def torchrun_plugin() -> Any:
    """Prepare a torchrun that starts ranks of this package; the rendezvous backend `verl_ext`, which there is not."""
    if any(word.endswith(_OUR_RANKS) for word in sys.argv[1:]):
        os.environ["VERL_EXT_TORCHRUN"] = str(os.getpid())  # for its ranks
        end_with_launcher()
        sys.excepthook = _end_quietly
    return _no_backend


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Leave the last word to the ranks where torchrun ends because of a signal; else print the traceback."""
    if kind.__name__ not in ("SignalException", "KeyboardInterrupt"):
        sys.__excepthook__(kind, error, trace)


def _no_backend(_: Any) -> NoReturn:
    raise ValueError("--rdzv_backend must be one of torchrun's; got verl_ext, which has none")
