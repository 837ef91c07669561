"""The command `verl-ext preflight`: all nodes of a run check together what torchrun needs to start on them.

    node 0 listens on master_addr:master_port, where torchrun will           every other node
        greeting                                                       ──►
                                                                       ◄──   report: versions, clock, address of gloo
        roster: the addresses of all                                   ──►
                                                                       ◄──   which of them it could not reach
        verdict: a line for each problem, or none                      ──►   all end with the same lines and code

One line of JSON each. A node that comes back while the run goes on (a restarted pod under c10d) finds torchrun's store
in place of the greeting, and in it the rendezvous of the run; there is nothing to compare with, and it starts.
"""

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from verl_ext.commands.command_line import command
from verl_ext.launcher import end_with_launcher
from verl_ext.nodes import differences, versions
from verl_ext.values import REQUIRED, Options, UsageError, option, reason_of

_GREETING = {"program": "verl-ext preflight"}
_PATIENCE = 10  # seconds for one line from a node that has connected
_STRANGER = 30  # seconds for which something may listen in the place of node 0, as the end of the run before does
_RUN_HAS_BEGUN = """
import datetime, sys, torch.distributed as dist
host, port, run = sys.argv[1:]
patience = datetime.timedelta(seconds=10)
store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=patience)
sys.exit(not store.check([f"torch.rendezvous.{run}"]))
"""  # in a process of its own: it waits for ever for a listener that never answers
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class PreflightOptions(Options):
    """Checks, on all nodes of a run together, what torchrun needs: launch/node.sh starts it where NNODES is above 1.

    The port of node 0 is free, every node reaches every other, interfaces that are named exist, Python and packages are
    the same, clocks agree. The trainer compares options, data and model of all nodes itself."""

    nnodes: int = option(REQUIRED, "nodes of the run", least=1, required=True)
    node_rank: int = option(0, "number of this node, from 0", least=0)
    master_addr: str = option("127.0.0.1", "node 0, as all nodes reach it", required=True)
    master_port: int = option(29500, "port of node 0 for torchrun's rendezvous", least=1, most=65535)
    processes: int = option(1, "ranks per node, the same on all nodes", least=1)
    local_addr: str | None = option(None, "this node's address for others; null: that of gloo's interface or host name")
    rdzv_id: str | None = option(
        None, "the run that a node may join after it has begun, by c10d rendezvous; null: none"
    )
    timeout: int = option(600, "seconds to wait for the other nodes", least=1)
    clock_seconds: float = option(5, "most seconds between clocks; c10d drops nodes that seem 15 s late", above=0)

    def problems(self) -> Iterator[str | None]:
        if self.node_rank >= self.nnodes:
            yield f"node_rank must be 0 to {self.nnodes - 1} with nnodes={self.nnodes}; got {self.node_rank}"


def run(options: PreflightOptions) -> str:
    """Check together with the other nodes; the line that says so. Raises `UsageError` with what is wrong, on all."""
    end_with_launcher()
    if options.node_rank == 0:
        problems, said = _lead(options)
    else:
        problems, said = _follow(options)
    if problems:
        raise UsageError("\nerror: ".join(problems))
    return f"preflight: {said}"


