"""The architecture: a preset or a config.json, with the user's keys over it, as transformers' config.

A preset is a file of `presets/`: the keys of a config.json, in YAML, without what the tokenizer gives.

transformers' config of an architecture's fields, checked by building the model without weights.
"""

import json
import os
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.values import UsageError, choice_problem, first_line, nearest_name, show

Fields = dict[str, Any]
_PRESETS = resources.files("verl_ext.commands.init_model").joinpath("presets")
PRESETS = tuple(sorted(file.name.removesuffix(".yaml") for file in _PRESETS.iterdir() if file.name.endswith(".yaml")))
# Of a config.json, but not of a model that has yet to be trained in full precision.
_NOT_TAKEN = ("architectures", "dtype", "torch_dtype", "quantization_config", "transformers_version", "_name_or_path")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_preset(model: str) -> bool:
    """Whether `model` names a preset; a folder of the same name is reached as ./NAME."""
    return model in PRESETS


def architecture_problem(model: str) -> str | None:
    """One line where `model` is neither a preset nor a config.json nor a folder with one."""
    if is_preset(model) or os.path.isfile(_config_file(model)):
        return None
    if os.path.isdir(model):
        return f"model must be a folder with a config.json; got {model}, which has none"
    return choice_problem("model", model, [*PRESETS, "a config.json or a folder with one"])


def read_architecture(model: str) -> Fields:
    """The fields of a preset or of a config.json; `UsageError` where that is none."""
    if is_preset(model):
        text = _PRESETS.joinpath(f"{model}.yaml").read_text(encoding="utf-8")
        preset: Any = OmegaConf.to_container(OmegaConf.create(text))
        return preset
    file = _config_file(model)
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"model must hold a config.json that can be read; got {file}: {first_line(error)}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise UsageError(f"model must be a config.json with a model_type; got {file}, which has none")
    return {key: value for key, value in fields.items() if key not in (*_NOT_TAKEN, *TOKEN_IDS)}


def _config_file(model: str) -> Path:
    path = Path(model).expanduser()
    return path / "config.json" if path.is_dir() else path


def changed(fields: Fields, changes: Mapping[str, Any]) -> Fields:
    """`fields` with `changes` (the option `config`) over them, under the architecture's own names for its keys.

    What followed from a size follows from the changed one: head_dim = hidden_size / num_attention_heads, and the
    layer_types of layers that are all alike. Raises `UsageError` for a key that the architecture lacks.
    """
    cls = config_class(fields["model_type"])
    names = cls.attribute_map
    for key in changes:
        if problem := _key_problem(key, _known_keys(cls) | fields.keys(), cls.model_type):
            raise UsageError(problem)
    own = {names.get(key, key): value for key, value in changes.items()}
    fields = {names.get(key, key): value for key, value in fields.items()}
    if own.keys() & {"hidden_size", "num_attention_heads"} and _head_dim_follows(fields):
        fields["head_dim"] = None
    if "num_hidden_layers" in own and len(set(fields.get("layer_types") or ())) == 1:
        del fields["layer_types"]
    if "rope_theta" in own and "rope_parameters" in fields:
        own["rope_parameters"] = {"rope_theta": own.pop("rope_theta"), **own.get("rope_parameters", {})}
    return _merged(fields, own)


def _known_keys(cls: Any) -> set[str]:
    keys = {key for key in cls.__dataclass_fields__ if not key.startswith("_")} | cls.attribute_map.keys()
    return keys | ({"rope_theta"} if "rope_parameters" in keys else set())


def _key_problem(key: str, known: set[str], model_type: str) -> str | None:
    if key in known:
        return None
    nearest = nearest_name(key, sorted(known))
    return f"unknown key config.{key} of {model_type}" + (f"; nearest: config.{nearest}" if nearest else "")


def _head_dim_follows(fields: Fields) -> bool:
    heads, head_dim = fields.get("num_attention_heads"), fields.get("head_dim")
    return heads is not None and head_dim is not None and heads * head_dim == fields.get("hidden_size")


def _merged(fields: Fields, changes: Mapping[str, Any]) -> Fields:
    merged = dict(fields)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def config_class(model_type: str) -> Any:
    """transformers' config class of a causal language model; `UsageError` where it has none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if model_type in CAUSAL:
        return CONFIG_MAPPING[model_type]
    nearest = nearest_name(model_type, CAUSAL)
    hint = f" (nearest: {nearest})" if nearest else ""
    raise UsageError(f"model must be a causal language model that transformers has; got model_type {model_type}{hint}")


def fitted(fields: Fields, num_tokens: int, token_ids: Mapping[str, int | None]) -> Fields:
    """`fields` for a tokenizer of `num_tokens` with these ids (`TOKEN_IDS`; absent: none).

    A vocab_size of the fields stays where it is larger, as published models pad theirs; null or absent, it becomes
    `num_tokens`. Raises `UsageError` where it is smaller.
    """
    vocab_size = fields.get("vocab_size") or num_tokens
    if isinstance(vocab_size, int) and vocab_size < num_tokens:
        must = f"config.vocab_size must be at least the tokenizer's {num_tokens:,}, or null for as many"
        raise UsageError(f"{must}; got {vocab_size:,}")
    return {**fields, "vocab_size": vocab_size, **{name: token_ids.get(name) for name in TOKEN_IDS}}


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
