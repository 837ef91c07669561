"""The commands of a node as child processes, and requests to stop.

    verl-ext launch (launch/node.sh)  ─►  verl-ext preflight, on several nodes
                                      ─►  torchrun  ─►  python -m verl_ext.fsdp_sft_trainer, once a rank
    verl-ext train                    ─►  the same torchrun

A request is a SIGTERM, SIGINT or SIGUSR1 to this process. torchrun would end with an error, so requests go past it
through a folder, which the ranks read (launch/protocol.py, trainer/signals.py): a line in `stop` for every signal.
Without a rank to read the request, as in preflight or while torchrun waits for other nodes, the child itself ends.
"""

import _thread
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import psutil

from verl_ext.launch.protocol import READY, SIGNALS, STOP, STOPPED, UNFINISHED, USER_ERROR, Launcher, is_running
from verl_ext.launch.topology import Topology
from verl_ext.options import UsageError

PROGRAM = ("-m", "verl_ext.fsdp_sft_trainer")
PORT = 29500
_TORCHRUN = (sys.executable, "-c", "from verl_ext.launch.torchrun import main; main()")
# A scheduler may signal torchrun too, which passes the signal on and gives the ranks this many seconds to save.
_TORCHRUN_VARIABLES = {
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    "PET_SHUTDOWN_TIMEOUT": "3600",
}


def main(words: Sequence[str]) -> int:
    """Run this node's part of a training run; return the exit code."""
    launcher = Launcher.from_environment()
    launcher.end_with_it(signal.SIGKILL)  # the actor of this node, on Ray
    try:
        topology = Topology.of(os.environ, PORT)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    arguments = [*topology.torchrun_options(), *PROGRAM, *words]
    if os.environ.get("DRY_RUN", "0") != "0":
        print(shlex.join(["torchrun", *arguments]))
        return 0
    environment = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # torchrun's own value, without its warning
        # Recipes may derive the packs per step from it, which a restart on fewer nodes keeps.
        "NNODES": str(launcher.ray_nodes or topology.nodes),
    }
    if topology.restarts:  # restarted ranks must not find the addresses of earlier ranks, which the shared store keeps
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    commands = [[*_TORCHRUN, *arguments]]
    if topology.nodes > 1 and os.environ.get("PREFLIGHT", "1") != "0":
        commands.insert(0, preflight_command(topology, os.environ.get("PREFLIGHT_TIMEOUT", "600")))
    return supervise(commands, environment)


def preflight_command(topology: Topology, timeout: str) -> list[str]:
    """Return the command that checks a node with the others before torchrun."""
    words = [f"nnodes={topology.nodes}", f"node_rank={topology.node_rank}", f"master_addr={topology.address}"]
    words += [f"master_port={topology.port}", f"processes={topology.processes}", f"timeout={timeout}"]
    if topology.local_address:
        words.append(f"local_addr={topology.local_address}")
    if topology.restarts:
        words.append(f"rdzv_id={topology.id}")
    return [sys.executable, "-m", "verl_ext", "preflight", *words]


def run_torchrun(arguments: Sequence[str], work: Callable[[], None], **told: Any) -> int:
    """Run `work`, then torchrun; return the exit code.

    0, the first failed rank's code, or STOPPED after a stop request. With `awaited`, the ranks start before the work,
    which makes these folders. If the work raises, the ranks are killed; if they end during the work, it is interrupted.
    told: what the ranks are told, by attributes of :class:`Launcher`, `awaited` among them.
    """
    if not told.get("awaited"):
        work()
    return supervise([[*_TORCHRUN, *arguments]], {}, work if told.get("awaited") else None, **told)


