"""What a model's architecture allows: packs, sequence parallelism, attention kernels, positions.

Read from its config.json and classes, before weights are loaded. `hf_config` is a Hugging Face
config throughout.
"""

import copy
import inspect
import os
from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from verl_ext.attention import HeadPadding, choose_backend, fallback_notices, flash_limit
from verl_ext.engines.activations import NEEDS_CHECKPOINTS
from verl_ext.engines.head import supported_head
from verl_ext.engines.router import asks_for_router_loss, has_router_loss
from verl_ext.engines.tiles import tileable, untileable
from verl_ext.losses import HEADS, row_bytes
from verl_ext.values import nearest_name

SP = "engine.ulysses_sequence_parallel_size"
CP = "parallel.context_parallel_size"
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
_APART = {"full_attention", "sliding_attention", "attention"}
_ELSEWHERE = {  # what these compute outside query, key and value, where a packed attention does not see it
    "gpt_oss": "attention sinks",
    "doge": "an attention mask that it computes",
    "glm_moe_dsa": "an attention mask that it computes",
    "deepseek_v4": "an attention mask that it computes",
}


def model_support_problems(hf_config: Any) -> list[str]:
    """Reasons why packs would leak between documents in this architecture, or be computed wrongly.

    Models whose attention transformers does not dispatch would ignore the packed attention; recurrent, convolutional
    and chunked layers carry a state across documents; logit soft-capping and attention sinks are not computed by it.
    Remote code is not read; the attention itself refuses what it lacks.
    """
    if getattr(hf_config, "model_type", None) == "qwen_titans":
        return ["model.path holds a Qwen with long-term memory, which needs model=qwen_titans; got another model group"]
    problems = list(_packing_problems(hf_config))
    cls, text = model_class(hf_config), hf_config.get_text_config()
    if cls is not None and hasattr(text, "is_decoder") and not problems:
        problems += _encoder_problems(cls, hf_config)
    return problems


def _packing_problems(hf_config: Any) -> Iterator[str]:
    text, cls = hf_config.get_text_config(), model_class(hf_config)
    name = f"model.path: {type(hf_config).__name__}"
    if cls is None and not getattr(hf_config, "auto_map", None):
        yield f"{name} must be a causal language model that transformers has; it has none for this config"
    if modal := [kind for kind in ("vision_config", "audio_config") if getattr(hf_config, kind, None) is not None]:
        yield f"{name} must be a text model; it has {', '.join(modal)}, whose inputs packs do not carry"
    if cls is not None and not getattr(cls, "_supports_attention_backend", False):
        yield f"{name} must dispatch its attention through transformers' AttentionInterface; {cls.__name__} does not"
    kinds = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    if others := sorted(kinds - _APART):
        yield f"{name} must have attention layers alone, which keep documents apart; got {', '.join(others)}"
    if cap := getattr(text, "attn_logit_softcapping", None):
        yield f"{name} must not cap attention logits; got attn_logit_softcapping={cap}"
    if text.model_type in _ELSEWHERE:
        yield f"{name} must have plain causal attention; {text.model_type} uses {_ELSEWHERE[text.model_type]}"
    if asks_for_router_loss(hf_config) and not has_router_loss(cls, text):
        yield (
            f"model.override_config.output_router_logits must be false for {type(hf_config).__name__}, of which "
            "transformers computes no router loss that can be taken over packs; got true"
        )
    if cls is not None and "shared_kv_states" in inspect.signature(cls.forward).parameters:
        yield f"{name} must be a model of its own; a {cls.__name__} drafts for another one, whose states it needs"
    if (both := getattr(text, "use_bidirectional_attention", None)) in (True, "all"):
        yield f"{name} must have causal attention; got use_bidirectional_attention={both}"


