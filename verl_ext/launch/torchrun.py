"""A torchrun that ends with our commands and prints no tracebacks.

torchrun loads `torchrun_plugin` through this package's entry point ``torchrun.handlers``. That entry point is for
rendezvous backends, but it is the only way for a package to run code in torchrun's process. Other programs' ranks are
unaffected.
"""

import logging
import os
import re
import signal
import sys
from types import TracebackType
from typing import Any, NoReturn

from verl_ext.launch.protocol import Launcher
from verl_ext.options import must

_OUR_RANKS = ("verl_ext.fsdp_sft_trainer", "verl_ext/fsdp_sft_trainer.py")


def main() -> None:
    """Run torchrun; exit with the code of the first failed rank."""
    Launcher.from_environment().end_with_it()  # now, because the imports below take seconds
    from torch.distributed.run import main as run_ranks

    _silence_reports()
    sys.excepthook = _end_quietly
    run_ranks(sys.argv[1:])


def _silence_reports() -> None:
    """Leave torchrun's own lines about ranks out, unless it may start them again."""
    if not any(re.match("--max[-_]restarts", word) for word in sys.argv):
        logging.disable(logging.ERROR)


def _told(error: Any) -> int:
    """Return the exit code of the first failed rank; name the signal that ended it, as it could not print an error."""
    rank, failure = error.get_first_failure()
    if failure.exitcode > 0:
        return failure.exitcode
    print(f"error: rank {rank} was ended by {signal.Signals(-failure.exitcode).name}", file=sys.stderr)
    return 128 - failure.exitcode


def torchrun_plugin() -> Any:
    """Prepare a torchrun of our ranks; return a backend that refuses."""
    if any(os.path.realpath(word).endswith(_OUR_RANKS) for word in sys.argv[1:]):
        launcher = Launcher.from_environment()
        os.environ |= launcher.environment(torchrun=os.getpid())  # for its ranks
        launcher.end_with_it()
        _silence_reports()
        sys.excepthook = _end_quietly
    return _no_backend


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback unless a signal or a rank ends torchrun: the ranks print the last lines."""
    if kind.__name__ == "ChildFailedError":
        raise SystemExit(_told(error))
    if kind.__name__ not in ("SignalException", "KeyboardInterrupt"):
        sys.__excepthook__(kind, error, trace)


def _no_backend(_: Any) -> NoReturn:
    raise ValueError(must("--rdzv_backend", "be one of torchrun's", "verl_ext, which has none"))
