"""How a memory joins its decoder layer, by variant.

    residual  h' = layer(h) + σ(memory_gate(h)) ⊙ W_o M(h)
    mal       h' = layer(h + σ(memory_gate(h)) ⊙ W_o M(h))                       W_o = 0 at the start
    mag       h' = layer(h) + tanh(memory_gate(M(h))) ⊙ (layer(h) - h)           memory_gate = 0 at the start
    mac       h' = layer(h) + tanh(memory_gate(h)) ⊙ (layer(context)_h - layer(h))

At the start all four equal the plain layer exactly. Where they differ from the paper (https://arxiv.org/abs/2501.00663,
§4) it is to keep that start and to keep causality:

- mag gates what the layer *adds* to the residual stream, by 1 + tanh(·), from 0 to 2.
- mac's context is ``persistent | m_0 h_0 m_1 h_1 …``: the memory token m_t = W_o M(h_t), read from the state at the
  chunk's beginning, stands just before h_t and shares its position. The paper puts all memory tokens before the
  segment, where a token would see those of later tokens, and so the answer that it is to predict. A plain causal mask
  over the interleaved order prevents that. The layer's output h' is what is written, after the chunk.

The decoder layer is not a part of this module: recomputing it under checkpointing can write nothing twice.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from verl_ext.models.qwen_titans.long_term_memory import LongTermMemory
from verl_ext.models.qwen_titans.memory_settings import MemorySettings
from verl_ext.models.qwen_titans.memory_state import MemoryState


class Contribution(NamedTuple):
    """What a memory hands to its decoder layer; a tuple, so that FSDP2 finds the tensors.

    Attributes:
        values: ``[B, T, d]``: what is added (residual, mal), the gate (mag), or the memory tokens (mac).
        gate: mac's gate ``[B, T, d]``.
        persistent: mac's persistent tokens ``[B, P, d]``.
    """

    values: torch.Tensor
    gate: torch.Tensor | None = None
    persistent: torch.Tensor | None = None


class MemoryLayer(GradientCheckpointingLayer):
    """The memory of one decoder layer: a pure function of hidden states and state; ``forward`` is its only entry."""

    def __init__(self, hidden_size: int, settings: MemorySettings, eps: float = 1e-6) -> None:
        super().__init__()
        self.variant = settings.variant
        self.long_term_memory = LongTermMemory(hidden_size, settings, eps)
        gated_by = settings.heads * settings.head_dim if self.variant == "mag" else hidden_size
        self.memory_gate = nn.Linear(gated_by, hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The start at which, with that of the memory, the variant equals the plain layer."""
        init.zeros_(self.memory_gate.weight)
        init.zeros_(self.memory_gate.bias)

    def forward(
        self,
        hidden: torch.Tensor,
        state: MemoryState | None,
        written: torch.Tensor | None,
        write_only: bool = False,
    ) -> tuple[Contribution | None, MemoryState]:
        """The contribution to the layer and the state after these tokens.

        Args:
            hidden: ``[B, T, d]`` of one chunk: the layer's input; with ``write_only`` (mac) its output.
            state: None for a new sample.
            written: bool ``[B, T]``, False where a token must not be written; None writes all.
            write_only: mac's second call of a chunk; its first reads alone.
        """
        if write_only:
            return None, self.long_term_memory(hidden, state, written, read=False)[1]
        recalled, state = self.long_term_memory(hidden, state, written, write=self.variant != "mac")
        with torch.autocast(hidden.device.type, enabled=False):
            gate = self.memory_gate(recalled if self.variant == "mag" else hidden.to(recalled.dtype))
        if self.variant == "mag":
            return Contribution(torch.tanh(gate)), state
        if self.variant == "mac":
            persistent = self.long_term_memory.persistent.repeat(len(hidden), 1, 1)  # a copy, as the state
            return Contribution(recalled, torch.tanh(gate), persistent), state
        return Contribution(torch.sigmoid(gate) * recalled), state
