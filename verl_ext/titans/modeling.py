"""Qwen2 or Qwen3 that reads chunks and remembers by memories alone.

The base model's parameters keep their names, so a plain Qwen folder loads. The names of new parameters begin with
``memory.<layer>.long_term_memory.`` or ``memory.<layer>.memory_gate.``. No keys or values pass from chunk to chunk, and
positions restart at 0 in each, so the base model never sees a position beyond a chunk's.

Legend: B samples, T tokens, C tokens of a chunk, d hidden size, V vocabulary, n kept columns, N positions whose logits
are kept.
"""

import inspect
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel, Qwen2Config, Qwen2Model, Qwen3Config, Qwen3Model
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList
from transformers.utils import ModelOutput, can_return_tuple

from verl_ext.options import must
from verl_ext.titans.configuration import QwenTitansConfig
from verl_ext.titans.memory import LongTermMemory, MemoryLayer
from verl_ext.titans.stream import ChunkKeys, ChunkPart, StreamCache


class HeadPositions:
    """The positions that the head sees; only they outlive their chunk.

        wanted        . . . x | . . . . | . x x .        bool [B, T], C = 4
        kept of each  3       | none    | 9 10           columns that any row wants

    ``logits_to_keep`` is as in transformers: a number of last positions (0 for all), indices, or bool ``[B, T]``. The
    host reads a mask or indices once.
    """

    def __init__(self, logits_to_keep: int | torch.Tensor, length: int) -> None:
        self._requested, self._length = logits_to_keep, length
        self.columns: Sequence[int]
        if isinstance(logits_to_keep, int):
            self.columns = range(max(length - logits_to_keep, 0) if logits_to_keep else 0, length)
        elif logits_to_keep.dtype == torch.bool:
            self.columns = logits_to_keep.any(0).nonzero().flatten().tolist()
        else:
            self.columns = sorted({place % length for place in logits_to_keep.tolist()})

    def in_chunk(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """Return the kept columns of a chunk ``[B, C, …]`` from ``start``."""
        size = values.shape[1]
        columns = self.columns[bisect_left(self.columns, start) : bisect_left(self.columns, start + size)]
        if len(columns) == size:
            return values
        return values[:, torch.tensor([column - start for column in columns], dtype=torch.long, device=values.device)]

    def requested(self, values: torch.Tensor) -> torch.Tensor:
        """Return requested positions ``[B, n, …]``, or ``[N, …]`` for a mask."""
        if isinstance(self._requested, int):
            return values
        columns = torch.tensor(self.columns, dtype=torch.long, device=values.device)
        if self._requested.dtype == torch.bool:
            return values[self._requested[:, columns]]
        return values[:, torch.searchsorted(columns, self._requested % self._length)]


class ChunkPass:
    """A pass through a Qwen2Model or Qwen3Model, chunk after chunk."""

    def __init__(self, model: Any, memory: nn.ModuleDict, cache: StreamCache) -> None:
        self.model, self.memory, self.cache = model, memory, cache
        self._masks: dict[int, torch.Tensor] = {}
        named = inspect.signature(type(model.layers[0]).forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"  # until transformers 5.23

    def __call__(self, input_ids: torch.Tensor, place: ChunkPart) -> torch.Tensor:
        """Return the last layer's output ``[B, w, d]``; update the cache's memories."""
        hidden = self.model.embed_tokens(input_ids)
        columns = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)  # [1, w]
        if place.is_resumed:
            assert place.start is not None
            columns = place.start[:, None] + columns
        config = self.model.config
        implementation = config._attn_implementation
        if place.is_resumed and implementation != "eager":  # flash kernels do not take its mask of places
            config._attn_implementation = "sdpa"
        try:
            arguments = self._attention_arguments(hidden, columns, place)
            for index, layer in enumerate(self.model.layers):
                output = layer(hidden, **arguments)
                if str(index) in self.memory:
                    recalled = self.cache.memories[str(index)](self.memory[str(index)], hidden, place)
                    output = output + recalled.to(output.dtype)
                hidden = output
        finally:
            config._attn_implementation = implementation
        return hidden

    def _attention_arguments(self, hidden: torch.Tensor, columns: torch.Tensor, place: ChunkPart) -> dict[str, Any]:
        """Return a layer's mask (None: causal without), rotations and store of keys.

        ``columns``, ``[B or 1, n]``, are the places of these tokens in their chunk.
        """
        size, top, mask = hidden.shape[1], place.top, None
        arguments = {"position_embeddings": self.model.rotary_emb(hidden, columns)}
        if place.keeps_keys or place.is_resumed:
            arguments[self._cache_name] = ChunkKeys(self.cache.keys, columns, top, place.is_resumed)
        eager = self.model.config._attn_implementation == "eager"
        if place.is_resumed:
            mask = (torch.arange(top, device=hidden.device) <= columns[..., None])[:, None]  # [B, 1, n, top]
            if eager:
                mask = hidden.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(hidden.dtype).min)
        elif eager:  # the others are causal without a mask
            if size not in self._masks:
                least = torch.finfo(hidden.dtype).min
                self._masks[size] = hidden.new_full((size, size), least).triu(1)[None, None]
            mask = self._masks[size]
        return {**arguments, "attention_mask": mask}


