"""Record each call of a model: its tokens with padding, the lengths over which attention runs, and its cost."""

import time
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class Forwards:
    """The calls of a model since the last ``clear``.

    Attributes:
        positions: the ``position_ids`` of each call, [rows, tokens with padding], kept unchanged and read afterwards.
        clocks: this process's processor time at each call, in seconds.
    """

    positions: list[torch.Tensor] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)

    def clear(self) -> None:
        self.positions.clear()
        self.clocks.clear()

    @property
    def calls(self) -> int:
        return len(self.positions)

    @property
    def tokens(self) -> int:
        """The tokens that went through the model, padding included."""
        return sum(positions.numel() for positions in self.positions)

    def spans(self, documents: bool) -> list[np.ndarray]:
        """Return for each call the lengths int64[n] over which attention runs, of ``documents`` or of whole rows."""
        return [_documents(positions) if documents else _rows(positions) for positions in self.positions]

    def watch(self, module: torch.nn.Module) -> None:
        """Record every forward of ``module`` from now on."""

        def keep(_: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            self.positions.append(kwargs["position_ids"])
            self.clocks.append(time.process_time())

        module.register_forward_pre_hook(keep, with_kwargs=True)


def _rows(positions: torch.Tensor) -> np.ndarray:
    return np.full(positions.shape[0], positions.shape[1])


def _documents(positions: torch.Tensor) -> np.ndarray:
    flat = positions.flatten().cpu().numpy()
    return np.diff(np.append(np.flatnonzero(flat == 0), len(flat)))
