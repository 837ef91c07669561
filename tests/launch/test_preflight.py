"""`verl-ext preflight`: nodes that query each other, as threads of this process on the loopback."""

import contextlib
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

import verl_ext.commands.preflight as preflight
from tests.lib.errors import names
from verl_ext.__main__ import main
from verl_ext.commands.preflight import PreflightOptions, check_nodes
from verl_ext.environment import PACKAGES, differences, folder_digest, versions
from verl_ext.options import UsageError

pytestmark = pytest.mark.slow

SECONDS = 120  # the limit of every wait

_of_this_thread = threading.local()


def nodes(port: str, *ranks: int, ahead: int = 0, **options) -> list[str]:
    """Return each node's output, or the problems that end it; all clocks but node 0's are `ahead` by some seconds."""

    def node(rank: int) -> str:
        given = {"nnodes": 3, "master_port": int(port), "timeout": 20, **options}
        _of_this_thread.ahead = ahead if rank else 0
        try:
            return check_nodes(PreflightOptions(node_rank=rank, **given))
        except UsageError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(node, ranks))


def test_nodes_that_agree_say_so_in_any_order_of_starting(free_port):
    said = nodes(free_port, 2, 1, 0)
    assert said == ["preflight: 3 nodes reach node 0; versions and clocks agree"] * 3


def test_other_packages_on_a_node_are_told_on_every_node(free_port, monkeypatch):
    found = iter([{"torch": "2.13.0"}, {"torch": "2.13.0"}, {"torch": "2.12.1"}])
    monkeypatch.setattr(preflight, "versions", lambda: next(found))
    said = nodes(free_port, 0, 1, 2)
    assert len(set(said)) == 1
    assert names(said[0], "torch", "2.13.0 on node", "2.12.1 on node")


def test_a_clock_that_is_ahead_is_told(free_port, monkeypatch):
    real = time.time
    monkeypatch.setattr(preflight.time, "time", lambda: real() + getattr(_of_this_thread, "ahead", 0))
    (said,) = set(nodes(free_port, 0, 1, nnodes=2, ahead=40))
    assert names(said, "clock of node 1", "clock_seconds=5")
    assert re.search(r"got (39|40)\.\d s ahead", said)


def test_a_node_that_does_not_come_and_two_nodes_of_one_rank_are_told(free_port):
    (said,) = set(nodes(free_port, 0, 1, 1, timeout=SECONDS))
    assert names(said, "NODE_RANK", "1 on node 1")
    (said,) = set(nodes(free_port, 0, 1, timeout=1))
    assert names(said, "3 nodes", f"127.0.0.1:{free_port}", "1 s", "nothing from node 2")


def test_a_port_in_use_and_a_node_0_that_is_not_there_are_told(free_port):
    (said,) = nodes(free_port, 1, timeout=1)
    assert names(said, "MASTER_ADDR:MASTER_PORT", "node 1", "1 s", f"127.0.0.1:{free_port} (Connection refused)")
    with socket.create_server(("", int(free_port))):
        (said,) = nodes(free_port, 0, timeout=1)
    assert names(said, "MASTER_PORT", f"{free_port} (Address already in use) on node 0")


def test_two_nodes_0_of_one_host_end_with_a_line_each(free_port):
    said = nodes(free_port, 0, 0, timeout=1)
    (one,) = (line for line in said if names(line, "MASTER_PORT", free_port))
    assert names(one, "NODE_RANK=0")
    (other,) = (line for line in said if line != one)
    assert names(other, "1 s", "nothing from node 1, 2")


def test_two_nodes_0_of_two_hosts_are_told_at_once(free_port, monkeypatch):
    real = preflight._store_of_node_0
    hosts = iter([real, lambda options: None])  # the store of the second is at its own host, where nobody joins it
    monkeypatch.setattr(preflight, "_store_of_node_0", lambda options: next(hosts)(options))
    (said,) = set(nodes(free_port, 0, 0, timeout=SECONDS))
    assert names(said, "NODE_RANK", "0 on node 0")


