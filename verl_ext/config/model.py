"""The keys of `model=qwen_titans`, a Qwen with long-term memory.

The model node: verl's, with `model.override_config` set on the Hugging Face config as a user means it.

verl sets each value as an attribute. There a dict fails inside verl, `rope_theta` and keys that the architecture lacks
change nothing, and a whole number for a float is refused by transformers in several lines.

The model node of `model=qwen_titans`: verl's, its Hugging Face config wrapped by the memory's.

Whether a model keeps the documents of a pack apart: told by its class and its config, before weights are read.

What a model with long-term memory can and cannot have in a run, told before its weights are read.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from omegaconf import DictConfig, OmegaConf
from verl.workers.config import HFModelConfig

from verl_ext.engines.router import asks_for_router_loss, has_router_loss
from verl_ext.models.qwen_titans import QwenTitansConfig
from verl_ext.values import choice_problem, nearest_name, show

TARGET = "verl_ext.config.model.QwenTitansModelConfig"
TRAIN = ("all", "memory")
ATTENTION = {"auto": "sdpa", "sdpa": "sdpa", "flash_attn": "flash_attention_2"}  # of attention.backend, inside a chunk


# Below model.memory; a test holds them equal to the fields of MemoryOptions, whose import would take seconds.
MEMORY_KEYS = (
    *("chunk_size", "layers", "variant", "heads", "head_dim", "depth", "expansion", "sub_chunk", "max_surprise"),
    *("persistent_tokens", "output_std", "bptt_chunks"),
)


def is_titans(config: DictConfig) -> bool:
    """Whether the model group is qwen_titans."""
    return config.model.get("_target_") == TARGET


_KEY = "model.override_config"
_ATTENTION = "attn_implementation"  # verl's own: it is no field of a config


@dataclass
class ModelConfig(HFModelConfig):
    """verl's model configuration; `override_config` reaches `hf_config` through :func:`override`."""

    _mutable_fields = HFModelConfig._mutable_fields | {"override_config"}

    def __post_init__(self) -> None:
        given = dict(self.override_config)
        self.override_config = {name: value for name, value in given.items() if name == _ATTENTION}
        super().__post_init__()
        self.override_config = given
        override(self.hf_config, given)


def override(hf_config: Any, values: Mapping[str, Any]) -> None:
    """Set the values of `model.override_config` on a model's config, in place.

    A dict goes over the one that is there, `rope_theta` into the rotary parameters; what those leave out is the
    model's own, whatever else is overridden.

    Raises:
        ValueError: the architecture has no such key, or no such value for it.
    """
    plain: Any = OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values
    given = {key: value for key, value in plain.items() if key != _ATTENTION}
    if isinstance(getattr(hf_config, "rope_parameters", None), dict):
        rope = {**(given.pop("rope_scaling", None) or {}), **(given.pop("rope_parameters", None) or {})}
        if "rope_theta" in given:
            rope["rope_theta"] = given.pop("rope_theta")
        given = {"rope_parameters": rope, **given} if rope else given
    for key, value in given.items():
        _set(hf_config, key, value)


def _set(hf_config: Any, key: str, value: Any) -> None:
    if not hasattr(hf_config, key) and not getattr(hf_config, "auto_map", None):
        nearest = nearest_name(key, ["rope_theta", *(name for name in hf_config.to_dict() if not name.startswith("_"))])
        hint = f"; nearest: {_KEY}.{nearest}" if nearest else ""
        raise ValueError(f"unknown key {_KEY}.{key} of {type(hf_config).__name__}{hint}")
    old = getattr(hf_config, key, None)
    if isinstance(old, dict) and isinstance(value, dict):
        value = {**old, **value}
    elif isinstance(old, float) and type(value) is int:
        value = float(value)
    try:
        setattr(hf_config, key, value)
        if key == "rope_parameters":
            hf_config.standardize_rope_params()
            hf_config.validate_rope()
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        must = f"{_KEY}.{key} must be one of a {type(hf_config).__name__}"
        raise ValueError(f"{must}; got {show(value)} ({reason})") from error


@dataclass
class QwenTitansModelConfig(ModelConfig):
    """The model node for a Qwen with long-term memory: `hf_config` becomes a :class:`QwenTitansConfig`."""

    train: str = "all"
    memory_checkpoint: str | None = None
    memory: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hf_config = titans_config(self.hf_config, self.memory)
        self.architectures = self.hf_config.architectures


