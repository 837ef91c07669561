"""The command `verl-ext preflight`, by which all nodes check that torchrun can start.

The nodes share a TCPStore of torch at master_addr:master_port, the address at which torchrun will listen:

    report/RANK   versions, the address that gloo will use, and problems that the node finds by itself
    result/RANK   the node's clock when all reports had arrived, and the nodes that it cannot reach
    ended         a line that ends the check if a node is missing, or if two nodes have the same rank

All nodes read the same values, so they end with the same lines and the same exit code.

A node that comes back while the run goes on (a restarted pod under c10d) finds torchrun's store instead, which holds
the rendezvous of the run. The node then has nothing to compare, and starts.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from verl_ext.commands.command_line import command
from verl_ext.launch.torchrun import end_with_launcher
from verl_ext.nodes import differences, versions
from verl_ext.values import REQUIRED, Options, UsageError, option, reason_of

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_GREETING = "verl-ext preflight"  # the key that identifies the store of this command
_PATIENCE = 10  # seconds for an answer of a node that has reported
_STRANGER = 30  # seconds for which another program, such as the previous run at its end, may listen at node 0


@dataclass(frozen=True)
class PreflightOptions(Options):
    """Check on all nodes of a run that torchrun can start; launch/node.sh does so if NNODES is above 1.

    Node 0's port must be free, every node must reach every other, named interfaces must exist, Python and package
    versions must be equal, and clocks must agree. The trainer itself compares options, data and model of all nodes.
    """

    nnodes: int = option(REQUIRED, "number of nodes of the run", least=1, required=True)
    node_rank: int = option(0, "number of this node, from 0", least=0)
    master_addr: str = option("127.0.0.1", "address at which all nodes reach node 0", required=True)
    master_port: int = option(29500, "port of node 0 for torchrun's rendezvous", least=1, most=65535)
    processes: int = option(1, "ranks per node, the same on all nodes", least=1)
    local_addr: str | None = option(None, "this node's address for others; null: that of gloo's interface or host name")
    rdzv_id: str | None = option(
        None, "c10d rendezvous id of a run that a node may join after it has begun; null: none"
    )
    timeout: int = option(600, "seconds to wait for the other nodes", least=1)
    clock_seconds: float = option(5, "allowed seconds between clocks; c10d drops nodes that seem 15 s late", above=0)

    def problems(self) -> Iterator[str | None]:
        """Yield a line if the run has no such node."""
        if self.node_rank >= self.nnodes:
            yield f"node_rank must be 0 to {self.nnodes - 1} with nnodes={self.nnodes}; got {self.node_rank}"


def run(options: PreflightOptions) -> str:
    """Check with all nodes; return a success line, or raise UsageError with the same text on all."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch, imported below, warns about the same things
    end_with_launcher()
    where = f"{options.master_addr}:{options.master_port}"
    token = uuid.uuid4().hex
    if options.node_rank == 0:
        store, local = _store_of_node_0(options, token), _resolved(options.master_addr) or options.master_addr
    else:
        found, local = _store_to_join(options)
        if found is None:
            joins = f"is held by the run {options.rdzv_id}, which this node joins"
            return f"preflight: {where} {joins}; nothing was compared"
        store = found
    try:
        problems = _problems(store, options, local, token)
    except RuntimeError:  # torch's DistError: the store is gone or does not answer
        problems = [f"{_name(options)} lost node 0 ({where}) during the check"]
    if problems:
        raise UsageError("\nerror: ".join(problems))
    return f"preflight: {options.nnodes} nodes reach each other; versions and clocks agree"


def _store_of_node_0(options: PreflightOptions, token: str) -> "TCPStore":
    """Return a new store with `token` as its greeting, or the store of another node 0."""
    from torch.distributed import TCPStore  # here, because importing torch takes seconds

    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", options.master_port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        if other := _store_at(options):
            return other
        who = f"{options.master_port} ({os.strerror(error.errno or 0)}) on {_name(options)}"
        raise UsageError(f"MASTER_PORT must be a free port of node 0; got {who}: another run may have it") from None
    patience = timedelta(seconds=_PATIENCE)
    listener = server.detach()
    store = TCPStore("localhost", options.master_port, None, True, patience, False, master_listen_fd=listener)
    store.set(_GREETING, token)
    return store


