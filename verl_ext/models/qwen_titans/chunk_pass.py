"""One chunk through the base model's layers and their memories.

Legend: B samples, C tokens of the chunk, P persistent tokens, d hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from verl_ext.models.qwen_titans.memory_layer import Contribution
from verl_ext.models.qwen_titans.memory_state import MemoryState


class ChunkPass:
    """Calls the parts of ``model`` (a Qwen2Model or Qwen3Model) for chunk after chunk."""

    def __init__(self, model: Any, memory: nn.ModuleDict) -> None:
        self.model = model
        self.memory = memory
        self._masks: dict[int, Any] = {}

    def __call__(
        self, input_ids: torch.Tensor, written: torch.Tensor | None, states: Sequence[MemoryState | None]
    ) -> tuple[torch.Tensor, list[MemoryState | None]]:
        """The last layer's output ``[B, C, d]`` for ``input_ids[B, C]`` and the memories' states after the chunk."""
        hidden = self.model.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        plain = self._attention_arguments(hidden, positions)
        before = dict(zip(self.memory, states, strict=True))
        after: list[MemoryState | None] = []
        for index, layer in enumerate(self.model.layers):
            if str(index) in self.memory:
                memory = self.memory[str(index)]
                hidden, state = self._with_memory(layer, memory, hidden, plain, before[str(index)], written)
                after.append(state)
            else:
                hidden = layer(hidden, **plain)
        return hidden, after

    def _with_memory(
        self,
        layer: nn.Module,
        memory: Any,
        hidden: torch.Tensor,
        plain: dict[str, Any],
        state: MemoryState | None,
        written: torch.Tensor | None,
    ) -> tuple[torch.Tensor, MemoryState]:
        given, state = memory(hidden, state, written)
        values = given.values.to(hidden.dtype)
        if memory.variant == "mal":
            return layer(hidden + values, **plain), state
        output = layer(hidden, **plain)
        if memory.variant == "residual":
            return output + values, state
        if memory.variant == "mag":
            return output + values * (output - hidden), state
        assert given.gate is not None
        in_context = self._in_context(layer, hidden, given)
        output = output + given.gate.to(hidden.dtype) * (in_context - output)
        return output, memory(output, state, written, True)[1]

    def _in_context(self, layer: nn.Module, hidden: torch.Tensor, given: Contribution) -> torch.Tensor:
        """The layer's output ``[B, C, d]`` for the chunk inside ``persistent | m_0 h_0 m_1 h_1 …``."""
        assert given.persistent is not None
        count = given.persistent.shape[1]
        pairs = torch.stack([given.values.to(hidden.dtype), hidden], dim=2).flatten(1, 2)
        context = torch.cat([given.persistent.to(hidden.dtype), pairs], dim=1)
        first = torch.arange(count, device=hidden.device)
        own = torch.arange(hidden.shape[1], device=hidden.device).repeat_interleave(2)
        positions = torch.cat([first, count + own]).unsqueeze(0)
        return layer(context, **self._attention_arguments(context, positions))[:, count + 1 :: 2]

    def _attention_arguments(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        """A purely causal mask and the positions' rotations."""
        size = hidden.shape[1]
        if size not in self._masks:
            self._masks[size] = self._causal_mask(hidden)
        return {"attention_mask": self._masks[size], "position_embeddings": self.model.rotary_emb(hidden, positions)}

    def _causal_mask(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """``[1, 1, C, C]`` for eager attention; the other implementations are causal where they get none."""
        if self.model.config._attn_implementation != "eager":
            return None
        size = hidden.shape[1]
        least = torch.finfo(hidden.dtype).min
        return hidden.new_full((size, size), least).triu(1)[None, None]
