"""The nodes of a run on Ray: an actor and launch each.

    driver ── an actor per node, with `per_node` GPUs or CPUs
           ◄─ output and exit code ─  actor  ◄─ pipes ─  verl-ext launch  ─►  torchrun  ─►  the ranks of the node

A launch is a child process of its actor, because a Ray worker has no signals, exit code and output of its own. An actor
ends with its driver; the kernel ends the launch with its actor, and the ranks follow within seconds (launch/run.py).
"""

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util import get_node_ip_address, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_ext.launch.protocol import SIGNALS, STOPPED, Ending, Launcher
from verl_ext.options import must

_GRACE = 10.0  # seconds in which the other nodes may report their ends, once one has failed
_SILENCE = 5.0  # seconds of waiting for nodes before a line about it
_POLL = 0.5
_ENVIRONMENT = {
    "MAX_RESTARTS": "0",  # the driver restarts
    "PREFLIGHT": "0",  # Ray has connected the nodes
    "PET_SHUTDOWN_TIMEOUT": "2",  # seconds until torchrun kills the ranks of a launch that is gone
}


class NodePlace(NamedTuple):
    """An actor's node, and a free port of it."""

    address: str
    node: str
    host: str
    port: int


class NodeActor:
    """An actor that runs one launch as a child process."""

    def __init__(self) -> None:
        self._process: Future[subprocess.Popen[bytes]] = Future()

    def place(self) -> NodePlace:
        """Return the place of this actor."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        return NodePlace(get_node_ip_address().strip("[]"), node, socket.gethostname(), port)

    def launch(
        self, words: Sequence[str], environment: dict[str, str], folder: str, planned_nodes: int
    ) -> Iterator[tuple[str, Any]]:
        """Run `verl-ext launch`; yield ("stdout" or "stderr", bytes), then ("code", int)."""
        ours = Launcher.from_environment().environment(pid=os.getpid(), ray_nodes=planned_nodes)
        # The kernel ends the launch with this thread. Signals wait until the launch has handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        devices = ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
        process = subprocess.Popen(
            [sys.executable, "-m", "verl_ext", "launch", *words],
            cwd=folder if os.path.isdir(folder) else None,
            env={**os.environ, **environment, **ours, "CUDA_VISIBLE_DEVICES": devices},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._process.set_result(process)
        pipes = selectors.DefaultSelector()
        pipes.register(process.stdout, selectors.EVENT_READ, "stdout")  # type: ignore[arg-type]
        pipes.register(process.stderr, selectors.EVENT_READ, "stderr")  # type: ignore[arg-type]
        # The last lines are in the pipes once the launch has ended; their ends may never come, if an orphan holds them.
        has_ended = False
        ready: list[Any] = []
        while ready or not has_ended:
            has_ended = process.poll() is not None
            ready = pipes.select(0 if has_ended else _POLL)
            for key, _ in ready:
                if printed := os.read(key.fd, 1 << 16):
                    yield key.data, printed
                else:
                    pipes.unregister(key.fileobj)
        yield "code", process.returncode

    def send(self, number: int) -> None:
        """Send a signal to the launch."""
        self._process.result().send_signal(number)


@contextmanager
def placed_nodes(
    nodes: int, per_node: int, suits: Callable[[int], bool], on_gpu: bool, seconds: float, say: Callable[[str], None]
) -> Iterator["PlacedNodes"]:
    """Hold devices for `nodes` × `per_node` ranks during the block.

    If so many nodes are not free within `seconds`, hold the largest number that `suits` accepts. say: receives a line
    if the wait is long. Raises ValueError if no number suits, and RayError if Ray cannot create an actor.
    """
    kind = "GPU" if on_gpu else "CPU"
    needs = f"{nodes} node{'s' * (nodes > 1)} with {per_node} free {kind}{'s' * (per_node > 1)}{' each' * (nodes > 1)}"
    devices: dict[str, Any] = {"num_cpus": per_node, "num_gpus": per_node * on_gpu}
    devices["max_concurrency"] = 2  # `send` can run while `launch` does
    bundle = {"CPU": per_node, "GPU": per_node} if on_gpu else {"CPU": per_node}
    groups = [placement_group([bundle]) for _ in range(nodes)]  # a bundle is on one node
    actors: list[Any] = []
    try:
        # Wait a little first, so that a cluster with free nodes prints no line.
        ready = _ready(groups, min(seconds, _SILENCE))
        if len(ready) < nodes and seconds > _SILENCE:
            say(f"waiting for {needs}; {_cluster()}")
            ready = _ready(groups, seconds - _SILENCE)
        # Take as many nodes as the caller accepts: after a loss, fewer are better than none.
        count = next((n for n in range(len(ready), 0, -1) if suits(n)), 0)
        if not count:
            needed = f"have {needs}, free within ray.timeout={seconds:g} seconds"
            raise ValueError(must("the Ray cluster", needed, f"{len(ready)} such nodes: {_cluster()}"))
        # Return what is left over: it would hold devices that no rank uses.
        for group in set(groups) - set(ready[:count]):
            remove_placement_group(group)
        for group in ready[:count]:
            where = PlacementGroupSchedulingStrategy(group)
            remote: Any = ray.remote(**devices, scheduling_strategy=where)
            actors.append(remote(NodeActor).remote())
        places = ray.get([actor.place.remote() for actor in actors])
        yield PlacedNodes(sorted(zip(places, actors, strict=True)), per_node)  # in the same order after a restart
    finally:
        for actor in actors:  # a killed actor takes its launch along
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


def _cluster() -> str:
    """Return a clause about all devices of the cluster, free or used."""
    alive = [(node["NodeManagerHostname"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    parts = (f"{host}: {has.get('CPU', 0):g} CPUs, {has.get('GPU', 0):g} GPUs" for host, has in alive)
    return f"it has {len(alive)} node{'s' * (len(alive) != 1)} ({'; '.join(parts)})"


class PlacedNodes:
    """Actors, each of which launches `per_node` ranks."""

    def __init__(self, nodes: Sequence[tuple[NodePlace, Any]], per_node: int) -> None:
        self._nodes, self._per_node = nodes, per_node

    def __str__(self) -> str:
        nodes = len(self._nodes)
        return f"with {nodes * self._per_node} ranks on {nodes} node{'s' * (nodes > 1)}"

    def run(self, words: Sequence[str], planned_nodes: int) -> Ending:
        """Launch all nodes, print their output, and pass signals on; return how they ended.

        The code is that of a mistake or a stop, else of the first failed node, or TRAINING_FAILED if a node was lost;
        the message is a clause about that node.

        planned_nodes: the number by which a recipe computes its packs per step, even if there are fewer nodes now.
        """
        signals: list[int] = []
        handlers = {number: signal.signal(number, lambda number, _: signals.append(number)) for number in SIGNALS}
        try:
            return self._follow(self._launch(words, planned_nodes), signals)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _launch(self, words: Sequence[str], planned_nodes: int) -> dict[Any, tuple[NodePlace, Any]]:
        """Start a stream of events per node, which fails with its actor."""
        first, _ = self._nodes[0]
        topology: dict[str, Any] = {"MASTER_ADDR": first.address, "MASTER_PORT": first.port}
        topology |= {"NNODES": len(self._nodes), "NPROC_PER_NODE": self._per_node}
        streams = {}
        for rank, node in enumerate(self._nodes):
            environment = {name: str(value) for name, value in {**topology, "NODE_RANK": rank}.items()} | _ENVIRONMENT
            launch = node[1].launch.options(num_returns="streaming")
            streams[launch.remote(words, environment, os.getcwd(), planned_nodes)] = node
        return streams

    @staticmethod
    def _follow(streams: dict[Any, tuple[NodePlace, Any]], signals: list[int]) -> Ending:
        lost: list[str] = []
        failed: list[Ending] = []
        num_sent, deadline = 0, math.inf
        while streams:
            for stream in ray.wait(list(streams), timeout=_POLL)[0]:
                place, actor = streams[stream]
                node = f"the node {place.host} ({place.address})"
                # A launch's events are its output, then its end; the loss of its node is an end too.
                try:
                    kind, value = ray.get(next(stream))  # type: ignore[arg-type]  # a streaming generator
                except RayError as error:
                    kind, value = "lost", error
                if kind in ("stdout", "stderr"):
                    with suppress(OSError):  # the terminal or the pipe may be gone
                        getattr(sys, kind).buffer.write(value)
                        getattr(sys, kind).buffer.flush()
                    continue
                del streams[stream]
                if kind == "lost":
                    lost.append(f"{node} was lost ({_settled_reason(value, actor)})")
                elif value:
                    code = 128 - value if value < 0 else value
                    failed.append(Ending(f"{node} ended with code {code}", code))
            # The others would wait for a failed node in a collective; first let them say so.
            if deadline == math.inf and (lost or any(each.code != STOPPED for each in failed)):
                deadline = time.monotonic() + _GRACE
            # Pass on what came meanwhile; nodes that do not end after another's failure are killed.
            unsent, num_sent = signals[num_sent:], len(signals)
            if not signals and time.monotonic() > deadline:
                unsent, deadline = [signal.SIGKILL], math.inf
            for number in unsent:
                for _, actor in streams.values():
                    actor.send.remote(number)
        if lost:  # the others may have failed before Ray noticed it
            failed = [Ending("; ".join(lost))]
        end = min(failed, key=lambda each: not each.is_final, default=Ending(code=0))
        return Ending(end.message, end.code, is_asked=bool(signals))


def _settled_reason(error: RayError, actor: Any) -> str:
    """Return why an actor was lost, once Ray knows."""
    while isinstance(error, ActorUnavailableError):
        time.sleep(_POLL)
        try:
            ray.get(actor.place.remote())
            break
        except RayError as later:
            error = later
    return ray_reason(error)


def ray_reason(error: RayError) -> str:
    """Return why an actor ended or was not created, from Ray's error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if line.startswith("The actor is dead because")), lines[-1]).partition(". ")[0]