def supervise(
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    work: Callable[[], None] | None = None,
    **told: Any,
) -> int:
    """Run commands until one fails, and pass on requests to stop.

    The handlers of SIGTERM, SIGINT and SIGUSR1 stay after the call; during `work` they are the caller's.

    Args:
        commands: the last starts ranks; those before it are checks, whose output goes to stderr.
        environment: variables of the commands in addition to this process's, of which the topology that torchrun
            would read from PET_* is left out, so that only the command says where ranks meet.
        work: work of this process for which the ranks of the last command wait, see :func:`run_torchrun`.
        told: what the ranks are told besides, by attributes of :class:`Launcher`.

    Returns:
        The exit code of the last command that ran, or STOPPED if it was asked to stop before its last step.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    torchrun = {name: os.environ.get(name, value) for name, value in _TORCHRUN_VARIABLES.items()}
    # Ranks find the requests in the folder, and end once the launcher is gone.
    with tempfile.TemporaryDirectory(prefix="verl-ext-") as folder:
        ours = Launcher.from_environment().environment(pid=os.getpid(), folder=folder, **told)
        child = _Child(Path(folder), {**inherited, **torchrun, **environment, **ours})
        *checks, ranks = commands
        # Leave the signals to the caller during the work; only then are they requests to the ranks.
        if work is not None:
            child.start(ranks)
            child.do_meanwhile(work)
        for number in SIGNALS:
            signal.signal(number, child.ask)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # on Ray, they are blocked until there are handlers
        # A failed check says what to mend; ranks that cannot meet would only time out.
        for command in checks:
            child.start(command, sys.stderr)
            if code := child.wait():
                return code
        if work is None:
            child.start(ranks)
        return child.wait()


class _Child:
    """The running command, and the requests that it was sent."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: str | None = None

    def start(self, command: Sequence[str], stdout: TextIO | None = None) -> None:
        """Start a command."""
        # In a session of its own, it does not receive the terminal's Ctrl-C, which is for this process alone.
        self._process = subprocess.Popen(command, env=self._environment, stdout=stdout, start_new_session=True)

    def do_meanwhile(self, work: Callable[[], None]) -> None:
        """Do the work that the ranks wait for, and tell them."""
        process, guard = self._process, threading.Lock()
        assert process is not None, "it is started"
        is_done = False

        def interrupt_if_ended() -> None:
            process.wait()
            with guard:
                if not is_done:
                    _thread.interrupt_main(signal.SIGTERM)  # a job in a shell's background ignores SIGINT

        threading.Thread(target=interrupt_if_ended, daemon=True).start()
        try:
            work()
            with guard:
                is_done = True
        except BaseException:
            if code := process.poll():  # a rank has told why
                raise SystemExit(128 - code if code < 0 else code) from None
            with guard:
                is_done = True
            with suppress(psutil.Error):  # silently and at once: a signal to torchrun would let the ranks speak
                launcher = psutil.Process(process.pid)
                for one in (launcher, *launcher.children(recursive=True)):
                    with suppress(psutil.Error):
                        one.kill()
            process.wait()
            raise
        (self._folder / READY).touch()

    def wait(self) -> int:
        """Wait for the command's end; return its exit code, or STOPPED."""
        assert self._process is not None, "it is started"
        self._end_without_ranks()  # a signal may have come before there was a process
        code = self._process.wait()
        if (self._folder / UNFINISHED).exists():
            return STOPPED
        return 128 - code if code < 0 else code

    def ask(self, number: int, _: object) -> None:
        """Ask the ranks to save and to end."""
        self._signal = signal.Signals(number).name
        with suppress(OSError), open(self._folder / STOP, "a") as requests:  # the folder goes when all has ended
            requests.write(f"{self._signal}\n")
        if self._process is not None and not self._end_without_ranks():
            print(f"\n{self._signal}: the ranks are asked to save and to end", file=sys.stderr, flush=True)

    def _end_without_ranks(self) -> bool:
        """End a signalled command without ranks; tell whether it was ended."""
        process = self._process
        if self._signal is None or process is None or not is_running(process.pid):
            return False
        with suppress(psutil.Error):
            if psutil.Process(process.pid).children():
                return False
        print(f"{self._signal}: ended before the first step", file=sys.stderr, flush=True)
        (self._folder / UNFINISHED).touch()
        process.terminate()
        return True
