"""The memory of a Recurrent Memory Transformer: tokens that a chunk passes to the next (Bulatov et al., 2022).

    chunk i      h_i | the chunk's C tokens | h_i        h_i: M tokens; all tokens read the first, the last are written
    h_{i+1}      the outputs of the last M after the model's final norm

Source: https://arxiv.org/abs/2207.06881, the form for decoders. A chunk that is not complete writes nothing. Unlike a
new Titans memory, new tokens change the output of the base model before any training.

Legend: B samples, w tokens of a pass, C tokens of a chunk, M memory tokens, d hidden size.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import initialization as init

from verl_ext.models.qwen_titans.stream import MemoryStream, Place


class RecurrentTokens(nn.Module):
    """The tokens before the first chunk; ``forward`` gives ``[B, M, d]``."""

    def __init__(self, count: int, hidden_size: int, std: float) -> None:
        super().__init__()
        self.initial, self.std = nn.Parameter(torch.empty(count, hidden_size)), std
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the tokens like new embeddings."""
        init.normal_(self.initial, std=self.std)

    def forward(self, batch: int) -> torch.Tensor:
        """Return a copy of the tokens for each new sample."""
        return self.initial.repeat(batch, 1, 1)


class Framed(NamedTuple):
    """The tokens of a pass between its memory tokens."""

    hidden: torch.Tensor  # [B, M + w, d], or [B, M + w + M, d] if a row's chunk ends
    columns: torch.Tensor  # [B or 1, …], the places of these tokens in the chunk
    top: int  # the number of places in a chunk


def framed(stream: MemoryStream, hidden: torch.Tensor, columns: torch.Tensor, place: Place, chunk_size: int) -> Framed:
    """Put memory tokens before ``hidden[B, w, d]`` and, if a row's chunk ends, after it."""
    assert stream.state is not None
    state = stream.state.to(hidden.dtype)
    count = state.shape[1]
    first = torch.arange(count, device=hidden.device).expand(len(columns), count)
    last = chunk_size + 2 * count  # for padding that would lie beyond the chunk: no real token sees it
    own = torch.where(columns < chunk_size, count + columns, last)
    top = last + 1 if place.top >= chunk_size else count + place.top
    if not place.ends:
        return Framed(torch.cat([state, hidden], 1), torch.cat([first, own], 1), top)
    written = first + count + chunk_size
    return Framed(torch.cat([state, hidden, state], 1), torch.cat([first, own, written], 1), top)


def write_tokens(stream: MemoryStream, outputs: torch.Tensor, place: Place, chunk_size: int) -> None:
    """Pass ``outputs[B, M, d]`` to the next chunk in rows whose chunk ends."""
    if place.start is not None and place.tokens is not None:
        ended = (place.start + place.tokens == chunk_size).view(-1, 1, 1)
        outputs = torch.where(ended, outputs, stream.state.to(outputs.dtype))  # type: ignore[union-attr]
    stream.state = outputs
