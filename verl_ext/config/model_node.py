"""The model node: verl's, with `model.override_config` set on the Hugging Face config as a user means it.

verl sets each value as an attribute. There a dict fails inside verl, `rope_theta` and keys that the architecture lacks
change nothing, and a whole number for a float is refused by transformers in several lines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from omegaconf import OmegaConf
from verl.workers.config import HFModelConfig

from verl_ext.config.nearest import nearest_name, show

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
