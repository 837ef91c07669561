"""Qwen2 or Qwen3 that reads a sequence in chunks and remembers through its memories alone.

The base model's parameters keep their names, so a plain Qwen folder loads. New parameters stand under
``memory.<layer>.`` with ``long_term_memory.`` or ``memory_gate.`` in their names. No keys or values pass from chunk to
chunk, and positions restart at 0 in each, so the base model never sees a position beyond a chunk's.

Legend: B samples, T tokens, C tokens of a chunk, P persistent tokens, d hidden size, V vocabulary, n kept columns, N
positions whose logits are kept.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel, Qwen2Config, Qwen2Model, Qwen3Config, Qwen3Model
from transformers.utils import ModelOutput, can_return_tuple

from verl_ext.models.qwen_titans.configuration import QwenTitansConfig
from verl_ext.models.qwen_titans.generation import require_right_padding
from verl_ext.models.qwen_titans.memory import Contribution, LongTermMemory, MemoryLayer, MemoryState, StreamState


class KeptPositions:
    """The positions that the head sees, chunk by chunk: no other hidden state outlives its chunk.

        wanted        . . . x | . . . . | . x x .        bool [B, T], C = 4
        kept of each  3       | none    | 9 10           columns that any row wants

    ``logits_to_keep`` is as in transformers: a number of last positions (0 for all), indices, or bool ``[B, T]``. The
    host reads a mask or indices once.
    """

    def __init__(self, logits_to_keep: int | torch.Tensor, length: int) -> None:
        self._requested, self._length = logits_to_keep, length
        self._columns: Sequence[int]
        if isinstance(logits_to_keep, int):
            self._columns = range(max(length - logits_to_keep, 0) if logits_to_keep else 0, length)
        elif logits_to_keep.dtype == torch.bool:
            self._columns = logits_to_keep.any(0).nonzero().flatten().tolist()
        else:
            self._columns = sorted({place % length for place in logits_to_keep.tolist()})

    def of_chunk(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """Take ``[B, n of this chunk, …]`` out of a chunk's ``values[B, C, …]``, whose first token is ``start``."""
        size = values.shape[1]
        columns = self._columns[bisect_left(self._columns, start) : bisect_left(self._columns, start + size)]
        if len(columns) == size:
            return values
        return values[:, torch.tensor([column - start for column in columns], dtype=torch.long, device=values.device)]

    def of_columns(self, values: torch.Tensor) -> torch.Tensor:
        """Take the requested ones of kept ``values[B, n, …]``: ``[B, n, …]``, or ``[N, …]`` in the order of a mask."""
        if isinstance(self._requested, int):
            return values
        columns = torch.tensor(self._columns, dtype=torch.long, device=values.device)
        if self._requested.dtype == torch.bool:
            return values[self._requested[:, columns]]
        return values[:, torch.searchsorted(columns, self._requested % self._length)]


