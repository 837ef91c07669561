"""A Ray cluster of one or two nodes on this machine, raylets with CPUs of their own, and the ranks of a run on them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

# Ray notices a lost node within seconds; the threshold allows a busy machine some late answers.
_HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 5}
_NODE = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_log_monitor": False}  # one process less on each


class Nodes:
    """The cluster, which a run finds by RAY_ADDRESS."""

    def __init__(self, number: int) -> None:
        from ray.cluster_utils import Cluster  # imported here, as it takes 2 seconds that most tests can save

        head = {**_NODE, "include_dashboard": False, "no_monitor": True, "_system_config": _HEALTH}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self._second = None
        if number == 2:
            self.add_second()

    def add_second(self) -> None:
        """Start the second node, unless it runs."""
        if self._second is None:
            self._second = self._cluster.add_node(**_NODE)

    def kill_second(self) -> None:
        """Send kill -9 to the second node's raylet; Ray's processes on it follow."""
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = None

    def shutdown(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_nodes(number: int) -> Iterator[Nodes]:
    """Start one or two nodes with 2 CPUs each for the block."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # Ray's sockets need a short path
    (folder / "ray").mkdir()
    before = {name: os.environ.get(name) for name in ("RAY_TMPDIR", "RAY_ADDRESS", "RAY_USAGE_STATS_ENABLED")}
    os.environ.update(RAY_TMPDIR=str(folder), RAY_USAGE_STATS_ENABLED="0")
    os.environ.pop("RAY_ADDRESS", None)
    cluster = Nodes(number)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield cluster
    finally:
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        shutil.rmtree(folder, ignore_errors=True)


def ranks_of(folder: Path) -> dict[int, psutil.Process]:
    """Return, by rank, the rank processes (without loaders) of the run that writes into this folder."""
    found = {}
    for process in psutil.process_iter():
        try:
            words, parent = process.cmdline(), process.parent()
            is_rank = "verl_ext.fsdp_sft_trainer" in words and any(str(folder) in word for word in words)
            if is_rank and parent is not None and parent.cmdline() != words:
                found[int(process.environ()["RANK"])] = process
        except (psutil.Error, KeyError):  # it has ended
            continue
    return found
