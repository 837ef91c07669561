"""A new model's config, from a preset or file, and weights.

A preset is a YAML file in `presets/` with the keys of a config.json, except for those that the tokenizer determines.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.values import UsageError, choice_problem, first_line, nearest_hint, unknown

Fields = dict[str, Any]
_PRESETS = resources.files("verl_ext.tools.init_model").joinpath("presets")
PRESETS = tuple(sorted(file.name.removesuffix(".yaml") for file in _PRESETS.iterdir() if file.name.endswith(".yaml")))
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of a config.json that do not suit a new model, which is trained in full precision.
_NOT_TAKEN = ("architectures", "dtype", "torch_dtype", "quantization_config", "transformers_version", "_name_or_path")
_HEAD_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_OTHER_SIZES = ("vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")


def model_problem(model: str) -> str | None:
    """Return one line if `model` names no preset, config.json or folder.

    ./NAME is a folder even if a preset has that name. A folder must hold a config.json.
    """
    if model in PRESETS or os.path.isfile(_config_file(model)):
        return None
    if os.path.isdir(model):
        return f"model must be a folder with a config.json; got {model}, which has none"
    return choice_problem("model", model, [*PRESETS, "a config.json or a folder with one"])


def read_fields(model: str) -> Fields:
    """Return the fields of a preset or config.json; else raise UsageError."""
    if model in PRESETS:
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
    """Return `fields` with `changes`, under the architecture's own names.

    If head_dim was hidden_size / num_attention_heads, or all layer_types were equal, they follow the changed sizes.
    Raises UsageError for a key that the architecture lacks.
    """
    cls = config_class(fields["model_type"])
    names = cls.attribute_map
    known = {key for key in cls.__dataclass_fields__ if not key.startswith("_")} | names.keys() | fields.keys()
    known |= {"rope_theta"} if "rope_parameters" in known else set()
    for key in sorted(changes.keys() - known):
        raise UsageError(unknown(key, sorted(known), node="config", owner=cls.model_type))
    own = {names.get(key, key): value for key, value in changes.items()}
    fields = {names.get(key, key): value for key, value in fields.items()}
    heads, head_dim = fields.get("num_attention_heads") or 0, fields.get("head_dim") or 0
    if own.keys() & {"hidden_size", "num_attention_heads"} and heads * head_dim == fields.get("hidden_size"):
        fields["head_dim"] = None
    if "num_hidden_layers" in own and len(set(fields.get("layer_types") or ())) == 1:
        del fields["layer_types"]
    if "rope_theta" in own and "rope_parameters" in fields:
        own["rope_parameters"] = {"rope_theta": own.pop("rope_theta"), **own.get("rope_parameters", {})}
    merged: Any = OmegaConf.to_container(OmegaConf.merge(fields, own))
    return merged


def fitted(fields: Fields, num_tokens: int, token_ids: Mapping[str, int | None]) -> Fields:
    """Adapt `fields` to a tokenizer's size and `TOKEN_IDS` (absent: none).

    A larger vocab_size stays, because published models pad theirs; null or absent becomes `num_tokens`. Raises
    UsageError if it is smaller.
    """
    vocab_size = fields.get("vocab_size") or num_tokens
    if isinstance(vocab_size, int) and vocab_size < num_tokens:
        must = f"config.vocab_size must be at least the tokenizer's {num_tokens:,}, or null for as many"
        raise UsageError(f"{must}; got {vocab_size:,}")
    return {**fields, "vocab_size": vocab_size, **{name: token_ids.get(name) for name in TOKEN_IDS}}


def config_class(model_type: str) -> Any:
    """Return the config class of a causal LM, or raise UsageError."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if model_type in CAUSAL:
        return CONFIG_MAPPING[model_type]
    got = f"{model_type}{nearest_hint(model_type, CAUSAL)}"
    raise UsageError(f"model must be a causal language model that transformers has; got model_type {got}")


