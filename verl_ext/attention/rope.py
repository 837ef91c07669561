"""Rotary embeddings whose frequencies depend on documents' lengths, for each by itself.

transformers chooses frequencies in every forward by the largest position that it is given: ``dynamic`` scaling grows
with each length beyond the model's own, and ``longrope`` (Phi-3, Phi-4-mini) changes to a second set of frequencies
beyond ``original_max_position_embeddings``. In a pack, the longest document would decide for its neighbours; under
Ulysses, each rank would decide for its own slice of a document.

Legend: T tokens of a micro-batch with padding, n the sequence-parallel size.
"""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from verl_ext.parallel.shards import DocumentLayout, SequenceShards, pieces, pinned


def same_frequencies_up_to(config: Any, layer_type: str | None = None) -> int | None:
    """Return the length up to which rotary frequencies agree; None: always.

    layer_type is one of the text config's layer types, if it has ``rope_parameters`` for each of them.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope = rope if layer_type is None else rope[layer_type]
    rope_type = rope.get("rope_type", rope.get("type")) or ""
    if rope_type == "longrope":
        return rope.get("original_max_position_embeddings", config.max_position_embeddings)
    return config.max_position_embeddings if "dynamic" in rope_type else None


def same_frequencies_in_all_layers_up_to(config: Any) -> int | None:
    """Return the least of :func:`same_frequencies_up_to` over layer types."""
    rope = getattr(config, "rope_parameters", None) or {}
    layer_types = [name for name, of_type in rope.items() if isinstance(of_type, dict)] or [None]
    limits = (same_frequencies_up_to(config, layer_type) for layer_type in layer_types)
    return min((limit for limit in limits if limit is not None), default=None)


def restore_rope_precision(model: Any) -> None:
    """Compute the frequencies of rotary embeddings again in fp32, in place.

    verl casts a whole model to `engine.model_dtype`, its frequencies included. transformers never does: in bfloat16 a
    frequency has three digits, so that an angle at position 1,000 is off by up to two radians.
    """
    for module in model.modules():
        inv_freqs = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        if all(getattr(module, name).dtype == torch.float32 for name in inv_freqs):
            continue
        with torch.device("cpu"):
            fresh = type(module)(module.config)
        for name in inv_freqs:
            module.register_buffer(name, getattr(fresh, name).to(getattr(module, name).device), persistent=False)


def choose_rope_by_document(model: Any, shards: SequenceShards | None = None) -> None:
    """Replace, in place, rotary embeddings that depend on documents' lengths.

    Their parent modules must be called with the keyword argument ``document_layout``, as attention layers are. Without
    shards this rank holds all of a pack. Raises ValueError if the config has such frequencies, and no module is a
    rotary embedding as transformers writes them.
    """
    has_replaced = False
    for parent in list(model.modules()):
        for name, rotary in list(parent.named_children()):
            types = getattr(rotary, "rope_type", None)
            layer_types = types if isinstance(types, dict) else [None] if types else []
            if any(same_frequencies_up_to(rotary.config, layer_type) is not None for layer_type in layer_types):
                has_replaced = True
                by_document = DocumentRope(rotary, shards or SequenceShards())
                setattr(parent, name, by_document)
                parent.register_forward_pre_hook(by_document.set_layout, with_kwargs=True)
    if not has_replaced and same_frequencies_up_to(model.config.get_text_config()) is not None:
        raise ValueError(
            f"model.path: {type(model).__name__} has rotary frequencies that depend on a document's length, and must "
            "compute them in a rotary embedding as transformers writes them; it has none"
        )


class DocumentRope(torch.nn.Module):
    """A rotary embedding, called once per run of equal frequencies.

    transformers chooses the frequencies by reading the largest position, for which the host would wait on a GPU. Here a
    rotary embedding that stays on the host chooses them.
    """

    def __init__(self, rotary: Any, shards: SequenceShards) -> None:
        super().__init__()
        self.rotary: Any = rotary
        with torch.device("cpu"):
            self.on_host = (type(rotary)(rotary.config),)  # in a tuple: no module that moves with this one
        self.shards = shards
        self.layout: DocumentLayout | None = None

    def set_layout(self, parent: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Take the parent's layout of all T tokens; None for rows."""
        self.layout = kwargs.get("document_layout")

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        """Return the embedding of ``position_ids[1, T/n]``, one tensor or several."""
        kwargs = {} if layer_type is None else {"layer_type": layer_type}
        limit = same_frequencies_up_to(self.rotary.config, layer_type)
        if self.layout is None or limit is None:
            return _copied(self.rotary)(x, position_ids, **kwargs)
        parts = []
        for start, end, length in self._runs(self.layout, limit):
            rotary = _copied(self.on_host[0])
            rotary(torch.empty(0), torch.tensor([[length - 1]]), **kwargs)  # keeps its frequencies in buffers
            for name, buffer in rotary._buffers.items():
                rotary._buffers[name] = pinned(buffer, x.device).to(x.device, non_blocking=True)
            # PhiMoE's rotary embedding chooses again by the largest position, so it gets a document's last one too.
            positions = torch.nn.functional.pad(position_ids[:, start:end], (0, 1), value=length - 1)
            parts.append(inspect.unwrap(type(rotary).forward)(rotary, x, positions, **kwargs))
        if isinstance(parts[0], torch.Tensor):
            return torch.cat([part[:, :-1] for part in parts], dim=1)
        return tuple(torch.cat([part[:, :-1] for part in column], dim=1) for column in zip(*parts, strict=True))

    def _runs(self, layout: DocumentLayout, limit: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, end, length that chooses frequencies) of this rank's runs."""
        begin, end, chosen = 0, 0, 0
        for span in self.shards.spans(layout.offsets[-1]):
            for document, first, last in pieces(layout.offsets, *span):
                length = max(layout.offsets[document + 1] - layout.offsets[document], limit)
                if length != chosen:
                    if end > begin:
                        yield begin, end, chosen
                    begin, chosen = end, length
                end += last - first
        yield begin, end, chosen


def _copied(rotary: Any) -> Any:
    """Copy a module without its tensors, for frequencies chosen inside."""
    copied = copy.copy(rotary)
    copied._buffers = dict(rotary._buffers)
    return copied
