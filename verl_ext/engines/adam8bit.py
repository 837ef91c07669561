"""AdamW whose moments have eight bits, over FSDP2's shards.

A moment is a code of 8 bits for each number, and a scale for each block of a row, the block's greatest magnitude. Codes
are levels of the dynamic map of https://arxiv.org/abs/2110.02861; a step widens them to fp32, and writes them back.

    exp_avg_codes [A, …, B] uint8   ·   exp_avg_scales [A, …, B / block] fp32      beside exp_avg_sq_codes, …_scales

Blocks lie in rows, so that any number of ranks divides codes and scales as it does the parameter: a step has the same
bits on all of them, and checkpoints are read by others. Where B is a multiple of 256 the bits are those of torchao's
AdamW8bit on one process. Small tensors, and those with narrow rows, keep moments in the parameter's precision.

torchao's class itself has its blocks, and what is too small for them, follow from a rank's shard, and compiles a step.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from verl_ext.engines.sharding import local_part

BLOCK, LEAST_BLOCK, LEAST_NUMBERS = 256, 64, 4096  # of a block at most and at least, and of a tensor
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether there are signs
_SLICE = 2**22  # numbers that a step widens at a time
_LEAST_SCALE = 1e-12


class AdamW8bit(torch.optim.Optimizer):
    """An optimizer with 2 bytes of state a parameter and a scale a block."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8
    ) -> None:
        torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr, betas, eps, weight_decay)  # refuses other values
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self._tables: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:  # type: ignore[override]
        """Step the parameters that have gradients."""
        assert closure is None, "a step of the trainer has no closure"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(group, parameter)

    def _step_parameter(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        """Step a rank's part of a parameter, slice by slice."""
        block = block_size(parameter.shape)
        state: Any = self.state[parameter]
        if not state:
            state |= {"step": torch.tensor(0.0), **_zero_moments(parameter, block)}
        state["step"] += 1
        local = {name: local_part(value).view(-1) for name, value in state.items() if name != "step"}
        weights, gradients = local_part(parameter).view(-1), local_part(parameter.grad).reshape(-1)
        size = _SLICE // block * block if block else _SLICE
        for start in range(0, len(weights), size):
            numbers = slice(start, start + size)
            gradient = gradients[numbers].float()
            moments = []
            for (name, has_sign), beta in zip(MOMENTS.items(), group["betas"], strict=True):
                value = gradient if has_sign else gradient.square()
                if block:
                    blocks = slice(start // block, (start + size) // block)
                    codes, scales = local[f"{name}_codes"][numbers], local[f"{name}_scales"][blocks]
                    levels = self._table(_levels, has_sign, codes.device)[codes.int()].view(len(scales), -1)
                    moment = (levels * scales.unsqueeze(1)).view(-1).lerp(value, 1 - beta)
                    self._narrow(moment, codes, scales, has_sign)
                else:
                    moment = local[name][numbers].float().lerp(value, 1 - beta)
                    local[name][numbers] = moment
                moments.append(moment)
            _change(weights[numbers], moments, group, state["step"])

    def _narrow(self, moment: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, has_sign: bool) -> None:
        """Write a moment as codes and scales."""
        rows = moment.view(len(scales), -1)
        scales.copy_(rows.abs().amax(1).clip_(_LEAST_SCALE))
        limits = self._table(_limits, has_sign, codes.device)
        codes.copy_(torch.bucketize(rows / scales.unsqueeze(1), limits, out_int32=True, right=True).view(-1))

    def _table(self, table: Callable[[bool], np.ndarray], has_sign: bool, device: torch.device) -> torch.Tensor:
        key = table, has_sign, device
        if key not in self._tables:
            self._tables[key] = torch.tensor(table(has_sign), device=device)
        return self._tables[key]


def block_size(shape: torch.Size) -> int:
    """Return the numbers of a block of a parameter's moments; 0 for moments that are not codes.

    It is the greatest divisor of a row from 64 to 256.
    """
    if shape.numel() < LEAST_NUMBERS or len(shape) < 2:
        return 0
    return next((size for size in range(BLOCK, LEAST_BLOCK - 1, -1) if shape[-1] % size == 0), 0)


def _zero_moments(parameter: nn.Parameter, block: int) -> dict[str, torch.Tensor]:
    """Return the first state of a parameter, sharded like it."""
    if not block:
        return {name: torch.zeros_like(parameter) for name in MOMENTS}
    of_blocks = parameter[..., : parameter.shape[-1] // block]  # as many numbers as a row has blocks
    whole = torch.contiguous_format
    return {
        f"{name}_{part}": torch.zeros_like(source, dtype=dtype, memory_format=whole)
        for name in MOMENTS
        for part, source, dtype in (("codes", parameter, torch.uint8), ("scales", of_blocks, torch.float32))
    }


def _change(weights: torch.Tensor, moments: list[torch.Tensor], group: dict[str, Any], step: torch.Tensor) -> None:
    """Change weights by their moments, with the operations of torchao's step in their order."""
    rate = torch.tensor(group["lr"], dtype=torch.float32)
    unbias, unbias_squares = (1 - beta**step for beta in group["betas"])
    mean, squares = moments
    values = weights.float()
    values = values - rate * group["weight_decay"] * values
    divisor = squares.sqrt_().div_(unbias_squares.sqrt()).add_(group["eps"])
    weights.copy_(values.sub_(mean.div_(unbias).mul_(rate).div_(divisor)))


@lru_cache
def _levels(has_sign: bool) -> np.ndarray:
    """Return the numbers from -1 or 0 to 1 for which codes stand, in order.

    They are zero, one, and in each of seven decades as many even steps as its code leaves bits for; in fp32 as torch's
    linspace rounds, on every machine.
    """
    levels = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if has_sign else 2 ** (decade + 1)
        places = np.arange(count + 1)
        step = np.float64((np.float32(1) - np.float32(0.1)) / np.float32(count))
        from_start, from_end = np.float32(0.1) + step * places, 1 - step * (count - places)
        bounds = np.where(places < (count + 1) // 2, from_start, from_end).astype(np.float32)
        middles = (bounds[:-1] + bounds[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        levels += [*middles, *(-middles if has_sign else ())]
    return np.sort(np.array(levels, np.float32))


@lru_cache
def _limits(has_sign: bool) -> np.ndarray:
    """Return the least number of each code above the first, as torchao rounds in fp32."""
    below, above = _levels(has_sign)[:-1], _levels(has_sign)[1:]
    near = [(below + above) / np.float32(2)]
    for toward in (below, above):
        near.append(np.nextafter(near[0], toward))
        near.append(np.nextafter(near[-1], toward))
    candidates = np.sort(np.stack(near), axis=0)
    is_above = candidates - below >= (above - below) * np.float32(0.5)
    return candidates[is_above.argmax(0), np.arange(len(below))]