def _store_to_join(options: PreflightOptions) -> "tuple[TCPStore | None, str]":
    """Return node 0's store (None if the run `rdzv_id` has begun) and the local address that reaches node 0."""
    began, stranger_since = time.monotonic(), 0.0
    where = f"{options.master_addr}:{options.master_port}"
    must = f"MASTER_ADDR:MASTER_PORT must be node 0, reachable from {_name(options)}; got {where}"
    while True:
        try:
            with socket.create_connection((options.master_addr, options.master_port), timeout=_PATIENCE) as probe:
                local = probe.getsockname()[0]
            if store := _store_at(options):
                return store, local
            if options.rdzv_id and _store_at(options, f"torch.rendezvous.{options.rdzv_id}"):
                return None, local
            stranger_since = stranger_since or time.monotonic()
            if time.monotonic() - stranger_since > min(_STRANGER, options.timeout):
                raise UsageError(f"{must}, where another program or run listens")
        except OSError as error:
            stranger_since = 0.0
            if time.monotonic() - began > options.timeout:
                raise UsageError(f"{must} ({reason_of(error)}, for {options.timeout} s)") from None
        time.sleep(min(1.0, options.timeout / 10))


def _store_at(options: PreflightOptions, key: str = _GREETING) -> "TCPStore | None":
    """Return the store at MASTER_ADDR:MASTER_PORT; None if there is none or it lacks the key."""
    from torch.distributed import TCPStore

    found: list[TCPStore] = []

    def connect() -> None:
        with suppress(RuntimeError):
            patience = timedelta(seconds=_PATIENCE)
            store = TCPStore(options.master_addr, options.master_port, None, False, patience, False)
            store.wait([key], timedelta(seconds=1))
            found.append(store)

    thread = threading.Thread(target=connect, daemon=True)  # it would wait forever for a listener that never answers
    thread.start()
    thread.join(min(_PATIENCE, 4))
    return found[0] if found else None


def _problems(store: "TCPStore", options: PreflightOptions, local: str, token: str) -> list[str]:
    """Exchange reports and results with the other nodes; return a line for each problem.

    local: the address at which node 0 and this node reach each other. token: the greeting of this node's own store.
    """
    rank, who = options.node_rank, _name(options)
    patience = _PATIENCE * (2 + options.nnodes // 16)  # for the connections to all other nodes
    keeps_store = store.get(_GREETING).decode() == token
    store.add("here", 1)
    address, problems = _gloo_address(options, local)
    family = socket.AF_INET6 if address and ":" in address else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=options.nnodes) as listener:
        same = {**versions(), "NNODES": str(options.nnodes), "NPROC_PER_NODE": str(options.processes)}
        at = [address, listener.getsockname()[1]]
        if store.add(f"nodes/{rank}", 1) > 1:
            _tell_twins(options, store)
        else:
            store.set(f"report/{rank}", json.dumps({"who": who, "same": same, "at": at, "problems": problems}))
        own = {each.address for of_interface in psutil.net_if_addrs().values() for each in of_interface}
        if keeps_store and local not in own:  # MASTER_ADDR may be another host that has its own node 0
            threading.Thread(target=_find_twin, args=(options, store, token), daemon=True).start()
        ranks = range(options.nnodes)
        reports = _gathered(store, "report", ranks, options.timeout + patience * (not keeps_store))
        clock = time.time()  # every node reads it at the same moment
        if keeps_store and (missing := [str(rank) for rank in ranks if rank not in reports]):
            where = f"{options.master_addr}:{options.master_port} within {options.timeout} s"
            late = f"all {options.nnodes} nodes must report to {where}; got nothing from node {', '.join(missing)}"
            store.compare_set("ended", "", late)
        names = {rank: report["who"] for rank, report in reports.items()}
        problems = differences({names[rank]: report["same"] for rank, report in reports.items()})
        problems += [problem for report in reports.values() for problem in report["problems"]]
        roster = {names[rank]: report["at"] for rank, report in reports.items() if report["at"][0]}
        store.set(f"result/{rank}", json.dumps([clock, _unreachable(who, roster)]))
        results = _gathered(store, "result", ranks, patience)
    for other, (read, unreached) in results.items():
        if abs(ahead := read - results.get(0, [read])[0]) > options.clock_seconds:
            problems.append(
                f"the clock of {names[other]} must agree with node 0's within clock_seconds="
                f"{options.clock_seconds:g}; got {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} it"
            )
        problems += unreached
    problems += [f"{names[other]} ended during the check" for other in ranks if other not in results and other in names]
    problems = [store.get("ended").decode()] if store.check(["ended"]) else problems
    end = time.monotonic() + _PATIENCE
    store.add("here", -1)
    while keeps_store and store.add("here", 0) > 0 and time.monotonic() < end:  # the store ends with this process
        time.sleep(0.1)
    return problems


