"""The command `verl-ext preflight`: all nodes check that torchrun can start.

The nodes share a TCPStore of torch at master_addr:master_port, the address at which torchrun will listen:

    report/RANK   versions, and problems that the node finds by itself
    clock/RANK    the node's clock when all reports had arrived
    ended         a line that ends the check if a node is missing, or if two nodes have the same rank

All nodes read the same values, so they end with the same lines and the same exit code. Node 0 holds the store, and
joins it like the others: one that is not at master_addr finds node 0 there, and both learn that they have one rank.

A node that comes back while the run goes on (a restarted pod under c10d) finds torchrun's store instead, which holds
the rendezvous of the run. The node then has nothing to compare, and starts.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from verl_ext.commands.command_line import command
from verl_ext.environment import differences, versions
from verl_ext.launch.protocol import Launcher
from verl_ext.options import REQUIRED, Options, UsageError, must, option, reason_of

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_GREETING = "verl-ext preflight"  # the key that identifies the store of this command
_PATIENCE = 10  # seconds for an answer of a node that has reported


@dataclass(frozen=True)
class PreflightOptions(Options):
    """Check on all nodes of a run that torchrun can start.

    launch/node.sh does so if NNODES is above 1. Node 0's port must be free, every node must reach node 0, named
    interfaces must exist, Python and package versions must be equal, and clocks must agree. The trainer itself compares
    options, data and model of all nodes.
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
            yield must("node_rank", f"be 0 to {self.nnodes - 1} with nnodes={self.nnodes}", self.node_rank)