def hf_config(fields: Fields) -> Any:
    """Build a config from `fields`; raise UsageError if none works."""
    cls = config_class(fields["model_type"])
    if problems := list(filter(None, _problems(fields, cls))):
        raise UsageError("; ".join(problems))
    try:
        if hasattr(cls, "head_dim") and _value(fields, cls, "head_dim") is None:
            size, heads = (_value(fields, cls, name) for name in ("hidden_size", "num_attention_heads"))
            fields = {**fields, "head_dim": size // heads}
        config = cls.from_dict(fields)
        meta_model(config)
    except Exception as error:  # transformers has many errors, some of several lines: the field, then the reason
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if len(lines) > 1 else ": ".join([type(error).__name__, *lines])
        raise UsageError(f"config must be one that transformers can build a {cls.model_type} of; {reason}") from error
    return config


def _value(fields: Fields, cls: Any, name: str) -> Any:
    """Return a field's value by its own name, or the default."""
    own = cls.attribute_map.get(name, name)
    return fields.get(own, getattr(cls, own, None))


def _problems(fields: Fields, cls: Any) -> Iterator[str | None]:
    """Yield a line for each value that makes a broken model."""
    from transformers.activations import ACT2FN

    keys = {name: f"config.{cls.attribute_map.get(name, name)}" for name in (*_HEAD_SIZES, *_OTHER_SIZES)}
    values = {name: _value(fields, cls, name) for name in keys}
    small = [name for name, value in values.items() if isinstance(value, int) and value < 1]
    yield from (f"{keys[name]} must be at least 1; got {values[name]}" for name in small)
    size, heads, kv_heads, head_dim = (values[name] for name in _HEAD_SIZES)
    size_key, heads_key, kv_key, dim_key = (keys[name] for name in _HEAD_SIZES)
    if not small and isinstance(size, int) and isinstance(heads, int):
        if head_dim is None and size % heads:
            yield f"{size_key} must be divisible by {heads_key} ({heads}); got {size}"
        if isinstance(kv_heads, int) and heads % kv_heads:
            yield f"{heads_key} must be divisible by {kv_key} ({kv_heads}); got {heads}"
        rotated = size // heads if head_dim is None else head_dim
        if hasattr(cls, "rope_parameters") and isinstance(rotated, int) and rotated % 2:
            yield f"{dim_key} must be even for rotary positions; got {rotated}"
    spread = fields.get("initializer_range")
    if isinstance(spread, int | float) and not 0 <= spread < math.inf:
        yield f"config.initializer_range must be at least 0 and finite; got {spread}"
    if fields.get("hidden_act") is not None:
        yield choice_problem("config.hidden_act", fields["hidden_act"], ACT2FN)


def meta_model(config: Any) -> Any:
    """Build the model of `config` without memory for its weights."""
    import torch  # slow to import, here and below, so only after the checks
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def random_model(config: Any, seed: int, dtype: str) -> Any:
    """Return the model on the CPU, with the architecture's own initialization.

    The weights depend on the config and the seed, not on `dtype`; bfloat16 weights are the rounded float32 weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if config.model_type == "gpt2":
            # GPT-2's layers write to the residual stream with a standard deviation of initializer_range / √(2·layers)
            # (https://openai.com/blog/better-language-models); transformers intends this but finds no such parameter.
            for name, weight in model.named_parameters():
                if name.endswith("c_proj.weight"):
                    torch.nn.init.normal_(weight, std=config.initializer_range / math.sqrt(2 * config.n_layer))
    return model.to(getattr(torch, dtype))


def check_memory(parameters: int, dtype: str) -> None:
    """Raise UsageError unless the weights fit into free memory."""
    from verl_ext.engines.activations import available_memory

    needed, available = parameters * (4 if dtype == "float32" else 6), available_memory()  # drawn in float32
    if needed > available:
        raise UsageError(
            f"config must make a model that fits into memory: {parameters:,} parameters need {needed / 2**30:,.1f} GiB "
            f"with dtype={dtype}; got {available / 2**30:,.1f} GiB. Lower config.hidden_size, config.num_hidden_layers "
            "or config.vocab_size"
        )


def count_parameters(model: Any) -> tuple[int, int]:
    """Count parameters, tied ones once: all, and outside embeddings and head."""
    head = model.get_output_embeddings()
    own_head = 0 if head is None or head.weight is model.get_input_embeddings().weight else head.weight.numel()
    return model.num_parameters(), model.num_parameters(exclude_embeddings=True) - own_head