def _encoder_problems(cls: type, hf_config: Any) -> list[str]:
    """What keeps an encoder's architecture (BERT's and its kin) from being trained on packs: read from its modules."""
    name = f"model.path: {type(hf_config).__name__}"
    with torch.device("meta"):
        modules = dict(cls(copy.deepcopy(hf_config)).named_modules())
    if any(getattr(module, "is_causal", None) is False for module in modules.values()):
        return [f"{name} must have causal attention; got is_decoder={str(hf_config.is_decoder).lower()}"]
    embeddings = [module for path, module in modules.items() if path.endswith(".position_embeddings")]
    if any(getattr(embedding, "padding_idx", None) is not None for embedding in embeddings):
        return [f"{name} must count positions from 0, as packs do; {cls.__name__} counts from pad_token_id + 1"]
    return []


def block_problems(config: DictConfig, hf_config: Any) -> list[str]:
    """Whether a fused head's block of logits holds a row of the model's vocabulary."""
    given, vocabulary = config.loss.head_block_mib, hf_config.get_text_config().vocab_size
    least = -(-row_bytes(vocabulary, torch.bfloat16) // 2**20)
    if not isinstance(given, int) or not 0 < given < least:
        return []
    return [f"loss.head_block_mib must be at least {least}, a row of the model's {vocabulary} logits; got {given}"]


def head_in_use(config: DictConfig, hf_config: Any) -> str:
    """The head that `loss.head` asks for, or the next best that the model allows."""
    cls, asked = model_class(hf_config), config.loss.head
    if cls is None or asked not in HEADS:
        return asked
    with torch.device("meta"):
        return max(asked, supported_head(cls(copy.deepcopy(hf_config))), key=HEADS.index)


def output_notices(config: DictConfig, hf_config: Any) -> list[str]:
    """Say that a model's head needs more memory than `loss.head` asks for."""
    asked, use, cls = config.loss.head, head_in_use(config, hf_config), model_class(hf_config)
    if use == asked or cls is None:
        return []
    return [f"loss.head={asked} is {use} here: {cls.__name__} has no linear head whose logits it gives as they are"]


def activation_problems(config: DictConfig) -> Iterator[str]:
    """What the activation options need of other options."""
    model = config.model
    if model.activation_offload is True and model.enable_gradient_checkpointing is False:
        yield NEEDS_CHECKPOINTS
    if model.tile_tokens is not None and config.engine.strategy == "fsdp":
        yield "model.tile_tokens needs engine.strategy=fsdp2, which keeps parameters apart; got fsdp"


def tile_problems(config: DictConfig, hf_config: Any) -> list[str]:
    """Whether a model has layers or modules that `model.tile_tokens` can tile."""
    found = _tileable(config, hf_config)
    if found is None or any(found):
        return []
    return [untileable(f"a {type(hf_config).__name__}", config.model.tile_tokens)]


def tile_notices(config: DictConfig, hf_config: Any) -> list[str]:
    """Says how many layers `model.tile_tokens` does not tile as a whole."""
    found, layers = _tileable(config, hf_config), hf_config.get_text_config().num_hidden_layers
    if found is None or not any(found) or len(found[0]) >= layers:
        return []
    return [
        f"model.tile_tokens={config.model.tile_tokens} is of {len(found[0])} of {layers} layers: of the others, "
        "mixtures of experts say, their norms and plain MLPs alone are tiled"
    ]


def _tileable(config: DictConfig, hf_config: Any) -> tuple[list[Any], list[Any]] | None:
    """The layers and modules that can be tiled, None where that is not asked for or not known yet."""
    cls = model_class(hf_config)
    if config.model.tile_tokens is None or cls is None:
        return None
    with torch.device("meta"):
        return tileable(cls(copy.deepcopy(hf_config)))


def router_notices(hf_config: Any) -> list[str]:
    """Says that a mixture of experts trains without its router loss, which published configs leave off."""
    text = hf_config.get_text_config()
    if asks_for_router_loss(hf_config) or not has_router_loss(model_class(hf_config), text):
        return []
    return [
        f"{type(hf_config).__name__} is trained without a router loss; model.override_config.output_router_logits=true "
        f"adds it with router_aux_loss_coef={text.router_aux_loss_coef}"
    ]


def head_problems(config: DictConfig, hf_config: Any) -> list[str]:
    """Whether every sequence-parallel rank can have a head."""
    sp, heads = config.engine.ulysses_sequence_parallel_size, _heads(hf_config)
    if not isinstance(sp, int) or heads is None or sp <= heads[0]:
        return []
    return [f"{SP} must be at most the model's {heads[0]} attention heads; got {sp}; {CP} lets more ranks share a pack"]


def padding_notices(config: DictConfig, hf_config: Any) -> list[str]:
    """Says what the zero heads cost where the sequence-parallel size does not divide the heads."""
    sp, heads = config.engine.ulysses_sequence_parallel_size, _heads(hf_config)
    zero = HeadPadding.from_heads(*heads, sp).zero_heads if heads else 0
    if not heads or not zero:
        return []
    return [
        f"{SP}={sp} does not divide the model's {heads[0]} attention heads of {heads[1]} key/value heads: {zero} zero "
        f"heads are added, {zero / heads[0]:.0%} more attention"
    ]


def _heads(hf_config: Any) -> tuple[int, int] | None:
    """(query heads, key/value heads), None where a config names none."""
    text = hf_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    return (heads, getattr(text, "num_key_value_heads", None) or heads) if heads else None


def lora_problems(config: DictConfig, hf_config: Any) -> list[str]:
    """Adapters of modules that the model lacks, or that cannot be trained or exported.

    Those are the input embeddings, and a head that shares their weights.
    """
    model, adapter = config.model, config.model.lora_adapter_path
    cls, tied = model_class(hf_config), hf_config.get_text_config().tie_word_embeddings
    if not model.lora_rank or (adapter and not os.path.isfile(os.path.join(adapter, "adapter_config.json"))):
        return []  # path_problems reports it; or a hub name
    from peft import LoraConfig  # here: takes seconds, and only such a run needs it
    from peft.tuners.tuners_utils import check_target_module_exists as targets_module

    if adapter:
        key, lora = "model.lora_adapter_path: target_modules", LoraConfig.from_pretrained(adapter)
    else:
        plain: Any = OmegaConf.to_container(model, resolve=True)
        key = "model.target_modules"
        lora = LoraConfig(target_modules=plain["target_modules"], exclude_modules=plain["exclude_modules"])
    given = lora.target_modules if isinstance(lora.target_modules, str) else sorted(lora.target_modules or ())
    if cls is not None and given and given != "all-linear":
        with torch.device("meta"):
            modules = [name for name, _ in cls(copy.deepcopy(hf_config)).named_modules()]
        for target in [given] if isinstance(given, str) else given:
            alone = LoraConfig(target_modules=given if isinstance(given, str) else [target])
            if not any(targets_module(alone, name) for name in modules):
                nearest = nearest_name(target, {name.rpartition(".")[2] for name in modules})
                hint = f" (nearest: {nearest})" if nearest else ""
                return [f"{key} must name modules of a {cls.__name__}; got {target}{hint}"]
    refused = ["lm_head", "model.embed_tokens"] if tied else ["model.embed_tokens"]
    named = [name for name in refused if lora.target_modules and targets_module(lora, name)]
    if not named or not (tied or config.engine.strategy == "fsdp2"):
        return []
    why = "tied weights are exported as one" if tied else "verl 0.9.1's FSDP2 cannot shard an adapter there"
    return [f"{key} must leave out {' and '.join(named)}: {why}; got {given}"]


def check_positions(longest_document: int, max_tokens: int, hf_config: Any) -> None:
    """Raises ValueError when a document reaches positions that the model does not have.

    Positions restart with every document, so a pack may be longer than the model's positions; a document, of at most
    min(longest_document, max_tokens) tokens, may not.
    """
    positions = model_positions(hf_config)
    longest = min(longest_document, max_tokens)
    if positions is not None and longest > positions:
        raise ValueError(
            f"data.max_tokens must be at most the model's {positions} positions while a document is longer than those; "
            f"got {max_tokens} and a longest document of {longest} tokens: lower it with data.over_length=drop, "
            "truncate or split, or extend the model by model.override_config"
        )


def model_positions(hf_config: Any) -> int | None:
    """The positions that a model was made for, its RoPE scaling included; None when its config names none.

    Some configs (Llama 3) give max_position_embeddings with the scaling included, others (YaRN for Qwen) without: the
    larger reading is taken.
    """
    text = hf_config.get_text_config()
    positions = base = getattr(text, "max_position_embeddings", None)
    if not positions:
        return None
    ropes = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    ropes += [inner for rope in ropes if isinstance(rope, dict) for inner in rope.values()]  # one for each layer type
    for rope in ropes:
        if isinstance(rope, dict) and rope.get("factor"):
            positions = max(positions, int(rope["factor"] * (rope.get("original_max_position_embeddings") or base)))
    return int(positions)


def chosen_backend(
    config: DictConfig, hf_config: Any, device: str, capability: tuple[int, int] | None
) -> tuple[str, str | None]:
    """(the attention backend that runs, what flash attention lacks here or None).

    hf_config: None where it could not be read; capability: of the GPU, None where it is not known. Raises ValueError
    where the backend that is asked for cannot run.
    """
    dtype = _DTYPES.get(OmegaConf.select(config, "engine.mixed_precision.param_dtype"), torch.bfloat16)
    head_size = 128 if hf_config is None else _head_size(hf_config.get_text_config())
    dropout = 0.0 if hf_config is None else attention_dropout(hf_config)
    limit = flash_limit(dtype, head_size, capability)
    return choose_backend(config.attention.backend, device, limit, dropout, capability, head_size), limit


def kernel_notices(config: DictConfig, hf_config: Any, capability: tuple[int, int] | None) -> list[str]:
    """Say that ``auto`` uses a slower kernel on a GPU, because an installed package cannot be used."""
    backend, limit = chosen_backend(config, hf_config, "cuda", capability)
    if limit or config.attention.backend != "auto":
        return []
    return fallback_notices(backend, attention_dropout(hf_config), capability, _head_size(hf_config.get_text_config()))


def quadratic_memory_notices(config: DictConfig, hf_config: Any, capability: tuple[int, int] | None) -> list[str]:
    """Where sdpa on a GPU may hold scores of ``[l, l]`` for a document of l tokens.

    Without its flash kernel torch computes grouped heads with all scores in memory; of a window, those of a block.
    """
    backend, limit = chosen_backend(config, hf_config, "cuda", capability)
    text = hf_config.get_text_config()
    layers, window = windowed_layers(text)
    has_window = window is not None and window < config.data.max_tokens and layers == text.num_hidden_layers
    if backend != "sdpa" or not limit or has_window:
        return []
    return [
        f"attention.backend={config.attention.backend} uses sdpa, whose memory may grow here with the square of a "
        f"document's length: flash attention needs {limit}"
    ]


def attention_dropout(hf_config: Any) -> float:
    """Dropout of attention weights in training, which model configs have under several names."""
    text = hf_config.get_text_config()
    given = [getattr(text, name, None) for name in _DROPOUT]
    given.append(getattr(getattr(text, "attn_config", None), "attn_pdrop", None))  # DBRX
    return max(float(value or 0) for value in given)


def windowed_layers(text: Any) -> tuple[int, int | None]:
    """(layers with sliding-window attention, its width in tokens) of a Hugging Face text config."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers  # Mistral: every layer
    layers = sum(kind == "sliding_attention" for kind in kinds)
    return (layers, int(window)) if window and layers else (0, None)


def _head_size(text: Any) -> int:
    """Of queries and keys; latent attention has it in two parts."""
    if rotated := getattr(text, "qk_rope_head_dim", None):
        return text.qk_nope_head_dim + rotated
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def model_class(hf_config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(hf_config, "auto_map", None):
        return None
    try:
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    except KeyError:
        return None
    return cls[0] if isinstance(cls, tuple) else cls