def titans_config(hf_config: Any, memory: Mapping[str, Any]) -> QwenTitansConfig:
    """The config with memory around a Qwen's, or an exported one with what `memory` sets.

    Raises:
        ValueError: the base is no Qwen2 or Qwen3, or an option cannot be; `model.memory.<name>` is named.
    """
    given = {name: value for name, value in _plain(memory).items() if value is not None}
    if isinstance(hf_config, QwenTitansConfig):
        hf_config, given = hf_config.base_config, {**(hf_config.memory or {}), **given}
    return QwenTitansConfig.from_base(hf_config, **given)


def _plain(memory: Mapping[str, Any]) -> dict[str, Any]:
    if OmegaConf.is_config(memory):
        return OmegaConf.to_container(memory, resolve=True)  # type: ignore[return-value]
    return dict(memory)


_APART = {"full_attention", "sliding_attention"}
_ELSEWHERE = {  # what these keep outside query, key and value, where a packed attention does not see it
    "gpt_oss": "attention sinks",
    "doge": "an attention mask that it computes",
    "glm_moe_dsa": "an attention mask that it computes",
    "deepseek_v4": "an attention mask that it computes",
}


def model_support_problems(hf_config: Any) -> list[str]:
    """Reasons why packs would leak between documents in this architecture, or be computed wrongly.

    hf_config: the model's Hugging Face config. Models whose attention transformers does not dispatch would ignore the
    packed attention; recurrent, convolutional and chunked layers carry a state across documents; logit soft-capping and
    attention sinks are not computed by it. Remote code cannot be read here; the attention itself refuses what it lacks.
    """
    if getattr(hf_config, "model_type", None) == "qwen_titans":
        return ["model.path holds a Qwen with long-term memory, which needs model=qwen_titans; got another model group"]
    text = hf_config.get_text_config()
    name = f"model.path: {type(hf_config).__name__}"
    problems = []
    cls = _model_class(hf_config)
    if cls is None and not getattr(hf_config, "auto_map", None):
        problems.append(f"{name} must be a causal language model that transformers has; it has none for this config")
    modal = [kind for kind in ("vision_config", "audio_config") if getattr(hf_config, kind, None) is not None]
    if modal:
        problems.append(f"{name} must be a text model; it has {', '.join(modal)}, whose inputs packs do not carry")
    if cls is not None and not getattr(cls, "_supports_attention_backend", False):
        problems.append(
            f"{name} must dispatch its attention through transformers' AttentionInterface; {cls.__name__} does not"
        )
    kinds = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    carried = sorted(kinds - _APART - {"attention"})
    if carried:
        problems.append(
            f"{name} must have attention layers alone, which keep documents apart; got {', '.join(carried)}"
        )
    if getattr(text, "attn_logit_softcapping", None):
        problems.append(
            f"{name} must not cap attention logits; got attn_logit_softcapping={text.attn_logit_softcapping}"
        )
    if text.model_type in _ELSEWHERE:
        problems.append(
            f"{name} must have plain causal attention; {text.model_type} uses {_ELSEWHERE[text.model_type]}"
        )
    if asks_for_router_loss(hf_config) and not has_router_loss(cls, text):
        problems.append(
            f"model.override_config.output_router_logits must be false for {type(hf_config).__name__}, of which "
            "transformers computes no router loss that can be taken over packs; got true"
        )
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        problems.append(
            f"{name} must have causal attention; got use_bidirectional_attention={text.use_bidirectional_attention}"
        )
    if cls is not None and hasattr(text, "is_decoder") and not problems:
        problems += _encoder_problems(cls, hf_config, name)
    return problems


def _encoder_problems(cls: type, hf_config: Any, name: str) -> list[str]:
    """What keeps an encoder's architecture (BERT's and its kin) from being trained on packs: read from its modules."""
    with torch.device("meta"):
        modules = dict(cls(copy.deepcopy(hf_config)).named_modules())
    if any(getattr(module, "is_causal", None) is False for module in modules.values()):
        return [f"{name} must have causal attention; got is_decoder={str(hf_config.is_decoder).lower()}"]
    embeddings = [module for path, module in modules.items() if path.endswith(".position_embeddings")]
    if any(getattr(embedding, "padding_idx", None) is not None for embedding in embeddings):
        return [f"{name} must count positions from 0, as packs do; {cls.__name__} counts from pad_token_id + 1"]
    return []


