"""Two hosts on one machine: network namespaces joined by a virtual cable, each with a host name of its own.

    host-a 10.77.x.1 ══ veth ══ 10.77.x.2 host-b

A host's process sees its own loopback and its end of the cable as `cable0`; the hosts share files, as over NFS.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.lib.project import ROOT


def why_no_hosts() -> str | None:
    """Return the reason why this machine cannot make network namespaces, or None."""
    try:
        with two_hosts():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces need root and iproute2 ({error})"


@dataclass(frozen=True)
class Host:
    """One of the two hosts."""

    rank: int
    namespace: str
    address: str

    def start(self, command: list[str], output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on this host; its output goes to the file `output`."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "PYTEST"))}
        there = {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
        named = ["sh", "-c", f'hostname host-{"ab"[self.rank]} && exec "$@"', "sh", *command]
        with output.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, "unshare", "--uts", *named],
                cwd=ROOT,
                env={**kept, **there},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cut(self) -> None:
        """Pull this host's end of the cable: nothing arrives any more, and no process is notified."""
        ip("-n", self.namespace, "link", "set", "cable0", "down")

    def mend(self) -> None:
        """Plug it in again."""
        ip("-n", self.namespace, "link", "set", "cable0", "up")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make the hosts for the block; processes that remain on them at its end are killed."""
    tag, net = f"{os.getpid():x}", os.getpid() % 250
    hosts = tuple(Host(rank, f"verl-ext-{tag}-{'ab'[rank]}", f"10.77.{net}.{rank + 1}") for rank in (0, 1))
    try:
        for host in hosts:
            ip("netns", "add", host.namespace)
            ip("-n", host.namespace, "link", "set", "lo", "up")
        first, second = (host.namespace for host in hosts)
        ip("-n", first, "link", "add", "cable0", "type", "veth", "peer", "name", "cable0", "netns", second)
        for host in hosts:
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "cable0")
            host.mend()
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            for pid in _processes_of(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False, capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _processes_of(host: Host) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", host.namespace], check=False, capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]
