"""What a memory carries from token to token: fast weights and their momenta, for every sample apart.

Legend: B samples, H heads, dk key and value size of a head, e hidden size of its network.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch


class MemoryState(NamedTuple):
    """One layer's state in fp32 (fp64 for an fp64 model).

    A tuple of tensors, so that FSDP2 and checkpointing find every tensor that enters and leaves a layer. A memory of
    depth 1 has no second layer.
    """

    w1: torch.Tensor  # [B, H, dk, e]
    w2: torch.Tensor | None  # [B, H, e, dk]
    s1: torch.Tensor  # as w1
    s2: torch.Tensor | None  # as w2

    def detached(self) -> "MemoryState":
        """The same values, cut from what computed them."""
        return MemoryState(*(tensor if tensor is None else tensor.detach() for tensor in self))  # type: ignore[arg-type]


class StreamState:
    """The states of all memory layers after ``tokens`` tokens, to go on reading from there.

    Neither a tuple nor a dataclass: FSDP2 casts every tensor that it finds in a model's arguments to the parameters'
    dtype, and a state must stay in fp32.
    """

    __slots__ = ("layers", "tokens")

    def __init__(self, layers: Sequence[MemoryState | None], tokens: int) -> None:
        self.layers = tuple(layers)
        self.tokens = tokens

    def __iter__(self) -> Iterator[MemoryState | None]:
        return iter(self.layers)

    def detached(self) -> "StreamState":
        """The same values, cut from what computed them."""
        return StreamState([state and state.detached() for state in self.layers], self.tokens)
