"""The ranks of a run on a Ray cluster: where they are placed, the process that each is, and how it ended.

    driver ── a placement group a node, an actor a rank (verl's RayResourcePool and RayWorkerGroup)
           ◄─ what a rank prints, its exit code ─  actor  ◄─ pipes ─  python -m verl_ext.fsdp_sft_trainer

A rank is a process below its actor, as it is below torchrun: the same program, with signals, exit codes and output of
its own, none of which a Ray worker has. Ray ends the actors when the driver is gone, and the kernel their ranks.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util import get_node_ip_address, placement_group, placement_group_table, remove_placement_group

# RankProcess is loaded by Ray's workers: nothing here imports torch or verl before it is called.

PROGRAM = "verl_ext.fsdp_sft_trainer"
# Before the program: the kernel kills it with its actor, and it gets the signals that Ray blocks for its workers.
_BEGIN = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
"""
_OUT, _ERR, _EXIT = 1, 2, 0  # what a RankProcess tells
_GRACE = 10.0  # seconds in which other ranks may say how they ended, once one has failed
_QUICKLY = 5.0  # a wait for nodes that takes longer is said
_POLL = 0.5


@dataclass(frozen=True)
class Place:
    """Where an actor runs: Ray's id of the node, its names, and the ids of the GPUs that are the actor's."""

    node: str
    host: str
    address: str
    devices: tuple[str, ...]


