"""A new model: its config, from a preset or file, and weights.

A preset is a YAML file in `presets/` with the keys of a config.json, except for those that the tokenizer determines.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.options import UsageError, first_line, leaves, must, nearest_hint, spell, unknown

PRESETS = {file.stem: file for file in sorted(Path(__file__).with_name("presets").glob("*.yaml"))}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of a config.json that do not suit a new model, which is trained in full precision.
_NOT_TAKEN = ("architectures", "dtype", "torch_dtype", "quantization_config", "transformers_version", "_name_or_path")
_SIZES = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
)


def config_file(model: str) -> Path:
    """Return the file of a preset, folder or path (./NAME: a folder)."""
    path = PRESETS.get(model) or Path(model).expanduser()
    return path / "config.json" if path.is_dir() else path


def _read_fields(model: str) -> dict[str, Any]:
    file = config_file(model)
    try:
        text = file.read_text(encoding="utf-8")
        fields: Any = OmegaConf.to_container(OmegaConf.create(text)) if model in PRESETS else json.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"model must hold a config.json that can be read; got {file}: {first_line(error)}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise UsageError(must("model", "be a config.json with a model_type", f"{file}, which has none"))
    return {key: value for key, value in fields.items() if key not in (*_NOT_TAKEN, *TOKEN_IDS)}


def meta_model(model: str, changes: Mapping[str, Any], dtype: str, num_tokens: int, **token_ids: int | None) -> Any:
    """Return the model without memory for its weights.

    - model, changes, dtype: the options; changes is `config`
    - num_tokens: the tokens of the tokenizer; a larger vocab_size stays, because published models pad theirs
    - token_ids: those of the tokenizer, by the names of `TOKEN_IDS`

    Raises UsageError with one line for a key that the architecture lacks, and for a config that allows no model.
    """
    import torch  # slow to import, like transformers, so only after the checks of options
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    fields = _read_fields(model)
    if (kind := fields["model_type"]) not in CAUSAL:
        got = f"model_type {kind}{nearest_hint(kind, CAUSAL)}"
        raise UsageError(must("model", "be a causal language model that transformers has", got))
    # transformers takes an unknown key without a word, and a rope_theta beside rope_parameters without effect.
    cls = CONFIG_MAPPING[kind]
    known = {*cls.__dataclass_fields__, *cls.attribute_map, *fields}
    known |= {"rope_theta"} if "rope_parameters" in known else set()
    for key in sorted(changes.keys() - known):
        raise UsageError(unknown(key, sorted(known), node="config", owner=kind))
    try:
        fields, new = ({cls.attribute_map.get(key, key): each[key] for key in each} for each in (fields, changes))
        if "rope_theta" in new and "rope_parameters" in fields:
            new["rope_parameters"] = {"rope_theta": new.pop("rope_theta"), **new.get("rope_parameters", {})}
        merged: Any = OmegaConf.to_container(OmegaConf.merge(fields, new))
        # What followed from the sizes before follows the changed ones.
        heads, head_dim = fields.get("num_attention_heads") or 0, fields.get("head_dim") or 0
        if "head_dim" not in new and heads and heads * head_dim == fields.get("hidden_size"):
            size, heads = merged["hidden_size"], merged["num_attention_heads"]
            merged["head_dim"] = size / heads if size % heads else size // heads  # transformers refuses a fraction
        types = fields.get("layer_types") or ()
        if len(set(types)) == 1 and "layer_types" not in new:
            merged["layer_types"] = types[:1] * merged.get("num_hidden_layers", len(types))
        merged |= {"vocab_size": merged.get("vocab_size") or num_tokens, **dict.fromkeys(TOKEN_IDS), **token_ids}
        with torch.device("meta"):
            planned = AutoModelForCausalLM.from_config(cls.from_dict(merged))
        problems = list(_problems(planned, dtype, num_tokens))
    except Exception as error:  # transformers has many errors, some of several lines
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        keys = ", ".join(f"config.{key}={spell(value)}" for key, value in leaves(changes)) or "none of its own"
        needed = f"have values of which transformers can build a {kind}"
        raise UsageError(must("config", needed, f"{keys} ({reason})")) from error
    if problems:
        raise UsageError("; ".join(problems))
    return planned


def _problems(model: Any, dtype: str, num_tokens: int) -> Iterator[str]:
    """Yield a line for each unusable value that transformers takes."""
    from verl_ext.engines.activations import available_memory

    config = model.config
    sizes = {name: value for name in _SIZES if isinstance(value := getattr(config, name, None), int)}
    yield from (must(f"config.{name}", "be at least 1", value) for name, value in sizes.items() if value < 1)
    if sizes.get("vocab_size", num_tokens) < num_tokens:
        needed = f"be at least the tokenizer's {num_tokens:,}, or null for as many"
        yield must("config.vocab_size", needed, f"{config.vocab_size:,}")
    heads, kv_heads = sizes.get("num_attention_heads", 0), sizes.get("num_key_value_heads", 0)
    if kv_heads and heads % kv_heads:
        yield must("config.num_attention_heads", f"be divisible by config.num_key_value_heads ({kv_heads})", heads)
    head_dim = sizes.get("head_dim") or sizes.get("hidden_size", 0) // max(heads, 1)
    if getattr(config, "rope_parameters", None) and head_dim % 2:
        yield must("config.head_dim", "be even for rotary positions", head_dim)
    spread = getattr(config, "initializer_range", None)
    if isinstance(spread, int | float) and not 0 <= spread < math.inf:
        yield must("config.initializer_range", "be at least 0 and finite", spread)
    # The system kills a process that fills the memory without a word. Weights are drawn in float32.
    needed, free = model.num_parameters() * (4 if dtype == "float32" else 6), available_memory()
    if needed > free:
        got = f"{needed / 2**30:,.1f} GiB with dtype={dtype} and {free / 2**30:,.1f} GiB"
        yield must("config", "make a model whose weights fit into memory", got)


def random_model(config: Any, seed: int, dtype: str) -> Any:
    """Return the model of `config`, initialized as its architecture says.

    The weights depend on the config and the seed, not on `dtype`; bfloat16 weights are the rounded float32 weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Upstream: GPT-2's outputs to the residual stream have a standard deviation of initializer_range / √(2·layers);
        # transformers intends it, but looks for parameters named "c_proj.weight" alone. To go when it finds them.
        for name, weight in model.named_parameters():
            if config.model_type == "gpt2" and name.endswith("c_proj.weight"):
                torch.nn.init.normal_(weight, std=config.initializer_range / math.sqrt(2 * config.n_layer))
    return model.to(getattr(torch, dtype))


def count_parameters(model: Any) -> tuple[int, int]:
    """Count all parameters, and those outside embeddings and output head."""
    head = model.get_output_embeddings()
    own_head = 0 if head is None or head.weight is model.get_input_embeddings().weight else head.weight.numel()
    return model.num_parameters(), model.num_parameters(exclude_embeddings=True) - own_head