_BASE_MODELS = {Qwen2Config.model_type: Qwen2Model, Qwen3Config.model_type: Qwen3Model}


def is_memory_parameter(name: str) -> bool:
    """Tell whether a parameter of that name belongs to a memory."""
    return any(f"{part}." in name for part in ("long_term_memory", "memory_gate"))


@dataclass
class QwenTitansOutput(ModelOutput):
    """The output of the model."""

    loss: torch.Tensor | None = None  # mean negative log-likelihood of the labels, if given
    logits: torch.Tensor | None = None  # [B, T, V], or those that ``logits_to_keep`` names
    if hasattr(ModelOutput, "past_key_values"):  # from transformers 5.24 on, another name of this field
        cache: StreamCache | None = None  # after the last token, if requested
    else:
        past_key_values: StreamCache | None = None


class QwenTitansForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model; ``forward`` is its only entry, also for FSDP2."""

    config_class = QwenTitansConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Qwen2DecoderLayer", "Qwen3DecoderLayer"]  # noqa: RUF012 - transformers' own attribute
    _keys_to_ignore_on_load_missing = [r"^memory\."]  # noqa: RUF012 - a plain Qwen has none
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _is_stateful = True  # tells transformers that the cache cannot go back

    # The ranks of a sharded model agree on the largest number of passes.
    agree_passes: Callable[[int], int] = staticmethod(lambda passes: passes)

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
        past_key_values: StreamCache | None = None,
        use_cache: bool | None = None,
        cache: StreamCache | None = None,
        **kwargs: Any,
    ) -> QwenTitansOutput:
        """Read ``input_ids`` chunk by chunk.

        Args:
            input_ids: ``[B, T]``; T need not be a multiple of the chunk size.
            attention_mask: ``[B, T]``, 0 for padding, which writes nothing. Without a cache it must stand on the right:
                causal attention then never shows it to a token. With one, columns before these T are left out.
            labels: ``[B, T]`` as in transformers: position t is predicted from t - 1, -100 is ignored. The shift is
                over the whole sequence, so a chunk's first token is a target like any other.
            logits_to_keep: a number of last positions (0 for all), indices of positions, or bool ``[B, T]``, for logits
                ``[N, V]`` in row-major order. The head never sees the others.
            past_key_values: the cache to continue from, which this method updates; `cache` in transformers 5.24.
            use_cache: whether to return a cache after the last token; a given cache is always returned. Gradients then
                flow back through all chunks of a call.
            cache: as `past_key_values`.
            kwargs: ``num_items_in_batch`` reaches the loss; others (position_ids, …) have no effect.
        """
        positions = HeadPositions(logits_to_keep, input_ids.shape[1])
        given = cache or past_key_values
        cached = use_cache or given is not None
        if cached and self.training and self.is_gradient_checkpointing:
            raise ValueError(must("use_cache", "be False while gradient checkpointing recomputes layers", "a cache"))
        cache = given or StreamCache(self.memory)
        # Chunks without a cache need no places of rows: all of them begin and end together.
        read = self._read_with_cache if cached else self._read_chunks
        hidden = read(input_ids, attention_mask, cache, positions)
        # The head sees the requested positions alone, because logits of all take more memory than the chunks.
        logits = self.lm_head(self.model.norm(positions.requested(hidden)))
        loss = None
        if labels is not None:
            following = positions.in_chunk(F.pad(labels[:, 1:], (0, 1), value=-100), 0)
            shift_labels, items = positions.requested(following).contiguous(), kwargs.get("num_items_in_batch")
            loss = self.loss_function(logits, None, self.config.vocab_size, items, shift_labels=shift_labels)
        return QwenTitansOutput(loss, logits, cache if cached else None)

    def _read_chunks(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: StreamCache, positions: HeadPositions
    ) -> torch.Tensor:
        """Return the last layer's output ``[B, n, d]`` at kept columns, unnormed."""
        if attention_mask is not None and (attention_mask[:, 1:] > attention_mask[:, :-1]).any():
            needed = "have padding on the right alone without a cache"
            raise ValueError(must("attention_mask", needed, "some before text"))
        size = self.options.chunk_size
        chunks = input_ids.split(size, dim=1)
        masks = [None] * len(chunks) if attention_mask is None else attention_mask.bool().split(size, dim=1)
        chunk_pass = ChunkPass(self.model, self.memory, cache)
        outputs = []
        every = self.options.bptt_chunks  # counted from the end, where the losses are
        for index, (chunk, mask) in enumerate(zip(chunks, masks, strict=True)):
            if every is not None and (len(chunks) - index) % every == 0:
                cache.detach()
            outputs.append(positions.in_chunk(chunk_pass(chunk, ChunkPart(mask)), index * size))
        return torch.cat(outputs, dim=1)

    def _read_with_cache(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: StreamCache, positions: HeadPositions
    ) -> torch.Tensor:
        """Read as `_read_chunks` for rows within their chunks, padded anywhere.

        A column of padding has the output of the last token before it, or 0.
        """
        length = input_ids.shape[1]
        mask = (torch.ones_like(input_ids) if attention_mask is None else attention_mask)[:, -length:].bool()
        columns = torch.tensor(positions.columns, dtype=torch.long, device=mask.device)
        number = (mask.cumsum(1) - 1)[:, columns]  # [B, n]
        chunk_pass = ChunkPass(self.model, self.memory, cache)
        output: Any = 0.0
        for done, columns, place in cache.passes(mask, self.options.chunk_size, self.agree_passes):
            hidden = chunk_pass(input_ids.gather(1, columns), place)
            assert place.tokens is not None
            index = number - done[:, None]
            is_read = ((index >= 0) & (index < place.tokens[:, None])).unsqueeze(-1)
            index = index.clamp(0, hidden.shape[1] - 1).unsqueeze(-1).expand(*index.shape, hidden.shape[-1])
            output = torch.where(is_read, hidden.gather(1, index), output)
        return output

    def memory_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the memories' parameters by name, as ``state_dict`` has them."""
        return {name: tensor for name, tensor in self.state_dict().items() if is_memory_parameter(name)}

    def freeze_base(self) -> None:
        """Train the memories alone."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_memory_parameter(name))

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Enable gradient checkpointing. Raises ValueError for the re-entrant form."""
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(must("gradient_checkpointing_kwargs.use_reentrant", "be False with model.memory", "True"))
        super().gradient_checkpointing_enable({**(gradient_checkpointing_kwargs or {}), "use_reentrant": False})

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward makes a StreamCache

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        """Return transformers' criteria without their warning of too few positions."""
        criteria = super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]  # transformers' own self
        for criterion in criteria:
            if isinstance(criterion, MaxLengthCriteria):
                criterion.max_position_embeddings = None
        return criteria

    def prepare_inputs_for_generation(  # type: ignore[override]  # no embeddings in place of tokens
        self,
        input_ids: Any,
        next_sequence_length: int | None = None,
        past_key_values: StreamCache | None = None,
        attention_mask: Any = None,
        use_cache: bool = True,
        cache: StreamCache | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return a step's inputs: unread tokens, or all without `use_cache`."""
        if next_sequence_length is not None:
            input_ids = input_ids[:, -next_sequence_length:]
        given = (cache or past_key_values) if use_cache else None
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": given}
        return {**inputs, "use_cache": True, "logits_to_keep": 1}