def _lead(options: PreflightOptions) -> tuple[list[str], str]:
    """Node 0's part: (problems, what is right)."""
    where = ("", options.master_port)
    try:
        if socket.has_dualstack_ipv6():
            server = socket.create_server(where, family=socket.AF_INET6, backlog=options.nnodes, dualstack_ipv6=True)
        else:
            server = socket.create_server(where, backlog=options.nnodes)
    except OSError as error:
        if line := _other_node_0(options):
            return _report_to(line, options)
        who = f"{options.master_port} ({os.strerror(error.errno or 0)}) on {_name(options)}"
        return [f"MASTER_PORT must be a free port of node 0; got {who}: another run may have it"], ""
    with server, contextlib.ExitStack() as open_lines:
        address = _resolved(options.master_addr) or options.master_addr
        own, listener = _own_report(options, address)
        open_lines.enter_context(listener)
        reports, lines, problems = {0: own}, {}, list[str]()
        end = time.monotonic() + options.timeout
        while len(reports) < options.nnodes and (left := end - time.monotonic()) > 0:
            server.settimeout(min(left, 1.0))
            try:
                line = open_lines.enter_context(_Line(server.accept()[0]))
            except TimeoutError:
                if not _is_of_this_host(address) and (line := _other_node_0(options)):
                    return _report_to(line, options)
                continue
            report = _welcomed(line)
            if report is None:
                continue  # no node: a probe of the port
            rank = report["rank"]
            if rank in reports:
                on = f"{reports[rank]['who']} and {report['who']}"
                problems.append(f"NODE_RANK must differ from node to node; got {rank} on {on}")
                line.put({"problems": problems, "said": ""})
                break
            reports[rank], lines[rank] = report, line
        if not problems and (missing := sorted(set(range(options.nnodes)) - set(reports))):
            problems.append(
                f"all {options.nnodes} nodes must report to {options.master_addr}:{options.master_port} within "
                f"{options.timeout} s; got nothing from node {', '.join(map(str, missing))}"
            )
        if not problems:
            problems += differences({report["who"]: report["same"] for report in reports.values()})
            problems += _clock_problems(reports, options.clock_seconds)
            problems += [problem for report in reports.values() for problem in report["problems"]]
            roster = {report["who"]: report["address"] for report in reports.values() if report["address"]}
            for line in lines.values():
                line.put({"roster": roster})
            problems += _unreachable(own["who"], roster)
            for rank, line in lines.items():
                answer = line.get(options.timeout)
                problems += [f"{reports[rank]['who']} ended during the check"] if answer is None else answer
        said = f"{options.nnodes} nodes reach each other; versions and clocks agree"
        for line in lines.values():
            line.put({"problems": problems, "said": said})
    return problems, said


def _follow(options: PreflightOptions) -> tuple[list[str], str]:
    """The part of every other node: (problems, what is right), as node 0 says."""
    began = time.monotonic()
    stranger_since: float | None = None
    where = f"{options.master_addr}:{options.master_port}"
    must = f"MASTER_ADDR:MASTER_PORT must be node 0, reachable from {_name(options)}; got {where}"
    while True:
        try:
            if line := _greeted(options, _PATIENCE):
                return _report_to(line, options)
            if _run_has_begun(options):
                return [], f"{where} is held by the run {options.rdzv_id}, which this node joins; nothing was compared"
            stranger_since = stranger_since or time.monotonic()
            if time.monotonic() - stranger_since > min(_STRANGER, options.timeout):
                return [f"{must}, where another program or run listens"], ""
        except OSError as error:
            stranger_since = None
            if time.monotonic() - began > options.timeout:
                return [f"{must} ({reason_of(error)}, for {options.timeout} s)"], ""
        time.sleep(min(1.0, options.timeout / 10))


def _greeted(options: PreflightOptions, seconds: float) -> "_Line | None":
    """A connection to node 0, whose greeting is read; None where no greeting comes in time. Raises OSError."""
    line = _Line(socket.create_connection((options.master_addr, options.master_port), timeout=seconds))
    if line.get(seconds) == _GREETING:
        return line
    line.close()
    return None


def _other_node_0(options: PreflightOptions) -> "_Line | None":
    """A connection from a node 0 to the one that listens at MASTER_ADDR, if that is another."""
    with contextlib.suppress(OSError):
        return _greeted(options, 1.0)
    return None


def _run_has_begun(options: PreflightOptions) -> bool:
    """Ask the port of node 0 for a torchrun store that has this run's rendezvous."""
    if options.rdzv_id is None:
        return False
    command = [sys.executable, "-c", _RUN_HAS_BEGUN, options.master_addr, str(options.master_port), options.rdzv_id]
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=60, check=False).returncode == 0
    return False


def _report_to(line: "_Line", options: PreflightOptions) -> tuple[list[str], str]:
    """Report to the node 0 that has greeted, try what it asks for, and return its verdict."""
    with line:
        report, listener = _own_report(options, line.local_address)
        with listener:
            line.put({**report, "clock": time.time()})
            answer = line.get(options.timeout + _PATIENCE)
            if answer and "roster" in answer:
                line.put(_unreachable(report["who"], answer["roster"]))
                answer = line.get(options.timeout + _PATIENCE)
    if answer is None:
        where = f"{options.master_addr}:{options.master_port}"
        return [f"{_name(options)} lost node 0 ({where}) during the check"], ""
    return answer["problems"], answer["said"]


