"""Torchrun as a child of a command: asked to stop by a file that the ranks read, and without its report of failures."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

STOPPED = 75  # as of launch/node.sh: the same command goes on


def run_torchrun(arguments: Sequence[str]) -> int:
    """Run torchrun; return the exit code of the first rank that failed, 0, or STOPPED after a request to stop.

    A SIGTERM, SIGINT or SIGUSR1 is a request, which the ranks of this machine read (verl_ext/trainer/signals.py): they
    save and end together, where torchrun itself would end them. For the process of a command: the handlers stay.
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
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
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
