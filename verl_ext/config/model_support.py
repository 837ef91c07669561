"""Whether a model keeps the documents of a pack apart: told by its class and its config, before weights are read."""

import copy
from typing import Any

import torch

from verl_ext.engines.router_loss import asks_for_router_loss, has_router_loss

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