class _Line:
    """A connection over which values go as lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rwb")
        self.local_address = connection.getsockname()[0]

    def __enter__(self) -> "_Line":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._connection.close()

    def put(self, value: Any) -> None:
        """Send a value; to a node that is gone, nothing: what it does not answer is reported."""
        with contextlib.suppress(OSError):
            self._file.write(json.dumps(value).encode() + b"\n")
            self._file.flush()

    def get(self, seconds: float = _PATIENCE) -> Any:
        """The next value; None where none comes in time, or something that is none."""
        self._connection.settimeout(seconds)
        try:
            return json.loads(self._file.readline(1 << 20))
        except (OSError, ValueError):
            return None


def _welcomed(line: _Line) -> dict[str, Any] | None:
    """What a node that has connected reports, with how far its clock is ahead; None where it is no node."""
    line.put(_GREETING)
    report = line.get()
    if not isinstance(report, dict) or "rank" not in report:
        return None
    return {**report, "ahead": report["clock"] - time.time()}  # it was sent as soon as it was read


def _own_report(options: PreflightOptions, reached_by: str) -> tuple[dict[str, Any], socket.socket]:
    """This node's report to node 0, and the listening socket that the other nodes try to reach.

    reached_by: the address over which node 0 and this node reach each other.
    """
    address, problems = _gloo_address(options, reached_by)
    family = socket.AF_INET6 if address and ":" in address else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, backlog=options.nnodes)
    same = {**versions(), "NNODES": str(options.nnodes), "NPROC_PER_NODE": str(options.processes)}
    report = {
        "rank": options.node_rank,
        "who": _name(options),
        "same": same,
        "address": [address, listener.getsockname()[1]] if address else None,
        "problems": problems,
    }
    return report, listener


def _gloo_address(options: PreflightOptions, reached_by: str) -> tuple[str | None, list[str]]:
    """(the address that gloo will use, problems): that of its interface, else of this host's name."""
    interfaces = [name for _, name in socket.if_nameindex()]
    problems = []
    for variable in _INTERFACE_VARIABLES:
        # NCCL's may be prefixes, =exact names and ^those to leave out
        for named in os.environ.get(variable, "").lstrip("=^").split(","):
            if named and not any(interface.startswith(named) for interface in interfaces):
                there = ", ".join(interfaces)
                problems.append(f"{variable} must name an interface of {_name(options)}, {there}; got {named}")
    if problems:
        return None, problems
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        return _interface_address(name.split(",")[0]) or reached_by, []
    if options.local_addr:
        return options.local_addr, []
    hostname = socket.gethostname()
    address = _resolved(hostname)
    if address and (not _is_loopback(address) or _is_loopback(reached_by)):
        return address, []
    there = f"interfaces: {', '.join(interfaces)}; it reaches node 0 from {reached_by}"
    return None, [
        f"GLOO_SOCKET_IFNAME must name the interface of {_name(options)} that other nodes reach, since its host name "
        f"resolves to {address or 'nothing'}; got nothing ({there})"
    ]


def _resolved(name: str) -> str | None:
    """The first address of a host name, None where it has none."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    return None


def _is_of_this_host(address: str) -> bool:
    """Tell whether an address belongs to an interface of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as any_socket:
        any_socket.bind((address, 0))
        return True
    return False


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _interface_address(name: str) -> str | None:
    """The IPv4 address of an interface, None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:  # SIOCGIFADDR
            answer = fcntl.ioctl(any_socket.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _unreachable(who: str, roster: dict[str, list[Any]]) -> list[str]:
    """A line for each node of the roster {who: [address, port]} that this one cannot connect to."""

    def problem(other: str) -> str | None:
        address, port = roster[other]
        try:
            socket.create_connection((address, port), timeout=_PATIENCE).close()
        except OSError as error:
            return f"{who} must reach {other} at {address}, on any port; got {reason_of(error)}"
        return None

    with ThreadPoolExecutor(16) as pool:
        return list(filter(None, pool.map(problem, (other for other in roster if other != who))))


def _clock_problems(reports: dict[int, dict[str, Any]], allowed: float) -> Iterator[str]:
    for _, report in sorted(reports.items()):
        ahead = report.get("ahead", 0.0)
        if abs(ahead) > allowed:
            how = "ahead of" if ahead > 0 else "behind"
            yield (
                f"the clock of {report['who']} must agree with node 0's within clock_seconds={allowed:g}; got "
                f"{abs(ahead):.1f} s {how} it"
            )


def _name(options: PreflightOptions) -> str:
    return f"node {options.node_rank} ({socket.gethostname()})"


main = command("preflight", PreflightOptions, run, example="nnodes=4 node_rank=1 master_addr=host0 master_port=29500")
