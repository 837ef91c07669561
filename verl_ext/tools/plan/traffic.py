"""The bytes that a rank receives in a fake step's collectives.

    all-gather         the output without the rank's own part        FSDP's parameters
    reduce-scatter     the input without the rank's own part         FSDP's gradients
    all-reduce         twice the input without the own part          gradients between replicas (`engine.fsdp_size`)
    all-to-all         the parts from other ranks                    heads (Ulysses), keys and values, targets,
                                                                     tokens of experts (`parallel.expert_parallel`),
                                                                     matrices of an optimizer's step (Muon)

In an all-to-all, each rank receives its own parts from other nodes. The other collectives run in rings over all network
cards of a node, so that each of its ranks receives an equal share of the bytes that the node lacks.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

GATHERED, REDUCED = "parameters (FSDP)", "gradients (FSDP)"
MATRICES_OF_STEP = "matrices (Muon)"
HEADS, KEYS, TARGETS = "heads (Ulysses)", "keys and values between groups", "targets of the head"
TOKENS = "tokens of experts"
EXCHANGES = (HEADS, KEYS, TARGETS, TOKENS)  # no computation hides these


@dataclass
class Received:
    """The bytes that a rank receives, and those from other nodes."""

    bytes: float = 0
    remote: float = 0


class Traffic:
    """A counter of collectives.

    Args:
        ulysses: the number of ranks that exchange heads.
        ranks_per_node: the ranks of a node, which are numbered node by node.
        experts: the name of the group whose ranks share experts; None without one.

    Attributes:
        in_optimizer: whether an optimizer's step runs.
    """

    def __init__(self, ulysses: int, ranks_per_node: int, experts: str | None = None) -> None:
        self.ulysses, self.ranks_per_node, self.experts = ulysses, ranks_per_node, experts
        self.received: dict[str, Received] = defaultdict(Received)
        self.in_optimizer = False

    def see(self, func: Any, args: Sequence[Any]) -> None:
        """Count an operation of torch's `c10d`."""
        name = func._opname
        if name == "_allgather_base_":
            self._add_ring(GATHERED, args[2], args[0])
        elif name == "_reduce_scatter_base_":
            self._add_ring(REDUCED, args[2], args[1])
        elif name == "allreduce_" and args[0][0].numel() > 1:  # not the gradient norm
            for tensor in args[0]:
                self._add_ring(REDUCED, args[1], tensor, times=2)
        elif name == "alltoall_base_":
            self._add_exchange(args[2], args[0], args[3])

    def _add_ring(self, kind: str, group: Any, whole: torch.Tensor, times: int = 1) -> None:
        ranks, nodes = self._places(group)
        kept, count = self.received[kind], len(set(nodes))
        kept.bytes += times * whole.nbytes * (len(ranks) - 1) / len(ranks)
        kept.remote += times * whole.nbytes * (count - 1) / len(ranks)  # (N - 1) / N of it, shared by n / N ranks

    def _add_exchange(self, group: Any, output: torch.Tensor, sizes: Sequence[int]) -> None:
        ranks, nodes = self._places(group)
        mine = ranks.index(dist.get_rank())
        rows = sizes or [len(output) // len(ranks)] * len(ranks)
        row = output.nbytes / max(len(output), 1)
        neighbours = len(ranks) > 1 and ranks[1] - ranks[0] == 1
        kind = KEYS if self.ulysses == 1 or not neighbours else HEADS if len(ranks) == self.ulysses else TARGETS
        # Of equal ranks torch makes one group. Rows of tokens and their counts differ from heads by sizes and type.
        is_of_experts = dist.ProcessGroup.unbox(group).group_name == self.experts
        if is_of_experts and (sizes or not output.is_floating_point()):
            kind = TOKENS
        kept = self.received[MATRICES_OF_STEP if self.in_optimizer else kind]
        kept.bytes += row * sum(size for number, size in enumerate(rows) if number != mine)
        kept.remote += row * sum(size for size, node in zip(rows, nodes, strict=True) if node != nodes[mine])

    def _places(self, group: Any) -> tuple[list[int], list[int]]:
        """Return the ranks of a group, and the node of each."""
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
        return ranks, [rank // self.ranks_per_node for rank in ranks]
