"""Two hosts: launch/node.sh in two network namespaces, sequence parallel inside a host, data parallel across hosts.

Run by `make cluster`. Each run starts four ranks, even on few cores, and takes a minute or two.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.lib.errors import names
from tests.lib.hosts import Host, two_hosts, why_no_hosts
from tests.lib.ranks import run_ranks
from tests.lib.training import SMALL, into, metrics, small_run, train_alone

STEPS = 60
COLLECTIVE = 15  # seconds: trainer.nccl_timeout
HANG = 10  # seconds: trainer.hang_timeout
_PATIENCE = 300

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def hosts():
    if why := why_no_hosts():
        pytest.skip(why)
    with two_hosts() as both:
        yield both


@pytest.fixture(scope="module")
def overrides(tiny_model, tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("two_hosts")
    lengths = np.random.default_rng(0).integers(2, 64, 100).tolist()
    return [
        *small_run(folder, tiny_model, lengths, "engine.ulysses_sequence_parallel_size=2", categories=2, seed=1),
        *(f"trainer.total_training_steps={STEPS}", f"trainer.nccl_timeout={COLLECTIVE}", "trainer.save_freq=4"),
        *("trainer.max_ckpt_to_keep=2", "data.balance_group=2", "trainer.logger=[file]"),
    ]


@pytest.fixture(scope="module")
def on_one_host(overrides, tmp_path_factory) -> dict[tuple[int, str], float]:
    """Return the losses of the same four ranks on one host."""
    output = tmp_path_factory.mktemp("one_host")
    run_ranks(train_alone, 4, [*overrides, into(output)])
    return metrics(output)


def start(hosts: tuple[Host, Host], overrides: list[str], output: Path, **more: str) -> list[subprocess.Popen[bytes]]:
    """Start launch/node.sh on both hosts; host i's output goes to output/../host-i.log."""
    output.parent.mkdir(exist_ok=True)
    shared = {"NNODES": "2", "NPROC_PER_NODE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
    shared |= {"PREFLIGHT_TIMEOUT": "60"}
    command = ["launch/node.sh", *SMALL, *overrides, into(output)]
    return [
        host.start(
            command,
            output.parent / f"host-{host.rank}.log",
            **shared | {"NODE_RANK": str(host.rank), "LOCAL_ADDR": host.address, "GLOO_SOCKET_IFNAME": "cable0"} | more,
        )
        for host in hosts
    ]


def wait(what: Callable[[], bool], runs: list[subprocess.Popen[bytes]] = ()) -> None:  # type: ignore[assignment]
    """Wait until `what` holds; raise an error if that takes too long or a run ends before."""
    end = time.monotonic() + _PATIENCE
    while not what():
        assert time.monotonic() < end
        assert all(run.poll() is None for run in runs)
        time.sleep(0.1)


def exit_codes(runs: list[subprocess.Popen[bytes]]) -> list[int]:
    return [run.wait(_PATIENCE) for run in runs]


def codes_after_cut(host: Host, runs: list[subprocess.Popen[bytes]]) -> tuple[list[int], float]:
    """Cut a host off until the runs have ended; return their exit codes and the seconds until then."""
    start = time.monotonic()
    host.cut()
    try:
        return exit_codes(runs), time.monotonic() - start
    finally:
        host.mend()


def saved(output: Path) -> Callable[[], bool]:
    return (output / "latest_checkpointed_iteration.txt").is_file


def logs(output: Path) -> list[str]:
    return [(output.parent / f"host-{rank}.log").read_text(errors="replace") for rank in (0, 1)]


def assert_same_losses(found: dict[tuple[int, str], float], expected: dict[tuple[int, str], float]) -> None:
    assert found.keys() == expected.keys()
    for (step, name), value in expected.items():
        if "loss" in name or "norm" in name:
            assert found[step, name] == pytest.approx(value, rel=1e-6), (step, name)


def test_a_cable_that_is_cut_ends_both_sides_and_the_restart_resumes(hosts, overrides, on_one_host, tmp_path):
    output = tmp_path / "cut" / "run"
    runs = start(hosts, overrides, output)
    wait(saved(output), runs)
    codes, seconds = codes_after_cut(hosts[1], runs)
    assert seconds < COLLECTIVE + 45  # plus the time that ranks need to leave on a busy machine
    assert codes == [3, 3]
    for rank, log in enumerate(logs(output)):
        assert "preflight: 2 nodes reach node 0; versions and clocks agree" in log
        assert names(log, f"error: rank {2 * rank}", "collective", "trainer.nccl_timeout", "last checkpoint")
    assert exit_codes(start(hosts, overrides, output)) == [0, 0]
    assert "resumed after step " in logs(output)[0]
    assert_same_losses(metrics(output), on_one_host)


def test_a_host_out_of_reach_is_named_by_its_ranks(hosts, overrides, tmp_path):
    output = tmp_path / "out" / "run"
    runs = start(hosts, [*overrides, "trainer.nccl_timeout=600", f"trainer.hang_timeout={HANG}"], output)
    wait(saved(output), runs)
    codes, seconds = codes_after_cut(hosts[1], runs)
    assert seconds < HANG + 45
    assert codes == [3, 3]
    first, second = logs(output)  # the ranks' store is on the first host
    assert names(first, f"{HANG} s (trainer.hang_timeout)", "rank 2", "host-b", "rank 3")
    assert first.count("error: ") == 1
    assert "and the store of the ranks does not answer" in second


def test_a_signal_to_one_host_stops_both_after_the_same_step(hosts, overrides, on_one_host, tmp_path):
    output = tmp_path / "asked" / "run"
    runs = start(hosts, overrides, output, MAX_RESTARTS="2")
    wait(saved(output), runs)
    os.kill(launchers_of(hosts[1])[0], signal.SIGTERM)
    assert exit_codes(runs) == [75, 75]  # also on the host without a signal; nothing restarts
    done = int((output / "latest_checkpointed_iteration.txt").read_text())
    assert max(step for step, _ in metrics(output)) == done
    assert sum(f"stopping after step {done} of {STEPS}" in log for log in logs(output)) == 1
    assert exit_codes(start(hosts, overrides, output)) == [0, 0]
    assert_same_losses(metrics(output), on_one_host)


def test_a_killed_rank_restarts_all_of_them_in_place(hosts, overrides, on_one_host, tmp_path):
    output = tmp_path / "killed" / "run"
    runs = start(hosts, overrides, output, MAX_RESTARTS="2")
    wait(saved(output), runs)
    os.kill(max(ranks_of(hosts[1])), signal.SIGKILL)
    assert exit_codes(runs) == [0, 0]
    assert any("resumed after step " in log for log in logs(output))
    assert_same_losses(metrics(output), on_one_host)


def ranks_of(host: Host) -> list[int]:
    """Return the processes of a host's ranks."""
    return [
        pid
        for pid, words in commands_of(host).items()
        if b"verl_ext.fsdp_sft_trainer" in words and not any(b"torchrun" in word for word in words[:3])
    ]


def launchers_of(host: Host) -> list[int]:
    """Return the process of a host's launch/node.sh, which becomes `verl-ext launch`."""
    return [
        pid for pid, words in commands_of(host).items() if words[1].endswith(b"verl-ext") and words[2:3] == [b"launch"]
    ]


def commands_of(host: Host) -> dict[int, list[bytes]]:
    """Return the words of each process of a host."""
    found = subprocess.run(["ip", "netns", "pids", host.namespace], check=True, capture_output=True, text=True)
    return {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in found.stdout.split()}


def test_a_host_that_cannot_be_reached_is_told_before_anything_starts(hosts, overrides, tmp_path):
    output = tmp_path / "apart" / "run"
    hosts[1].cut()
    try:
        codes = exit_codes(start(hosts, overrides, output, PREFLIGHT_TIMEOUT="3"))
    finally:
        hosts[1].mend()
    assert codes == [2, 2]
    first, second = logs(output)
    assert names(first, "2 nodes", f"{hosts[0].address}:29500", "3 s", "nothing from node 1")
    assert names(second, "MASTER_ADDR:MASTER_PORT", "node 1 (host-b)")
    assert not output.exists()


def test_two_hosts_that_both_are_node_0_are_told_at_once(hosts, overrides, tmp_path):
    output = tmp_path / "twins" / "run"
    runs = start(hosts, overrides, output, NODE_RANK="0", PREFLIGHT_TIMEOUT="200")
    assert exit_codes(runs) == [2, 2]
    for log in logs(output):
        assert names(log, "NODE_RANK", "0 on node 0")
        assert "got nothing from node" not in log
