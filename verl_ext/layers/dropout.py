"""The noise of training, which a loss that compares documents does without.

Dropout, jitter of a router's inputs, experts drawn at random and layers left out all ask a module's `training`,
whatever their names. So does gradient checkpointing, which such a loss keeps.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def switch_noise_off(model: nn.Module) -> None:
    """Let a model compute in training what it computes in evaluation, from its next ``train()`` on.

    A layer that is recomputed in the backward pass is in training mode, but not inside its forward. Where a model's own
    code recomputes its layers, the modules that do stay in training mode, and :func:`no_draws` watches them.
    """
    recomputing = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]
    layers = [part for part in recomputing if isinstance(part, GradientCheckpointingLayer)]
    for layer in layers:
        _rest_in_forward(layer)
    kept = set(layers or recomputing)

    def train(mode: bool = True) -> nn.Module:
        type(model).train(model, mode)
        for part in model.modules():
            part.training = mode and part in kept
        return model

    model.train = train  # type: ignore[method-assign]


def _rest_in_forward(layer: nn.Module) -> None:
    """Take a layer out of training mode while its forward runs."""
    modes: list[bool] = []

    def enter(layer: nn.Module, _: object) -> None:
        modes.append(layer.training)
        layer.training = False

    def leave(layer: nn.Module, *_: object) -> None:
        layer.training = modes.pop()

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave, always_call=True)  # also where a recomputation stops early


@contextmanager
def no_draws(error: Exception) -> Iterator[None]:
    """Raise an error if random numbers are drawn inside."""
    before = _generators()
    yield
    if not all(map(torch.equal, before, _generators())):
        raise error


def _generators() -> list[torch.Tensor]:
    """Return the states of this process' generators, which a device keeps on the host."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