class ChunkPass:
    """A pass through the parts of ``model`` (a Qwen2Model or Qwen3Model), chunk after chunk."""

    def __init__(self, model: Any, memory: nn.ModuleDict) -> None:
        self.model = model
        self.memory = memory
        self._masks: dict[int, torch.Tensor] = {}

    def __call__(
        self, input_ids: torch.Tensor, written: torch.Tensor | None, states: Sequence[MemoryState | None]
    ) -> tuple[torch.Tensor, list[MemoryState | None]]:
        """Return the last layer's output ``[B, C, d]`` for ``input_ids[B, C]``, and the states after the chunk."""
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
        """Return the layer's output ``[B, C, d]`` for the chunk inside ``persistent | m_0 h_0 m_1 h_1 …``."""
        assert given.persistent is not None
        count = given.persistent.shape[1]
        pairs = torch.stack([given.values.to(hidden.dtype), hidden], dim=2).flatten(1, 2)
        context = torch.cat([given.persistent.to(hidden.dtype), pairs], dim=1)
        first = torch.arange(count, device=hidden.device)
        own = torch.arange(hidden.shape[1], device=hidden.device).repeat_interleave(2)
        positions = torch.cat([first, count + own]).unsqueeze(0)
        return layer(context, **self._attention_arguments(context, positions))[:, count + 1 :: 2]

    def _attention_arguments(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        """Return a purely causal mask ``[1, 1, C, C]`` or None, and the positions' rotations."""
        size, mask = hidden.shape[1], None
        if self.model.config._attn_implementation == "eager":  # the others are causal without a mask
            if size not in self._masks:
                least = torch.finfo(hidden.dtype).min
                self._masks[size] = hidden.new_full((size, size), least).triu(1)[None, None]
            mask = self._masks[size]
        return {"attention_mask": mask, "position_embeddings": self.model.rotary_emb(hidden, positions)}


_BASE_MODELS = {Qwen2Config.model_type: Qwen2Model, Qwen3Config.model_type: Qwen3Model}


def is_memory_parameter(name: str) -> bool:
    """Tell whether a parameter of that name belongs to a memory rather than to the base model."""
    return "long_term_memory." in name or "memory_gate." in name


@dataclass
class QwenTitansOutput(ModelOutput):
    """The output of the model."""

    loss: torch.Tensor | None = None  # mean negative log-likelihood of the labels, if given
    logits: torch.Tensor | None = None  # [B, T, V], or those that ``logits_to_keep`` names
    memory_state: StreamState | None = None  # after the last token, if requested


class QwenTitansForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model; ``forward`` is its only entry, also for FSDP2."""

    config_class = QwenTitansConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Qwen2DecoderLayer", "Qwen3DecoderLayer"]  # noqa: RUF012 - transformers' own attribute
    _keys_to_ignore_on_load_missing = [r"long_term_memory\.", r"memory_gate\."]  # noqa: RUF012 - a plain Qwen has none
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: QwenTitansConfig) -> None:
        super().__init__(config)
        base = config.base_config
        options = config.memory_options
        self.model = _BASE_MODELS[base.model_type](base)
        self.memory = nn.ModuleDict(
            {str(layer): MemoryLayer(base.hidden_size, options, base.rms_norm_eps) for layer in options.layers or ()}
        )
        self.lm_head = nn.Linear(base.hidden_size, base.vocab_size, bias=False)
        self.options = options
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LongTermMemory | MemoryLayer):
            module.reset_parameters()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        memory_state: StreamState | None = None,
        return_memory_state: bool = False,
        **kwargs: Any,
    ) -> QwenTitansOutput:
        """Read ``input_ids`` chunk by chunk.

        Args:
            input_ids: ``[B, T]``; T need not be a multiple of the chunk size.
            attention_mask: ``[B, T]``, 0 for padding, which must stand on the right: causal attention then never
                shows it to a token. Padding writes nothing.
            labels: ``[B, T]`` as in transformers: position t is predicted from t - 1, -100 is ignored. The shift is
                over the whole sequence, so a chunk's first token is a target like any other.
            logits_to_keep: a number of last positions (0 for all), indices of positions, or bool ``[B, T]``, for logits
                ``[N, V]`` in row-major order. The head never sees the others.
            memory_state: the state to go on from, after whole chunks.
            return_memory_state: whether to return the state after the last token.
            kwargs: ``num_items_in_batch`` reaches the loss; others (position_ids, use_cache, …) have no effect.
        """
        kept = KeptPositions(logits_to_keep, input_ids.shape[1])
        hidden, states = self._read(input_ids, attention_mask, memory_state, kept)
        logits = self.lm_head(self.model.norm(kept.of_columns(hidden)))
        loss = None
        if labels is not None:
            following = F.pad(labels[:, 1:], (0, 1), value=-100)
            loss = self.loss_function(
                logits=logits,
                labels=None,
                vocab_size=self.config.vocab_size,
                shift_labels=kept.of_columns(kept.of_chunk(following, 0)).contiguous(),
                num_items_in_batch=kwargs.get("num_items_in_batch"),
            )
        read = (memory_state.tokens if memory_state else 0) + input_ids.shape[1]
        return QwenTitansOutput(loss, logits, StreamState(states, read) if return_memory_state else None)

    def _read(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        memory_state: StreamState | None,
        kept: KeptPositions,
    ) -> tuple[torch.Tensor, list[MemoryState | None]]:
        """Return the last layer's output ``[B, n, d]`` at the kept columns, before the final norm, and the states."""
        size = self.options.chunk_size
        if memory_state is not None and memory_state.tokens % size:
            must = f"memory_state must end at a multiple of model.memory.chunk_size ({size})"
            raise ValueError(f"{must}; got {memory_state.tokens} tokens")
        states: list[MemoryState | None] = list(memory_state or [None] * len(self.memory))
        chunks = input_ids.split(size, dim=1)
        masks = [None] * len(chunks) if attention_mask is None else attention_mask.bool().split(size, dim=1)
        chunk_pass = ChunkPass(self.model, self.memory)
        outputs = []
        every = self.options.bptt_chunks  # counted from the end, which has the losses
        for index, (chunk, mask) in enumerate(zip(chunks, masks, strict=True)):
            if every is not None and (len(chunks) - index) % every == 0:
                states = [state and state.detached() for state in states]
            hidden, states = chunk_pass(chunk, mask, states)
            outputs.append(kept.of_chunk(hidden, index * size))
        return torch.cat(outputs, dim=1), states

    def memory_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the memories' parameters by name, as ``state_dict`` has them."""
        return {name: tensor for name, tensor in self.state_dict().items() if is_memory_parameter(name)}

    def freeze_base(self) -> None:
        """Train the memories alone."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_memory_parameter(name))

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Enable it, but for the re-entrant form, which finds no gradient inside a state's tuple."""
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError("gradient_checkpointing_kwargs.use_reentrant must be False with model.memory; got True")
        super().gradient_checkpointing_enable({**(gradient_checkpointing_kwargs or {}), "use_reentrant": False})

    def prepare_inputs_for_generation(
        self, input_ids: Any, *args: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        """Take the whole sequence in each step: there is no cache of keys and values."""
        if attention_mask is not None:
            require_right_padding(attention_mask)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "logits_to_keep": 1}
