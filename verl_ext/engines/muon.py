"""Muon for the matrices of layers and AdamW for the rest, over FSDP2's shards.

Muon needs each matrix as a whole, of which every rank has rows. Matrices go round by round, one for each of n ranks:

    momentum of own rows, in bf16   ─ all-to-all ─►   a whole matrix on each rank, made orthogonal
    own rows of all n updates       ◄─ all-to-all ─

A fused projection (query, key and value in one weight) is one matrix, or with `optim.split_fused` as many as it joins:
it travels as one, and each part becomes orthogonal alone.

The exchange is in bf16 because torch's Newton-Schulz begins with it: a step has the bits of `torch.optim.Muon` on one
process. The momentum stays in shards, like AdamW's state. Experts ``[E, m, n]`` are E matrices, whole on their ranks.

Legend: n ranks that hold different rows, A × B a matrix, A_k the rows of rank k.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import _muon as of_torch

from verl_ext.engines.sharding import local_part

MATRICES = "matrices"  # the key of a group: whether Muon steps its parameters
PARTS = "parts"  # the key of a group: the parts of each of its matrices; () for the whole
_SPLITS_HEADS = ("Phi3Attention", "Phi4MultimodalAttention")  # query, key and value one after the other
Part = tuple[int, int, int, int]  # the dimension, -2 or -1, and a slice of it: start, stop, step


class MuonAdamW(torch.optim.AdamW):
    """An optimizer of groups of matrices (`matrices: True`) and others.

    momentum, nesterov, ns_coefficients, ns_steps and adjust_lr_fn are those of torch.optim.Muon; the rest, eps too, are
    AdamW's. `match_rms_adamw` gives both one learning rate. Without AdamW's state, a matrix has a momentum alone.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (of_torch.DEFAULT_A, of_torch.DEFAULT_B, of_torch.DEFAULT_C),
        ns_steps: int = of_torch.DEFAULT_NS_STEPS,
        adjust_lr_fn: str | None = "match_rms_adamw",
        **of_adamw: Any,
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, **of_adamw)
        one = [nn.Parameter(torch.zeros(1, 1))]
        torch.optim.Muon(one, lr, momentum=momentum, adjust_lr_fn=adjust_lr_fn)  # refuses other values
        for group in self.param_groups:
            group.setdefault(MATRICES, False)
        self._momentum, self._nesterov, self._adjust = momentum, nesterov, adjust_lr_fn
        self._newton_schulz: Any = (tuple(ns_coefficients), ns_steps, of_torch.EPS)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:  # type: ignore[override]
        """Step the matrices by Muon, and the others by AdamW."""
        assert closure is None, "a step of the trainer has no closure"
        groups = self.param_groups
        for group in groups:
            if group[MATRICES]:
                self._step_matrices(group)
        self.param_groups = [group for group in groups if not group[MATRICES]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Step a group's matrices, in rounds of as many as ranks share them."""
        waiting: dict[dist.ProcessGroup, list[Any]] = {}
        for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
            ranks = _sharers(parameter)
            if parameter.ndim == 3:  # of experts, a rank has whole ones
                directions = self._momentum_step(parameter)
                self._apply(group, parameter, [self._orthogonal(group, matrix) for matrix in directions])
            elif ranks is None:
                self._apply(group, parameter, [self._orthogonal(group, self._momentum_step(parameter))])
            else:
                waiting.setdefault(ranks, []).append(parameter)
        for ranks, parameters in waiting.items():
            count = dist.get_world_size(ranks)
            for first in range(0, len(parameters), count):
                self._step_round(group, parameters[first : first + count], ranks)

    def _step_round(self, group: dict[str, Any], parameters: Sequence[Any], ranks: dist.ProcessGroup) -> None:
        """Step at most n matrices, each of which becomes whole on a rank of its own."""
        count, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
        updates = [self._momentum_step(parameter) for parameter in parameters]
        of_others = [update.numel() for update in updates] + [0] * (count - len(updates))
        shape = parameters[rank].shape if rank < len(parameters) else (0, 0)
        of_mine = [rows * shape[1] for rows in _rows(shape[0], count)]
        # [A_k, B] of every matrix on rank k → [A, B] of matrix r on rank r, and back.
        whole = updates[0].new_empty(sum(of_mine))
        dist.all_to_all_single(whole, torch.cat([u.flatten() for u in updates]), of_mine, of_others, group=ranks)
        if len(whole):
            whole = self._orthogonal(group, whole.view(shape)).contiguous()
        own = whole.new_empty(sum(of_others))
        dist.all_to_all_single(own, whole.flatten(), of_others, of_mine, group=ranks)
        for parameter, rows in zip(parameters, own.split(of_others), strict=False):
            self._apply(group, parameter, [rows], sum(_rows(parameter.shape[0], count)[:rank]))

    def _momentum_step(self, parameter: Any) -> torch.Tensor:
        """Update the momentum of a rank's part; return a new direction in bf16."""
        state: Any = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, momentum = local_part(parameter.grad), local_part(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - self._momentum)
        direction = gradient.lerp(momentum, self._momentum) if self._nesterov else momentum
        device = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else direction.device
        return direction.to(device, torch.bfloat16, copy=True)  # Newton-Schulz divides it in place

    def _orthogonal(self, group: dict[str, Any], matrix: torch.Tensor) -> torch.Tensor:
        """Make a whole matrix orthogonal, or each of its parts."""
        if not group.get(PARTS):
            return of_torch._zeropower_via_newtonschulz(matrix, *self._newton_schulz)
        result = torch.empty_like(matrix)
        for index, _ in _pieces(group, matrix.shape):
            result[index] = of_torch._zeropower_via_newtonschulz(matrix[index].contiguous(), *self._newton_schulz)
        return result

    def _apply(
        self, group: dict[str, Any], parameter: nn.Parameter, updates: Sequence[torch.Tensor], first_row: int = 0
    ) -> None:
        """Change a rank's part of a parameter, whose parts in order are `updates`.

        first_row: the row of the whole matrix at which this rank's rows begin.
        """
        local, shape = local_part(parameter), parameter.shape[-2:]
        local.mul_(1 - group["lr"] * group["weight_decay"])
        for part, update in zip(local if local.ndim == 3 else [local], updates, strict=True):
            update = update.view(part.shape).to(part.device)
            for index, of_piece in _pieces(group, shape, first_row):
                rate = of_torch._adjust_lr(group["lr"], self._adjust, of_piece)
                part[index].add_(update[index], alpha=-rate)


def _pieces(group: dict[str, Any], shape: Any, first_row: int = 0) -> Iterator[tuple[Any, torch.Size]]:
    """Yield the index of each part of a matrix among a rank's rows, and the part's own shape.

    shape: of the whole matrix. first_row: the row at which the rank's rows begin.
    """
    rows, columns = shape
    for dim, start, stop, step in group.get(PARTS) or [(-2, 0, rows, 1)]:
        size = len(range(start, stop, step))
        if dim == -2:
            yield slice(max(start - first_row, 0), max(stop - first_row, 0)), torch.Size((size, columns))
        else:
            yield (slice(None), slice(start, stop, step)), torch.Size((rows, size))


def fused_parts(module: nn.Module) -> dict[nn.Parameter, tuple[Part, ...]]:
    """Return the parts of each weight that joins projections, as its layer splits what it gives.

    These are gate_up_proj of plain layers and of experts, qkv_proj of Phi's attention, and in_proj_qkv of linear
    attention. Weights whose parts alternate head by head (GPT-NeoX, Qwen3-Next) stay whole.
    """
    parts: dict[nn.Parameter, tuple[Part, ...]] = {}
    layers: Any = module.modules()
    for layer in layers:
        sizes: dict[str, list[int]] = {}
        if type(layer).__name__ in _SPLITS_HEADS:
            keys = layer.num_key_value_heads * layer.head_dim
            sizes["qkv_proj"] = [layer.config.num_attention_heads * layer.head_dim, keys, keys]
        if hasattr(layer, "key_dim"):
            sizes["in_proj_qkv"] = [layer.key_dim, layer.key_dim, layer.value_dim]
        fused = getattr(layer, "gate_up_proj", None)
        if isinstance(fused, nn.Linear):
            sizes["gate_up_proj"] = [fused.out_features // 2] * 2
        elif isinstance(fused, nn.Parameter) and fused.ndim == 3 and hasattr(layer, "is_concatenated"):
            dim = -1 if layer.is_transposed else -2
            size = fused.shape[dim]
            if layer.is_concatenated:
                parts[fused] = (dim, 0, size // 2, 1), (dim, size // 2, size, 1)
            else:  # a gate and its up in turn
                parts[fused] = (dim, 0, size, 2), (dim, 1, size, 2)
        for name, of_name in sizes.items():
            if isinstance(linear := getattr(layer, name, None), nn.Linear):
                ends = [sum(of_name[: place + 1]) for place in range(len(of_name))]
                weight: Any = linear.weight
                parts[weight] = tuple((-2, end - size, end, 1) for end, size in zip(ends, of_name, strict=True))
    return parts


def layer_matrices(module: Any, norms: set[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Yield the parameters that Muon steps: matrices of layers, and of experts.

    Not embeddings, the head, convolutions and what is not the weight of a product (a state's A_log). norms: the
    parameters of norms.
    """
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    apart = [part for part in module.modules() if isinstance(part, (nn.Embedding, nn.Conv1d)) or part in ends]
    others = norms.union(parameter for part in apart for parameter in part.parameters())
    for name, parameter in module.named_parameters():
        is_weight = parameter.ndim == 3 or (parameter.ndim == 2 and name.endswith("weight"))
        if is_weight and parameter not in others and not name.endswith("bias"):
            yield parameter


def _sharers(parameter: Any) -> dist.ProcessGroup | None:
    """Return the group whose ranks hold different rows; None for one rank."""
    for dim, placement in enumerate(parameter.placements) if isinstance(parameter, DTensor) else ():
        if placement.is_shard() and parameter.device_mesh.size(dim) > 1:
            assert placement.is_shard(0), "FSDP2 shards rows"
            return parameter.device_mesh.get_group(dim)
    return None


def _rows(whole: int, ranks: int) -> list[int]:
    """Return the rows of every rank, as torch.chunk divides them."""
    most = -(-whole // ranks)
    return [max(0, min(most, whole - rank * most)) for rank in range(ranks)]
