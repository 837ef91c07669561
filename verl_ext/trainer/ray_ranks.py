"""The ranks of a run on Ray, children of their node's actor.

    driver ── an actor per node, with `per_node` GPUs or CPUs
           ◄─ a rank's output and exit code ──────  actor  ◄─ pipes ─  python -m verl_ext.fsdp_sft_trainer, once a rank

A rank is a child process of its actor, as of torchrun: the same program, with its own signals, exit codes and output,
none of which a Ray worker has. If the driver is gone, Ray ends the actors, and the kernel ends their ranks.

Ray Train's TorchTrainer does not fit: its elastic policy starts at once with any fitting number of workers, its fixed
policy waits without end, a user's mistake counts as a failure, and SIGINT ends the workers before they can save.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util import get_node_ip_address, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# Ray's workers load Node, so this module does not import torch or verl.

PROGRAM = "verl_ext.fsdp_sft_trainer"
# Runs before the program, so that the kernel kills the rank with its actor, and signals that Ray blocks reach the rank.
_BEGIN = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
"""
_GRACE = 10.0  # seconds in which the other ranks may report their ends, once one has failed
_SILENCE = 5.0  # seconds of waiting for nodes before a line about it
_POLL = 0.5


@dataclass(frozen=True)
class NodePlace:
    """An actor's node: addresses, id in Ray, free port, and GPU ids."""

    address: str
    node: str
    host: str
    port: int
    devices: tuple[str, ...]


class Node:
    """An actor that runs ranks as child processes and reports on them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def place(self) -> NodePlace:
        """Return the place of this actor."""
        context = ray.get_runtime_context()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        devices = tuple(context.get_accelerator_ids().get("GPU", ()))
        return NodePlace(get_node_ip_address().strip("[]"), context.get_node_id(), socket.gethostname(), port, devices)

    def run(
        self, arguments: Sequence[str], environments: Sequence[dict[str, str]], folder: str
    ) -> Iterator[tuple[int, str, Any]]:
        """Run a rank per environment; yield (number on this node, *event).

        The events of a rank are ("pid", int), then ("stdout" or "stderr", bytes), and ("code", int) at its end.
        """
        # This thread is the ranks' parent for the kernel, which kills them when the thread ends; so all happens in it.
        pipes = selectors.DefaultSelector()
        for number, environment in enumerate(environments):
            process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN, PROGRAM, *arguments],
                cwd=folder if os.path.isdir(folder) else None,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._processes.append(process)
            pipes.register(process.stdout, selectors.EVENT_READ, (number, "stdout"))  # type: ignore[arg-type]
            pipes.register(process.stderr, selectors.EVENT_READ, (number, "stderr"))  # type: ignore[arg-type]
            yield number, "pid", process.pid
        # Report the end of a rank after its output, whose last lines say why.
        running = dict(enumerate(self._processes))
        while running:
            ready = pipes.select(_POLL)
            ended = [number for number, process in running.items() if process.poll() is not None]
            while ready:  # output that a rank printed before it ended is in the pipes by now
                for key, _ in ready:
                    if printed := os.read(key.fd, 1 << 16):
                        yield *key.data, printed
                    else:
                        pipes.unregister(key.fileobj)
                ready = pipes.select(0) if ended else []
            for number in ended:
                yield number, "code", running.pop(number).returncode

    def stop(self, number: int) -> None:
        """Send a signal to the running ranks, SIGKILL also to their children."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, number) if number == signal.SIGKILL else process.send_signal(number)


@dataclass(frozen=True)
class Ends:
    """The ends of all ranks of one attempt.

    codes: the exit codes of ranks that ended by themselves or, after a request, by a signal (negative).
    lost: a line for each lost rank, or lost node with its ranks.
    signalled: whether the ranks were asked to end.
    """

    codes: tuple[int, ...]
    lost: tuple[str, ...]
    signalled: bool = False