def check_nodes(options: PreflightOptions) -> str:
    """Check with all nodes; return a line, or raise all nodes' UsageError."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch, imported below, warns about the same things
    Launcher.from_environment().end_with_it()
    where = f"{options.master_addr}:{options.master_port}"
    own = _store_of_node_0(options) if options.node_rank == 0 else None
    store, local = _store_to_join(options)
    if store is None:
        joins = f"is held by the run {options.rdzv_id}, which this node joins"
        return f"preflight: {where} {joins}; nothing was compared"
    try:
        problems = _problems(store, options, local)
    except RuntimeError:  # torch's DistError: the store is gone or does not answer
        problems = [f"{_name(options)} lost node 0 ({where}) during the check"]
    del own  # the store of node 0 ends here, after every node has read the result
    if problems:
        raise UsageError("\nerror: ".join(problems))
    return f"preflight: {options.nnodes} nodes reach node 0; versions and clocks agree"


def _store_of_node_0(options: PreflightOptions) -> "TCPStore":
    """Return a new store at MASTER_PORT of this host."""
    from torch.distributed import TCPStore  # here, because importing torch takes seconds

    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", options.master_port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        who = f"{options.master_port} ({os.strerror(error.errno or 0)}) on {_name(options)}"
        also = "another run, or another node with NODE_RANK=0, may have it"
        raise UsageError(must("MASTER_PORT", "be a free port of node 0", f"{who}: {also}")) from None
    patience = timedelta(seconds=_PATIENCE)
    listener = server.detach()
    store = TCPStore("localhost", options.master_port, None, True, patience, False, master_listen_fd=listener)
    store.set(_GREETING, "")
    return store


def _store_to_join(options: PreflightOptions) -> "tuple[TCPStore | None, str]":
    """Return node 0's store and the local address that reaches it.

    The store is None if the run `rdzv_id` has begun.
    """
    end = time.monotonic() + options.timeout
    while True:
        try:
            with socket.create_connection((options.master_addr, options.master_port), timeout=_PATIENCE) as probe:
                local = probe.getsockname()[0]
            if store := _store_at(options):
                return store, local
            if options.rdzv_id and _store_at(options, f"torch.rendezvous.{options.rdzv_id}"):
                return None, local
            reason = ", where another program or run listens"  # perhaps the previous run, at its end
        except OSError as error:
            reason = f" ({reason_of(error)})"
        if time.monotonic() > end:
            needed = f"be node 0, reachable from {_name(options)} within {options.timeout} s"
            got = f"{options.master_addr}:{options.master_port}{reason}"
            raise UsageError(must("MASTER_ADDR:MASTER_PORT", needed, got))
        time.sleep(min(1.0, options.timeout / 10))


def _store_at(options: PreflightOptions, key: str = _GREETING) -> "TCPStore | None":
    """Return the store at MASTER_ADDR:MASTER_PORT; None without the key."""
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


def _problems(store: "TCPStore", options: PreflightOptions, local: str) -> list[str]:
    """Exchange reports and clocks with the other nodes; return the problems.

    local: the address at which node 0 and this node reach each other.
    """
    rank, who = options.node_rank, _name(options)
    # Count this node in, so that node 0 keeps the store until every node has read the result.
    store.add("here", 1)
    if store.add(f"nodes/{rank}", 1) > 1:
        first = json.loads(store.get(f"report/{rank}"))["who"]
        store.set("ended", must("NODE_RANK", "differ from node to node", f"{rank} on {first} and {who}"))
    else:
        same = {**versions(), "NNODES": str(options.nnodes), "NPROC_PER_NODE": str(options.processes)}
        problems = list(_interface_problems(options, local))
        store.set(f"report/{rank}", json.dumps({"who": who, "same": same, "problems": problems}))

    # Node 0 alone ends the check for a missing node: the others wait a little longer, to read why.
    reports = _gathered(store, "report", options, options.timeout + _PATIENCE * (rank > 0))
    clock = time.time()  # every node reads it at the same moment
    if rank == 0 and (missing := [str(each) for each in range(options.nnodes) if each not in reports]):
        where = f"{options.master_addr}:{options.master_port} within {options.timeout} s"
        late = must(f"all {options.nnodes} nodes", f"report to {where}", f"nothing from node {', '.join(missing)}")
        store.compare_set("ended", "", late)
    names = {each: report["who"] for each, report in reports.items()}
    problems = differences({names[each]: report["same"] for each, report in reports.items()})
    problems += [problem for report in reports.values() for problem in report["problems"]]

    store.set(f"clock/{rank}", json.dumps(clock))
    clocks = _gathered(store, "clock", options, _PATIENCE)
    for other, read in clocks.items():
        if abs(ahead := read - clocks.get(0, read)) > options.clock_seconds:
            needed = f"agree with node 0's within clock_seconds={options.clock_seconds:g}"
            got = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} it"
            problems.append(must(f"the clock of {names[other]}", needed, got))
    problems += [f"{name} ended during the check" for other, name in names.items() if other not in clocks]
    # A line in `ended` takes the place of all others, so that every node ends with the same text.
    problems = [store.get("ended").decode()] if store.check(["ended"]) else problems

    end = time.monotonic() + _PATIENCE
    store.add("here", -1)
    with suppress(RuntimeError):  # a node 0 beside the one that holds the store may find it gone
        while rank == 0 and store.add("here", 0) > 0 and time.monotonic() < end:  # the store ends with its process
            time.sleep(0.1)
    return problems


def _gathered(store: "TCPStore", kind: str, options: PreflightOptions, seconds: float) -> dict[int, Any]:
    """Return the values in time by rank; none once the check ended."""
    end, keys = time.monotonic() + seconds, [f"{kind}/{rank}" for rank in range(options.nnodes)]
    while not store.check(keys) and not store.check(["ended"]) and time.monotonic() < end:
        time.sleep(0.1)
    if store.check(["ended"]):
        return {}
    return {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}


def _interface_problems(options: PreflightOptions, local: str) -> Iterator[str]:
    """Yield a line for each missing interface or unreachable host name."""
    interfaces = psutil.net_if_addrs()
    there, missing = ", ".join(interfaces), False
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL accepts prefixes, =exact names and ^excluded names
        for named in os.environ.get(variable, "").lstrip("=^").split(","):
            if named and not any(interface.startswith(named) for interface in interfaces):
                missing = True
                yield must(variable, f"name an interface of {_name(options)}, {there}", named)
    if missing or os.environ.get("GLOO_SOCKET_IFNAME") or options.local_addr:
        return
    address = None  # at which gloo listens
    with suppress(OSError):
        address = str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    loopback = ("127.", "::1")
    if address is None or (address.startswith(loopback) and not local.startswith(loopback)):
        why = f"since its host name resolves to {address or 'nothing'}"
        needed = f"name the interface of {_name(options)} that other nodes reach, {why}"
        got = f"nothing (interfaces: {there}; it reaches node 0 from {local})"
        yield must("GLOO_SOCKET_IFNAME", needed, got)


def _name(options: PreflightOptions) -> str:
    return f"node {options.node_rank} ({socket.gethostname()})"


main = command(
    "preflight", PreflightOptions, check_nodes, example="nnodes=4 node_rank=1 master_addr=host0 master_port=29500"
)