def router_notices(hf_config: Any) -> list[str]:
    """That a mixture of experts trains without its router loss, which published configs leave off."""
    text = hf_config.get_text_config()
    if asks_for_router_loss(hf_config) or not has_router_loss(_model_class(hf_config), text):
        return []
    return [
        f"{type(hf_config).__name__} is trained without a router loss; model.override_config.output_router_logits=true "
        f"adds it with router_aux_loss_coef={text.router_aux_loss_coef}"
    ]


def _model_class(hf_config: Any) -> type | None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(hf_config, "auto_map", None):
        return None
    try:
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    except KeyError:
        return None
    return cls[0] if isinstance(cls, tuple) else cls


OWN_KEYS = ("train", "memory_checkpoint", "memory")


def titans_problems(config: DictConfig) -> list[str]:
    """What `model=qwen_titans` cannot have, told from the configuration alone; its own keys on any other model."""
    if not is_titans(config):
        return [
            f"model.{key} is an option of model=qwen_titans; got {show(config.model[key])} without it"
            for key in OWN_KEYS
            if key in config.model
        ]
    problems = [choice_problem("model.train", config.model.train, TRAIN)]
    problems.append(choice_problem("attention.backend", config.attention.backend, tuple(ATTENTION)))
    problems += [
        f"{key} must be {show(allowed)} with model=qwen_titans: {why}; got {show(OmegaConf.select(config, key))}"
        for key, allowed, why in _ONLY
        if OmegaConf.select(config, key, default=allowed) != allowed
    ]
    return [problem for problem in problems if problem]


_ONLY: tuple[tuple[str, Any, str], ...] = (
    ("engine.ulysses_sequence_parallel_size", 1, "the memory reads a row's chunks one after the other on one rank"),
    ("engine.strategy", "fsdp2", "its engine shards the memory by FSDP2"),
    ("model.lora_rank", 0, "model.train=memory is what trains few parameters"),
    ("model.lora_adapter_path", None, "it has no adapters"),
    ("model.use_liger", False, "liger does not know the model"),
    ("model.enable_activation_offload", False, "its engine keeps activations where they are"),
    ("data.strategy", "none", "a row is one document, whose memory starts empty (data=babilong sets it)"),
    ("data.pad_mode", "right", "every rank must read equally many chunks (data=babilong sets it)"),
)


def check_titans_model(config: DictConfig, hf_config: Any) -> Any:
    """The config with memory around the one that `model.path` holds.

    Raises:
        ValueError: a base that is no Qwen, an option of the memory that cannot be, rows that are no whole chunks, a
            `model.memory_checkpoint` of another model; a line each.
    """

    titans = titans_config(hf_config, config.model.memory)
    problems = []
    tokens, chunk = config.data.max_tokens, titans.chunk_size
    if isinstance(tokens, int) and tokens % chunk:
        up = -(-tokens // chunk) * chunk
        problems.append(
            "data.max_tokens (data.max_length of data=babilong) must be a multiple of model.memory.chunk_size="
            f"{chunk}; got {tokens} (nearest above: {up})"
        )
    if config.model.train == "memory" and not titans.memory_options.layers:
        problems.append(
            "model.memory.layers must name a layer with model.train=memory, which trains nothing else; got []"
        )
    problems += _memory_problems(config.model.memory_checkpoint, titans)
    if problems:
        raise ValueError("\n".join(problems))
    return titans


def _memory_problems(path: str | None, titans: Any) -> list[str]:
    """Whether `model.memory_checkpoint` fits: by the settings beside it, else tried on a model without storage."""
    if path is None:
        return []
    from verl_ext.models.qwen_titans import QwenTitansForCausalLM, load_memory_checkpoint

    settings = Path(path).with_suffix(".json")
    if settings.is_file():
        try:
            trained = json.loads(settings.read_text(encoding="utf-8"))
        except ValueError:
            trained = None
        if not isinstance(trained, dict):
            return [f"model.memory_checkpoint: the settings beside it must be a JSON object; got {settings}"]
        told = [
            f"model.memory.{name} must be {show(value)}, as in {settings}, with model.memory_checkpoint={path}; got "
            f"{show(titans.memory.get(name))}"
            for name, value in trained.items()
            if titans.memory.get(name) != value
        ]
        if told:
            return told

    with torch.device("meta"):
        model = QwenTitansForCausalLM(titans)
    try:
        load_memory_checkpoint(model, path)
    except ValueError as error:
        return [f"model.memory_checkpoint: {error}"]
    return []