def _gathered(store: "TCPStore", kind: str, ranks: range, seconds: float) -> dict[int, Any]:
    """Return the values of the nodes in time, by rank; none once the check has ended."""
    end, keys = time.monotonic() + seconds, [f"{kind}/{rank}" for rank in ranks]
    while not store.check(keys) and not store.check(["ended"]) and time.monotonic() < end:
        time.sleep(0.1)
    if store.check(["ended"]):
        return {}
    return {rank: json.loads(store.get(key)) for rank, key in zip(ranks, keys, strict=True) if store.check([key])}


def _tell_twins(options: PreflightOptions, *stores: "TCPStore") -> None:
    """Tell the nodes of these stores that the reporter in the first store has this node's rank."""
    first = json.loads(stores[0].get(f"report/{options.node_rank}"))["who"]
    for store in stores:
        got = f"{options.node_rank} on {first} and {_name(options)}"
        store.set("ended", f"NODE_RANK must differ from node to node; got {got}")


def _find_twin(options: PreflightOptions, own: "TCPStore", token: str) -> None:
    """Wait for another node 0 that listens at MASTER_ADDR, and tell both nodes."""
    while True:
        other = _store_at(options)
        if other and other.get(_GREETING).decode() != token:
            return _tell_twins(options, other, own)
        time.sleep(1)


def _gloo_address(options: PreflightOptions, local: str) -> tuple[str | None, list[str]]:
    """Return gloo's address (of its interface or the host name), or None and the problems."""
    interfaces = psutil.net_if_addrs()
    problems = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL accepts prefixes, =exact names and ^excluded names
        for named in os.environ.get(variable, "").lstrip("=^").split(","):
            if named and not any(interface.startswith(named) for interface in interfaces):
                there = ", ".join(interfaces)
                problems.append(f"{variable} must name an interface of {_name(options)}, {there}; got {named}")
    if problems:
        return None, problems
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        of_interface = interfaces.get(name.split(",")[0], [])
        return next((each.address for each in of_interface if each.family == socket.AF_INET), local), []
    if options.local_addr:
        return options.local_addr, []
    address = _resolved(socket.gethostname())
    loopback = ("127.", "::1")
    if address and (not address.startswith(loopback) or local.startswith(loopback)):
        return address, []
    return None, [
        f"GLOO_SOCKET_IFNAME must name the interface of {_name(options)} that other nodes reach, since its host name "
        f"resolves to {address or 'nothing'}; got nothing (interfaces: {', '.join(interfaces)}; it reaches node 0 from "
        f"{local})"
    ]


def _resolved(name: str) -> str | None:
    """Return the first address of a host name, or None if it has none."""
    with suppress(OSError):
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    return None


def _unreachable(who: str, roster: dict[str, list[Any]]) -> list[str]:
    """Return a line for each unreachable node of the roster {who: [address, port]}."""

    def problem(other: str) -> str | None:
        try:
            socket.create_connection(tuple(roster[other]), timeout=_PATIENCE).close()
        except OSError as error:
            return f"{who} must reach {other} at {roster[other][0]}, on any port; got {reason_of(error)}"
        return None

    with ThreadPoolExecutor(16) as pool:
        return list(filter(None, pool.map(problem, (other for other in roster if other != who))))


def _name(options: PreflightOptions) -> str:
    return f"node {options.node_rank} ({socket.gethostname()})"


main = command("preflight", PreflightOptions, run, example="nnodes=4 node_rank=1 master_addr=host0 master_port=29500")
