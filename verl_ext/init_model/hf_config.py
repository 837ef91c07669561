"""transformers' config of an architecture's fields, checked by building the model without weights."""

from collections.abc import Iterator
from typing import Any

from verl_ext.commands.errors import UsageError
from verl_ext.config.nearest import choice_problem, show
from verl_ext.init_model.architecture import Fields, config_class

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def hf_config(fields: Fields) -> Any:
    """The config of `fields`; `UsageError` with one line where no model can be built of it.

    The model is built once on the meta device, so that a mistake shows before anything long begins.
    """
    cls = config_class(fields["model_type"])
    sizes = _Sizes(fields, cls)
    if problems := list(sizes.problems()):
        raise UsageError("; ".join(problems))
    try:
        config = cls.from_dict(sizes.with_head_dim())
        meta_model(config)
    except Exception as error:  # transformers refuses in many ways, some of them several lines long
        must = f"config must be one that transformers can build a {cls.model_type} of"
        raise UsageError(f"{must}; {_reason(error)}") from error
    return config


def meta_model(config: Any) -> Any:
    """The model that `config` describes, without memory for its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _reason(error: Exception) -> str:
    """The last line of an exception: transformers puts the field first and the reason last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if len(lines) == 1 else lines[-1] if lines else type(error).__name__


class _Sizes:
    """The sizes among an architecture's fields, its config class's defaults where they are left out."""

    def __init__(self, fields: Fields, cls: Any) -> None:
        self.fields = fields
        self.cls = cls

    def named(self, name: str) -> tuple[str, Any]:
        """The dotted key of a size, under the architecture's own name for it, and its value."""
        own = self.cls.attribute_map.get(name, name)
        return f"config.{own}", self.fields.get(own, getattr(self.cls, own, None))

    def with_head_dim(self) -> Fields:
        """The fields, with the head_dim that follows from the others where it does."""
        if not hasattr(self.cls, "head_dim") or self.named("head_dim")[1] is not None:
            return self.fields
        return {**self.fields, "head_dim": self.named("hidden_size")[1] // self.named("num_attention_heads")[1]}

    def problems(self) -> Iterator[str]:
        """One line for every size that is none, or that does not divide into heads."""
        found = False
        for key, value in map(self.named, _SIZES):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                found = True
                yield f"{key} must be a whole number of at least 1; got {show(value)}"
        if not found:
            yield from self._head_problems()
        activation = "config.hidden_act", self.fields.get("hidden_act")
        if activation[1] is not None:
            from transformers.activations import ACT2FN

            yield from filter(None, [choice_problem(*activation, ACT2FN)])

    def _head_problems(self) -> Iterator[str]:
        (size_key, size), (heads_key, heads) = self.named("hidden_size"), self.named("num_attention_heads")
        (kv_key, kv_heads), (dim_key, head_dim) = self.named("num_key_value_heads"), self.named("head_dim")
        if heads and size and head_dim is None and size % heads:
            yield f"{size_key} must be divisible by {heads_key} ({heads}); got {size}"
        if heads and kv_heads and heads % kv_heads:
            yield f"{heads_key} must be divisible by {kv_key} ({kv_heads}); got {heads}"
        rotated = head_dim or (size // heads if heads and size else 0)
        if hasattr(self.cls, "rope_parameters") and rotated % 2:
            yield f"{dim_key} must be even for rotary positions; got {rotated}"