@contextmanager
def placed_ranks(
    nodes: int, per_node: int, suits: Callable[[int], bool], on_gpu: bool, seconds: float, say: Callable[[str], None]
) -> Iterator["PlacedRanks"]:
    """Hold devices for `nodes` × `per_node` ranks during the block.

    If so many nodes are not free within `seconds`, hold the largest number that `suits` accepts. say: receives a line
    if the wait is long. Raises ValueError if no number suits, and RayError if Ray cannot create an actor.
    """
    bundle = {"CPU": per_node, "GPU": per_node} if on_gpu else {"CPU": per_node}
    groups = [placement_group([bundle]) for _ in range(nodes)]  # a bundle is on one node
    actors: list[Any] = []
    try:
        # Wait a little first, so that a cluster with free nodes prints no line.
        ready = _ready(groups, min(seconds, _SILENCE))
        if len(ready) < nodes and seconds > _SILENCE:
            say(f"waiting for {_needs(nodes, per_node, on_gpu)}; {_cluster()}")
            ready = _ready(groups, seconds - _SILENCE)
        # Take as many nodes as the caller accepts: after a loss, fewer are better than none.
        count = next((n for n in range(len(ready), 0, -1) if suits(n)), 0)
        if not count:
            raise ValueError(
                f"the Ray cluster must have {_needs(nodes, per_node, on_gpu)}, free within ray.timeout={seconds:g} "
                f"seconds; got {len(ready)} such nodes: {_cluster()}"
            )
        # Return what is left over: it would hold devices that no rank uses.
        for group in set(groups) - set(ready[:count]):
            remove_placement_group(group)
        for group in ready[:count]:
            where = PlacementGroupSchedulingStrategy(group)
            given: Any = {"num_cpus": per_node, "num_gpus": per_node * on_gpu, "scheduling_strategy": where}
            given["max_concurrency"] = 2  # `stop` can run while `run` waits
            remote: Any = ray.remote(**given)
            actors.append(remote(Node).remote())
        places = ray.get([actor.place.remote() for actor in actors])
        order = sorted(range(count), key=lambda node: (places[node].address, places[node].node))  # as before a restart
        yield PlacedRanks([actors[node] for node in order], [places[node] for node in order], per_node)
    finally:
        # A killed actor takes its ranks along, so no attempt leaves processes behind.
        for actor in actors:
            ray.kill(actor)
        for group in groups:
            remove_placement_group(group)