@pytest.mark.parametrize("run", [None, "mine", "another"])
def test_a_node_that_comes_back_joins_the_rendezvous_of_its_run_alone(run, free_port, monkeypatch):
    monkeypatch.setattr(preflight, "_PATIENCE", 1)
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{free_port}", "mine", 1, 2, is_host="1")
    _backend, _store = create_backend(parameters)  # as torchrun does on node 0
    (said,) = nodes(free_port, 1, timeout=1, rdzv_id=run)
    where = f"127.0.0.1:{free_port}"
    if run == "mine":
        assert said == f"preflight: {where} is held by the run mine, which this node joins; nothing was compared"
    else:
        assert names(said, "MASTER_ADDR:MASTER_PORT", "node 1", where, "another program or run")


@pytest.mark.parametrize("answers", ["closes", "says nothing", "says something"])
def test_another_program_at_the_port_of_node_0_is_no_run(answers, free_port, monkeypatch):
    monkeypatch.setattr(preflight, "_PATIENCE", 1)
    kept = []

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                kept.append(server.accept()[0])
                kept[-1].sendall(b"SSH-2.0\r\n" if answers == "says something" else b"")
                if answers == "closes":
                    kept.pop().close()

    with socket.create_server(("127.0.0.1", int(free_port))) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(serve, server)
        try:
            (said,) = nodes(free_port, 1, timeout=1)
        finally:
            server.shutdown(socket.SHUT_RDWR)
    assert names(said, f"127.0.0.1:{free_port}", "another program or run")


def test_something_else_that_asks_at_the_port_is_no_node(free_port):
    def probe() -> None:
        while True:
            try:
                with socket.create_connection(("127.0.0.1", int(free_port))) as connection:
                    connection.sendall(json.dumps({"what": "a probe"}).encode() + b"\n")
                return
            except ConnectionRefusedError:
                continue

    with ThreadPoolExecutor(1) as pool:
        probed = pool.submit(probe)
        said = nodes(free_port, 0, 1, nnodes=2)
        probed.result()
    assert said == ["preflight: 2 nodes reach node 0; versions and clocks agree"] * 2


def test_an_interface_that_is_not_there_is_told(free_port, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^ib7")
    said = nodes(free_port, 0, nnodes=1)
    assert names(said[0], "NCCL_SOCKET_IFNAME", "node 0", "ib7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert nodes(free_port, 0, nnodes=1) == ["preflight: 1 nodes reach node 0; versions and clocks agree"]


def test_a_host_name_that_others_cannot_reach_asks_for_an_interface(free_port, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(preflight.socket, "gethostname", lambda: "no-such-host.invalid")
    (said,) = nodes(free_port, 0, nnodes=1)
    assert names(said, "GLOO_SOCKET_IFNAME", "node 0 (no-such-host.invalid)")


def test_a_rank_that_cannot_be_is_refused(capsys):
    assert main(["preflight", "nnodes=2", "node_rank=2"]) == 2
    assert names(capsys.readouterr().err, "node_rank", "0 to 1", "nnodes=2", "got 2")


def test_differences_name_the_nodes_of_each_value():
    facts = {f"node {number}": {"a": "1", "b": "x" if number else "y"} for number in range(7)}
    (line,) = differences(facts)
    assert names(line, "b", "y on node 0, x on node 1, node 2, node 3, node 4 and 2 more")
    assert differences({"node 0": {"a": "1"}, "node 1": {"a": "1"}}) == []
    assert set(versions()) == {"python", *PACKAGES}


def test_content_tells_copies_from_other_data(tmp_path):
    for name in ("one", "copy", "other", "short"):
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "below" / "data.arrow").write_bytes(bytes(200_000))
    (tmp_path / "copy" / ".verl_ext_scan.npz").write_bytes(b"made on one node alone")
    (tmp_path / "other" / "below" / "data.arrow").write_bytes(bytes(199_999) + b"\1")
    (tmp_path / "short" / "below" / "data.arrow").write_bytes(bytes(199_998))
    one, copy, other, short, missing = (
        folder_digest(str(tmp_path / name)) for name in ("one", "copy", "other", "short", "no")
    )
    assert one == copy
    assert len({one, other, short, missing}) == 4
    assert one.startswith("1 file of 200,000 bytes (")
    assert missing == "nothing"
