"""Stop requests by signal, and the end of torchrun or the launcher.

A request is a SIGTERM, SIGINT or SIGUSR1 to any rank, to torchrun, which forwards it to the ranks of its node, or to
the launcher, which writes it into a file that the ranks read (launch/protocol.py).

Before training, the first request ends a rank at once. In training it sets a flag. The ranks agree on it while they sum
Z of the next step, save the last completed step and end together. A second request ends a rank at once, without a
checkpoint.

A thread reads the signals, because no Python handler runs while the main thread is in a collective, maybe for hours.
"""

import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from verl_ext.launch.protocol import SIGNALS, STOP, STOPPED, UNFINISHED, Ending, Launcher, is_running
from verl_ext.trainer.distributed import end, wait_unless_local_rank0

_WATCH_SECONDS = 1.0
_ECHO_SECONDS = 5.0  # a scheduler's signal also arrives through torchrun and the launcher
_LAUNCHER_ECHO_SECONDS = 2 * _WATCH_SECONDS  # timeout(1) sends its signal to a command and to its group


class StopRequests:
    """The stop requests that this rank received.

    Attributes:
        pending: the name of the first signal.
        in_training: whether there is something to save, so that the trainer handles the first request.
    """

    def __init__(self) -> None:
        self.pending: str | None = None
        self.in_training = False
        self._at = 0.0
        self._torchrun: int | None = None
        self._launcher: int | None = None
        self._folder: Path | None = None

    def listen(self) -> None:
        """Handle signals and watch the parents; for the main thread only."""
        launcher = Launcher.from_environment()
        if "TORCHELASTIC_RUN_ID" in os.environ:  # under srun or in a notebook, a run may outlive its parent
            # If torchrun was killed while this rank imported torch, the environment has its id, and this process has
            # another parent. A script between torchrun and this process is another parent too.
            torchrun = launcher.torchrun or os.getppid()
            self._torchrun = os.getppid() if is_running(torchrun) else torchrun
        if launcher.folder is not None:
            self._folder, self._launcher = Path(launcher.folder), launcher.pid
            if os.environ.get("LOCAL_RANK") == "0":  # torchrun may have restarted the ranks
                (self._folder / UNFINISHED).unlink(missing_ok=True)
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # Python writes its number to the wake-up socket
            signal.siginterrupt(number, False)
        os.register_at_fork(after_in_child=_forget_signals)
        threading.Thread(target=self._watch, name="stop-requests", daemon=True).start()

    def write_unfinished_marker(self) -> None:
        """Tell the node's launcher that the run is unfinished; one rank suffices."""
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / UNFINISHED).touch()

    @property
    def ending(self) -> Ending:
        """The end by a stop; its code is 0 with a launcher, which has its own, or with restarts."""
        would_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        return Ending(code=0 if self._folder is not None or would_restart else STOPPED)

    def _watch(self) -> None:
        read = 0  # lines of the launcher's file
        while True:
            ready, _, _ = select.select([self._reader], [], [], _WATCH_SECONDS)
            for number in self._reader.recv(64) if ready else b"":
                if number in SIGNALS:  # other signals have handlers too, such as those of torch's loader
                    self._got(signal.Signals(number).name, number)
            names: list[str] = []
            with suppress(OSError):
                if self._folder is not None:
                    names = (self._folder / STOP).read_text().split()
            for name in names[read:]:
                before = names[read - 1] if read else None
                echo = _ECHO_SECONDS if before is None else _LAUNCHER_ECHO_SECONDS if name == before else 0.0
                self._got(name, getattr(signal, name), echo)
                read += 1
            # This process must not run on beside the next run.
            if self._torchrun is not None and os.getppid() != self._torchrun:
                end(Ending(f"torchrun (process {self._torchrun}) is gone, which ends its ranks", scope="rank"))
            if self._launcher is not None and not is_running(self._launcher):
                end(Ending(f"the launcher (process {self._launcher}) is gone, which ends its ranks", scope="rank"))

    def _got(self, name: str, number: int, echo: float = _ECHO_SECONDS) -> None:
        """Handle a request; within `echo` seconds it may be a repetition."""
        if number == signal.SIGTERM and self._torchrun is not None and _a_rank_ended(self._torchrun):
            # torchrun ends the node's ranks after a failure, and names those that end with an error.
            end(Ending(code=0, scope="rank"))
        now = time.monotonic()
        if self.pending is None:
            self.pending, self._at = name, now
            if not self.in_training:
                self._end(f"{name}: ended before the first step", number)
        elif now - self._at >= echo:
            self._end(f"a second signal ({name}): ended at once, without a checkpoint of this step", number)

    def _end(self, message: str, number: int) -> None:
        self.write_unfinished_marker()
        wait_unless_local_rank0(_WATCH_SECONDS)
        end(Ending(message, 128 + number, "rank"))


def end_for_parent_alone(*_: object) -> None:
    """Let only the parent's signals end this loader worker.

    A scheduler signals every process, but the rank needs this worker for its step. On a system that does not report the
    sender of a signal (macOS), every SIGTERM ends it.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    parent = os.getppid()

    def wait() -> None:
        while signal.sigwaitinfo(SIGNALS).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)  # a child's signals are not for its parent
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _a_rank_ended(torchrun: int) -> bool:
    """Tell whether a rank of this node ended; False without torchrun."""
    with suppress(psutil.Error):
        children = psutil.Process(torchrun).children()
        return sum(is_running(child.pid) for child in children) < int(os.environ["LOCAL_WORLD_SIZE"])
    return False


requests = StopRequests()  # one per process, which has one set of handlers
