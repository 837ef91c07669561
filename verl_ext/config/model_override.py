"""The values of `model.override_config`, set on a model's Hugging Face config."""

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from verl_ext.config.rope import set_rope_parameters
from verl_ext.options import must, plain, unknown

OVERRIDE = "model.override_config"
ATTENTION = "attn_implementation"  # verl's own key below override_config, not a field of a model's config


def override(hf_config: Any, values: Mapping[str, Any]) -> None:
    """Set the values of `model.override_config` on a model's config, in place.

    verl sets each value as an attribute, so `rope_theta` and misspelt keys change nothing. Here a dict updates the
    existing one, and rotary parameters are read as in a config.json (:func:`set_rope_parameters`). If the config of a
    model with towers lacks a key, the key belongs to its text model.

    Raises:
        ValueError: If the architecture has no such key or refuses the value.
    """
    given = {key: value for key, value in plain(values).items() if key != ATTENTION}
    if (text := hf_config.get_text_config()) is not hf_config:  # a model with towers has a config for each part
        for part in hf_config.sub_configs:
            if isinstance(given.get(part), dict) and getattr(hf_config, part) is not None:
                override(getattr(hf_config, part), given.pop(part))
        override(text, {key: given.pop(key) for key in list(given) if not hasattr(hf_config, key)})
    asked = dict(given)
    if isinstance(getattr(hf_config, "rope_parameters", None), dict):
        given = set_rope_parameters(hf_config, given, OVERRIDE)
    kinds = getattr(hf_config, "layer_types", None) or ()
    for key, value in given.items():
        _set(hf_config, key, value)
    if "num_hidden_layers" in given and "layer_types" not in given and len(set(kinds)) == 1:
        hf_config.layer_types = list(kinds[:1]) * hf_config.num_hidden_layers
    if asked and hasattr(hf_config, "validate"):
        try:
            hf_config.validate()  # checks the values together
        except (StrictDataclassError, TypeError, ValueError) as error:
            raise ValueError(must(OVERRIDE, "give values that fit together", asked) + f" ({_reason(error)})") from error


def _set(hf_config: Any, key: str, value: Any) -> None:
    routers = key == "output_router_logits" and hasattr(hf_config, "router_aux_loss_coef")  # Qwen3-VL lacks the former
    if not hasattr(hf_config, key) and not routers and not getattr(hf_config, "auto_map", None):
        known = ["rope_theta", *(name for name in hf_config.to_dict() if not name.startswith("_"))]
        raise ValueError(unknown(key, known, node=OVERRIDE, owner=type(hf_config).__name__))
    old = getattr(hf_config, key, None)
    if isinstance(old, dict) and isinstance(value, dict):
        value = {**old, **value}
    elif isinstance(old, float) and type(value) is int:
        value = float(value)
    try:
        setattr(hf_config, key, value)
    except (StrictDataclassError, TypeError, ValueError) as error:
        line = must(f"{OVERRIDE}.{key}", f"fit a {type(hf_config).__name__}", value)
        raise ValueError(f"{line} ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """Return the last line of a config class's error, the reason."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