class RankProcess:
    """An actor that starts one rank and tells what it prints and how it ends."""

    options: ClassVar[dict[str, Any]] = {"max_concurrency": 2}  # `stop` is heard while `listen` waits

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def place(self) -> Place:
        context = ray.get_runtime_context()
        devices = tuple(context.get_accelerator_ids().get("GPU", ()))
        return Place(context.get_node_id(), socket.gethostname(), get_node_ip_address().strip("[]"), devices)

    def free_port(self) -> str:
        """A port of this node that nobody listens on."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return str(probe.getsockname()[1])

    def start(self, arguments: Sequence[str], environment: dict[str, str], folder: str) -> int:
        """Start the rank, in `folder` where this node has it; its process id."""
        started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()

        def attend() -> None:
            # The rank's whole life is in one thread, since the kernel takes the thread that starts it for its parent.
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", _BEGIN, PROGRAM, *arguments],
                    cwd=folder if os.path.isdir(folder) else None,
                    env=os.environ | environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                started.put(error)
                return
            started.put(process)
            pipes = ((_OUT, process.stdout), (_ERR, process.stderr))
            readers = [threading.Thread(target=self._read, args=pipe, daemon=True) for pipe in pipes]
            for reader in readers:
                reader.start()
            code = process.wait()
            for reader in readers:
                reader.join(_GRACE)  # a process that the rank has left behind may hold the pipe
            self._told.put((_EXIT, code))

        threading.Thread(target=attend, daemon=True).start()
        process = started.get()
        if isinstance(process, OSError):
            raise process
        self._process = process
        return process.pid

    def listen(self) -> list[tuple[int, Any]]:
        """What was told since the last call, as soon as there is something: (1 or 2, bytes printed), (0, exit code)."""
        told = [self._told.get()]
        with suppress(queue.Empty):
            while True:
                told.append(self._told.get_nowait())
        if told[-1][0] == _EXIT:
            self._told.put(told[-1])  # an answer may be lost on its way
        return told

    def stop(self, number: int) -> None:
        """Send the rank a signal; SIGKILL goes to the processes that it has started as well."""
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def _read(self, stream: int, pipe: IO[bytes]) -> None:
        while printed := os.read(pipe.fileno(), 1 << 16):
            self._told.put((stream, printed))


@dataclass(frozen=True)
class Ends:
    """How the ranks of one attempt ended.

    codes: exit codes of the ranks that ended by themselves, or by a signal from outside (negative).
    lost: a line for each rank, or node with its ranks, that was lost.
    signalled: they were asked to end.
    """

    codes: tuple[int, ...]
    lost: tuple[str, ...]
    signalled: bool = False


@contextmanager
def placed_ranks(
    nodes: int, per_node: int, suits: Callable[[int], bool], on_gpu: bool, seconds: float, say: Callable[[str], None]
) -> Iterator["PlacedRanks"]:
    """Actors for `nodes` × `per_node` ranks, a GPU or a CPU for each, for as long as the block lasts.

    Where so many nodes are not free within `seconds`, on as many as `suits` accepts of those that are. say: gets a line
    when the wait is long. Raises ValueError when no number suits; RayError where Ray cannot make an actor.
    """
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import sort_placement_group_by_node_ip

    bundles = [{"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1}] * per_node
    groups = [placement_group(bundles, strategy="STRICT_PACK") for _ in range(nodes)]  # of one node each
    workers: list[Any] = []
    try:
        ready = _ready(groups, seconds, lambda: say(f"waiting for {_needs(nodes, per_node, on_gpu)}; {_cluster()}"))
        count = next((n for n in range(len(ready), 0, -1) if suits(n)), 0)
        if not count:
            raise ValueError(
                f"the Ray cluster must have {_needs(nodes, per_node, on_gpu)}, free within ray.timeout={seconds:g} "
                f"seconds; got {len(ready)} such nodes: {_cluster()}"
            )
        for group in set(groups) - set(ready[:count]):
            remove_placement_group(group)
        pool: Any = RayResourcePool([per_node] * count, use_gpu=on_gpu, max_colocate_count=1)
        pool.pgs = sort_placement_group_by_node_ip(ready[:count])
        actor = RayClassWithInitArgs(ray.remote(**RankProcess.options)(RankProcess))
        # No address: rank 0 says where it can be reached, in PlacedRanks.
        made = RayWorkerGroup(
            pool, actor, device_name="cuda" if on_gpu else "cpu", use_gpu=on_gpu, master_addr="", master_port=""
        )
        workers = made.workers
        yield PlacedRanks(workers, ray.get([worker.place.remote() for worker in workers]))
    finally:
        for worker in workers:
            ray.kill(worker)
        for group in groups:
            remove_placement_group(group)


def _ready(groups: Sequence[Any], seconds: float, say_so: Callable[[], None]) -> list[Any]:
    """The placement groups that have their resources, as soon as all have, or after `seconds`."""
    began, is_said = time.monotonic(), False
    while True:
        waited = time.monotonic() - began
        ready = [group for group in groups if placement_group_table(group)["state"] == "CREATED"]
        if len(ready) == len(groups) or waited >= seconds:
            return ready
        if waited >= _QUICKLY and not is_said:
            is_said = True
            say_so()
        time.sleep(_POLL)


def _needs(nodes: int, per_node: int, on_gpu: bool) -> str:
    kind = "GPU" if on_gpu else "CPU"
    return f"{nodes} node{'s' * (nodes > 1)} with {per_node} free {kind}{'s' * (per_node > 1)}" + " each" * (nodes > 1)


def _cluster() -> str:
    """What the nodes of the cluster have, free or not."""
    alive = [(node["NodeManagerHostname"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    parts = (f"{host}: {has.get('CPU', 0):g} CPUs, {has.get('GPU', 0):g} GPUs" for host, has in alive)
    return f"it has {len(alive)} node{'s' * (len(alive) != 1)} ({'; '.join(parts)})"


class PlacedRanks:
    """Actors of which each runs one rank: rank i is that of `workers[i]`."""

    def __init__(self, workers: Sequence[Any], places: Sequence[Place]) -> None:
        self._workers, self._places = workers, places
        self._signals: list[int] = []
        self._pids: list[int] = []

    def __str__(self) -> str:
        nodes = len({place.node for place in self._places})
        return f"with {len(self._workers)} ranks on {nodes} node{'s' * (nodes > 1)}"

    def start(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        """Start every rank with these command-line arguments, and `environment` beside what torchrun would set."""
        address, port = self._places[0].address, ray.get(self._workers[0].free_port.remote())
        started = []
        for rank, (worker, place) in enumerate(zip(self._workers, self._places, strict=True)):
            here = [other for other, neighbour in enumerate(self._places) if neighbour.node == place.node]
            devices = [device for other in here for device in self._places[other].devices]
            of_rank = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self._workers)),
                "LOCAL_RANK": str(here.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(here)),
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "CUDA_VISIBLE_DEVICES": ",".join(devices),  # the node's, as torchrun's ranks see them
                "PYTHONUNBUFFERED": "1",
            }
            started.append(worker.start.remote(arguments, environment | of_rank, os.getcwd()))
        self._pids = ray.get(started)

    def signal(self, number: int) -> None:
        """Have :meth:`follow` send every rank this signal, the second time SIGKILL."""
        self._signals.append(signal.SIGKILL if self._signals else number)

    def follow(self) -> Ends:
        """Print what the ranks print until all have ended; those that hang after another has failed are killed."""
        listening = {worker.listen.remote(): rank for rank, worker in enumerate(self._workers)}
        codes: dict[int, int] = {}
        lost: dict[int, str] = {}
        deadline, killed, signalled = None, False, 0
        while listening:
            ready, _ = ray.wait(list(listening), timeout=_POLL)
            for answer in ready:
                rank = listening.pop(answer)
                try:
                    told = ray.get(answer)
                except ActorUnavailableError:  # Ray does not know yet whether it has lost the actor
                    listening[self._workers[rank].listen.remote()] = rank
                    continue
                except RayError as error:
                    lost[rank] = self._why(rank, error)
                    continue
                for kind, what in told:
                    if kind == _EXIT:
                        codes[rank] = what
                    else:
                        _print(sys.stdout if kind == _OUT else sys.stderr, what)
                if rank not in codes:
                    listening[self._workers[rank].listen.remote()] = rank
                elif codes[rank] < 0 and killed:
                    del codes[rank]  # by us
                elif codes[rank] < 0 and not self._signals:
                    lost[rank] = self._killed(rank, -codes.pop(rank))
            if deadline is None and (lost or any(codes.values())):
                deadline = time.monotonic() + _GRACE
            if deadline is not None and time.monotonic() > deadline and not killed and not self._signals:
                killed = True
                self._send(listening.values(), signal.SIGKILL)
            for number in self._signals[signalled:]:
                signalled += 1
                self._send(listening.values(), number)
        lines = dict.fromkeys(lost[rank] for rank in sorted(lost))
        return Ends(tuple(codes.values()), tuple(lines), signalled=bool(self._signals))

    def _send(self, ranks: Any, number: int) -> None:
        for rank in ranks:
            self._workers[rank].stop.remote(number)

    def _killed(self, rank: int, number: int) -> str:
        place = self._places[rank]
        return f"rank {rank} (process {self._pids[rank]} on {place.host}) was killed by {signal.Signals(number).name}"

    def _why(self, rank: int, error: RayError) -> str:
        """A line for a rank whose actor is gone; the same one for all ranks of a node that is gone."""
        place = self._places[rank]
        if any(node["NodeID"] == place.node and node["Alive"] for node in ray.nodes()):
            return f"rank {rank} on {place.host} was lost with its Ray actor ({reason(error)})"
        ranks = [str(other) for other, neighbour in enumerate(self._places) if neighbour.node == place.node]
        return f"the node {place.host} ({place.address}) was lost with rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def reason(error: RayError) -> str:
    """Why an actor ended or could not be made, of the many lines that Ray has for it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if line.startswith("The actor is dead because")), lines[-1]).partition(". ")[0]


def _print(stream: Any, printed: bytes) -> None:
    with suppress(OSError):  # a terminal or a pipe that is gone
        stream.buffer.write(printed)
        stream.buffer.flush()
