"""The topology of a run, from the environment of a node."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from verl_ext.options import UsageError, must

# The first variable that is set and not empty counts. PET_* are torchrun's own names, as Kubeflow's operator sets them.
# WORLD_SIZE and RANK are not read: they count processes for some schedulers and nodes for others.
NAMES = {
    "NNODES": ("NNODES", "nnodes", "PET_NNODES"),
    "NODE_RANK": ("NODE_RANK", "node_rank", "PET_NODE_RANK"),
    "NPROC_PER_NODE": ("NPROC_PER_NODE", "nproc_per_node", "PET_NPROC_PER_NODE"),
    "MASTER_ADDR": ("MASTER_ADDR", "master_ip", "PET_MASTER_ADDR"),
    "MASTER_PORT": ("MASTER_PORT", "master_port", "PET_MASTER_PORT"),
    "LOCAL_ADDR": ("LOCAL_ADDR", "local_addr", "PET_LOCAL_ADDR"),
    "MAX_RESTARTS": ("MAX_RESTARTS", "max_restarts", "PET_MAX_RESTARTS"),
}


@dataclass(frozen=True)
class Topology:
    """The nodes of a run, and the place of one of them.

    Attributes:
        nodes: the number of nodes.
        node_rank: the number of this node, from 0.
        processes: the ranks of every node.
        address: the address of node 0, as other nodes reach it.
        port: the port of node 0; None on a single node: a free one.
        local_address: the address by which other nodes reach this one; None: that of its host name.
        restarts: how many times torchrun or Ray may start all ranks again.
        id: the name of the rendezvous in which restarted nodes meet.
    """

    nodes: int
    node_rank: int
    processes: int
    address: str
    port: int | None
    local_address: str | None
    restarts: int
    id: str

    @classmethod
    def of(cls, environment: Mapping[str, str], default_port: int) -> "Topology":
        """Read a node's variables; raise UsageError for an impossible topology."""
        values = {
            name: next((environment[each] for each in names if environment.get(each)), "")
            for name, names in NAMES.items()
        }
        nodes = _whole("NNODES", values["NNODES"] or "1", least=1)
        processes = _whole("NPROC_PER_NODE", values["NPROC_PER_NODE"] or str(_num_devices(environment)), least=1)
        restarts = _whole("MAX_RESTARTS", values["MAX_RESTARTS"] or "0", least=0)
        port, rank, address = values["MASTER_PORT"], values["NODE_RANK"], values["MASTER_ADDR"]
        if port and not (re.fullmatch(r"[1-9]\d{0,4}", port) and int(port) < 1 << 16):
            raise UsageError(must("MASTER_PORT", "be a port, 1 to 65535", f"'{port}'"))
        if nodes == 1:
            rank, address = "0", address or "127.0.0.1"
        elif not address:
            raise UsageError(must("MASTER_ADDR (or master_ip)", f"name the first node when NNODES={nodes}", "nothing"))
        elif not (re.fullmatch(r"0|[1-9]\d*", rank) and int(rank) < nodes):
            raise UsageError(must("NODE_RANK", f"be 0 to {nodes - 1} when NNODES={nodes}", f"'{rank}'"))
        number = int(port) if port else None if nodes == 1 else default_port
        return cls(
            nodes=nodes,
            node_rank=int(rank),
            processes=processes,
            address=address,
            port=number,
            local_address=values["LOCAL_ADDR"] or None,
            restarts=restarts,
            id=environment.get("RDZV_ID") or f"verl-ext-{number}",
        )

    def torchrun_options(self) -> list[str]:
        """Return the options by which torchrun starts the ranks of this node."""
        is_alone = self.nodes == 1 and self.port is None
        if is_alone:  # a rendezvous of its own on a free port, so that two runs on one machine never meet
            options = ["--standalone", "--local_addr=127.0.0.1"]
        elif self.restarts:  # nodes can leave and come back; node 0 keeps the store in which they meet
            options = [f"--nnodes={self.nodes}", "--rdzv_backend=c10d", f"--rdzv_endpoint={self.address}:{self.port}"]
            options += [f"--rdzv_id={self.id}", f"--rdzv_conf=is_host={int(self.node_rank == 0)}"]
        else:
            options = [f"--nnodes={self.nodes}", f"--node_rank={self.node_rank}"]
            options += [f"--master_addr={self.address}", f"--master_port={self.port}"]
        if self.local_address and not is_alone:
            options.append(f"--local_addr={self.local_address}")
        if self.restarts:
            options.append(f"--max_restarts={self.restarts}")
        return [*options, f"--nproc_per_node={self.processes}"]


def _whole(name: str, text: str, least: int) -> int:
    if not re.fullmatch(r"0|[1-9]\d*", text) or int(text) < least:
        raise UsageError(must(name, f"be a whole number of at least {least}", f"'{text}'"))
    return int(text)


def _num_devices(environment: Mapping[str, str]) -> int:
    """Count visible GPUs without importing torch; at least 1, for the CPU."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, sum(bool(device.strip()) for device in visible.split(",")))
    if not (program := shutil.which("nvidia-smi", path=environment.get("PATH"))):
        return 1
    listed = subprocess.run([program, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return max(1, sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))