def _ready(groups: Sequence[Any], seconds: float) -> list[Any]:
    """Return the groups that have devices, once all do or after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        ready = [group for group in groups if placement_group_table(group)["state"] == "CREATED"]
        if len(ready) == len(groups) or time.monotonic() >= end:
            return ready
        time.sleep(_POLL)


def _needs(nodes: int, per_node: int, on_gpu: bool) -> str:
    kind = "GPU" if on_gpu else "CPU"
    return f"{nodes} node{'s' * (nodes > 1)} with {per_node} free {kind}{'s' * (per_node > 1)}" + " each" * (nodes > 1)


def _cluster() -> str:
    """Return a clause about all devices of the cluster, free or used."""
    alive = [(node["NodeManagerHostname"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    parts = (f"{host}: {has.get('CPU', 0):g} CPUs, {has.get('GPU', 0):g} GPUs" for host, has in alive)
    return f"it has {len(alive)} node{'s' * (len(alive) != 1)} ({'; '.join(parts)})"


class PlacedRanks:
    """Actors with `per_node` ranks; actor i begins with i × per_node."""

    def __init__(self, actors: Sequence[Any], places: Sequence[NodePlace], per_node: int) -> None:
        self._actors, self._places, self._per_node = actors, places, per_node
        self._signals: list[int] = []

    def __str__(self) -> str:
        nodes = len(self._actors)
        return f"with {nodes * self._per_node} ranks on {nodes} node{'s' * (nodes > 1)}"

    def run(self, arguments: Sequence[str], environment: dict[str, str]) -> Ends:
        """Run all ranks, print their output, and kill those outliving a failure.

        Ctrl-C and SIGTERM reach every rank, the second time as SIGKILL. environment: the variables of every rank in
        addition to torchrun's.
        """
        handlers = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._followed(arguments, environment)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _ask(self, number: int, _: object) -> None:
        self._signals.append(signal.SIGKILL if self._signals else number)

    def _followed(self, arguments: Sequence[str], environment: dict[str, str]) -> Ends:
        # A stream gives each event at once, and ends with an error if its actor is gone.
        streams = {
            actor.run.options(num_returns="streaming").remote(
                arguments, [environment | self._variables(node, rank) for rank in range(self._per_node)], os.getcwd()
            ): node
            for node, actor in enumerate(self._actors)
        }
        pids: dict[int, int] = {}
        codes: dict[int, int] = {}
        lost: dict[int, str] = {}
        deadline, is_killed, num_sent = None, False, 0
        while streams:
            for stream in ray.wait(list(streams), timeout=_POLL)[0]:
                node = streams[stream]
                try:
                    number, kind, value = ray.get(next(stream))  # type: ignore[arg-type]  # a streaming generator
                except StopIteration:
                    del streams[stream]
                    continue
                except RayError as error:
                    del streams[stream]
                    lost[node * self._per_node] = self._loss(node, error)
                    continue
                # A signal that nobody here has sent means a lost rank; the kill after a failure says nothing new.
                rank = node * self._per_node + number
                if kind == "pid":
                    pids[rank] = value
                elif kind != "code":
                    _print(getattr(sys, kind), value)
                elif value < 0 and is_killed:
                    continue
                elif value >= 0 or self._signals:
                    codes[rank] = value
                else:
                    who = f"rank {rank} (process {pids[rank]} on {self._places[node].host})"
                    lost[rank] = f"{who} was killed by {signal.Signals(-value).name}"
            # The others would wait for a failed rank in a collective; first let them say so.
            if deadline is None and (lost or any(codes.values())):
                deadline = time.monotonic() + _GRACE
            if deadline is not None and time.monotonic() > deadline and not is_killed and not self._signals:
                is_killed = True
                self._send(streams.values(), signal.SIGKILL)
            # Hold a request back until all ranks run, because a later one would miss it.
            has_started = len(pids) == len(self._actors) * self._per_node or lost
            for request in self._signals[num_sent:] if has_started else []:
                num_sent += 1
                self._send(streams.values(), request)
        return Ends(tuple(codes.values()), tuple(lost[rank] for rank in sorted(lost)), bool(self._signals))

    def _variables(self, node: int, local_rank: int) -> dict[str, str]:
        """Return the environment variables that torchrun would set for a rank."""
        first = self._places[0]
        return {
            "RANK": str(node * self._per_node + local_rank),
            "WORLD_SIZE": str(len(self._actors) * self._per_node),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self._per_node),
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(first.port),
            "CUDA_VISIBLE_DEVICES": ",".join(self._places[node].devices),
            "PYTHONUNBUFFERED": "1",
        }

    def _send(self, nodes: Any, number: int) -> None:
        for node in nodes:
            self._actors[node].stop.remote(number)

    def _loss(self, node: int, error: RayError) -> str:
        """Return a line about the ranks of a lost actor or node."""
        while isinstance(error, ActorUnavailableError):  # Ray does not know yet whether the actor or the node is gone
            time.sleep(_POLL)
            try:
                ray.get(self._actors[node].place.remote())
                break
            except RayError as later:
                error = later
        place, first = self._places[node], node * self._per_node
        numbers = ", ".join(map(str, range(first, first + self._per_node)))
        ranks = f"rank{'s' * (self._per_node > 1)} {numbers}"
        if any(each["NodeID"] == place.node and each["Alive"] for each in ray.nodes()):
            return f"the Ray actor of {ranks} on {place.host} was lost ({reason(error)})"
        return f"the node {place.host} ({place.address}) was lost with {ranks}"


def reason(error: RayError) -> str:
    """Return why an actor ended or was not created, from Ray's error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if line.startswith("The actor is dead because")), lines[-1]).partition(". ")[0]


def _print(stream: Any, printed: bytes) -> None:
    with suppress(OSError):  # the terminal or the pipe may be gone
        stream.buffer.write(printed)
        stream.buffer.flush()
