"""A training run on a new Ray cluster or a running one.

node KEY=VALUE …      each node of a new cluster; node 0 runs Ray's head and the run
node                  the same cluster without a run: it waits for jobs
submit KEY=VALUE …    a run as a job on the cluster at RAY_ADDRESS
"""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from verl_ext.launch.topology import Topology
from verl_ext.options import UsageError, must

PORT = 6379  # of Ray's head
_RUN = ("python", "-m", "verl_ext.fsdp_sft_trainer_ray")
_START = ("ray", "start", "--block", "--disable-usage-stats")
_USAGE = """\
usage: verl-ext launch-ray node [key=value …]      the same as verl-ext launch backend=ray
       verl-ext launch-ray submit key=value …      the same as verl-ext launch backend=ray_job"""


def main(words: Sequence[str]) -> int:
    """Run a node or submit a job; return the exit code."""
    mode, *overrides = words or [""]
    if {"-h", "--help"} & set(words):
        print(_USAGE)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the head too, as Ctrl-C does
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ray and python of this environment
    try:
        if mode == "submit":
            return _submit(overrides)
        if mode != "node":
            raise UsageError(must("the first argument", "be node or submit", f"'{mode}'"))
        return _node(Topology.of(os.environ, PORT), overrides)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted before the run had started", file=sys.stderr)
        return 130


def _submit(overrides: Sequence[str]) -> int:
    """Submit a run as a job, with set variables as overrides."""
    keys = {"NNODES": "trainer.nnodes", "NPROC_PER_NODE": "trainer.n_gpus_per_node", "MAX_RESTARTS": "ray.max_restarts"}
    flags = {"WORKING_DIR": "--working-dir", "RUNTIME_ENV": "--runtime-env-json"}
    values = [f"{key}={os.environ[name]}" for name, key in keys.items() if os.environ.get(name)]
    options = [f"{flag}={os.environ[name]}" for name, flag in flags.items() if os.environ.get(name)]
    return _replace_by(["ray", "job", "submit", *options, "--", *_RUN, *values, *overrides])


def _node(topology: Topology, overrides: Sequence[str]) -> int:
    """Run a node of a new cluster; node 0 also runs training."""
    size = [f"trainer.n_gpus_per_node={topology.processes}", f"ray.max_restarts={topology.restarts}"]
    if topology.nodes == 1 and overrides:  # Ray itself makes a cluster of this machine for the run
        return _replace_by(["env", "-u", "RAY_ADDRESS", *_RUN, *size, *overrides])
    if (mode := os.environ.get("RAY_AUTH_MODE", "")) not in ("token", "disabled"):
        raise UsageError(must("RAY_AUTH_MODE", "be token or disabled, the same on every node", f"'{mode}'"))
    where = f"{topology.address}:{topology.port or PORT}"
    start = list(_START)
    if topology.local_address:
        start.append(f"--node-ip-address={topology.local_address}")
    if shutil.which("nvidia-smi") or os.environ.get("CUDA_VISIBLE_DEVICES"):
        start.append(f"--num-gpus={topology.processes}")
    head = [*start, "--head", f"--port={topology.port or PORT}"]
    join = [*start, f"--address={where}"]
    if topology.node_rank > 0:
        return _join(topology, join) if not _is_dry() else _replace_by(join)
    if not overrides:
        return _replace_by([*head, "--dashboard-host=0.0.0.0"])
    head.append("--include-dashboard=false")
    run = ["env", f"RAY_ADDRESS={where}", *_RUN, f"trainer.nnodes={topology.nodes}", *size, *overrides]
    if _is_dry():
        return _replace_by(head) or _replace_by(run)
    return _run_beside_head(topology, head, run)


def _is_dry() -> bool:
    return os.environ.get("DRY_RUN", "0") != "0"


def _replace_by(words: Sequence[str]) -> int:
    """Replace this process by a command, or print it."""
    if _is_dry():
        print(shlex.join(words))
        return 0
    os.execvp(words[0], list(words))


def _join(topology: Topology, join: Sequence[str]) -> int:
    """Join the cluster of node 0 for as long as it lives."""
    _wait_for_head(topology)
    if _attend(join) and _head_listens(topology):
        raise UsageError(f"Ray has ended on this node, and not on {topology.address}")
    print("Ray has ended", file=sys.stderr)
    return 0


def _run_beside_head(topology: Topology, head: Sequence[str], run: Sequence[str]) -> int:
    """Start Ray's head and run beside it; return the run's exit code."""
    if _head_listens(topology):
        where = f"MASTER_PORT={topology.port} must be free for Ray's head on {topology.address}"
        raise UsageError(f"{where}; something listens there")
    # In a session of its own: Ctrl-C is for the run alone.
    process = subprocess.Popen(head, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait_for_head(topology, process)
        return _attend(run)
    finally:
        process.terminate()
        process.wait()


def _attend(command: Sequence[str]) -> int:
    """Run a command, pass signals on, and return its exit code."""
    process = subprocess.Popen(command, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    return 128 - code if code < 0 else code


def _head_listens(topology: Topology) -> bool:
    with suppress(OSError), socket.create_connection((topology.address, topology.port or PORT), timeout=10):
        return True
    return False


def _wait_for_head(topology: Topology, process: "subprocess.Popen[bytes] | None" = None) -> None:
    """Wait until Ray's head listens; raise UsageError if it does not."""
    end = time.monotonic() + float(os.environ.get("PREFLIGHT_TIMEOUT", "600"))
    while not _head_listens(topology):
        if process is not None and process.poll() is not None:
            raise UsageError("Ray's head has ended; its lines above say why")
        if time.monotonic() > end:
            where = f"{topology.address}:{topology.port}"
            raise UsageError(must("Ray's head", f"listen at MASTER_ADDR:MASTER_PORT={where}", "no answer"))
        time.sleep(1)
