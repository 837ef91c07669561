"""Rotary parameters in `model.override_config`, read as transformers reads those of a config.json.

Older files have `rope_scaling: {type: yarn, factor: 4.0}` and `rope_theta`; those of transformers 5 have
`rope_parameters: {rope_type: yarn, factor: 4.0, rope_theta: 1e6}`.
"""

import math
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl_ext.options import choice_problem, must, spell

_NAMES = ("rope_scaling", "rope_parameters")
_BESIDE = ("rope_theta", "partial_rotary_factor")
_SCALED = ("linear", "dynamic", "yarn")  # whose factor follows from a length
_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
_OF_A_TYPE = {  # so that they are not left over when another type takes the place of theirs
    *("rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
}


def set_rope_parameters(hf_config: Any, values: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Set rotary parameters among `values` in place; return the other values.

    The config has a dict of them. A dict with a type takes the place of the config's scaling; parameters that belong to
    no type (rope_theta, mrope_section) stay. A dict without a type updates the config's parameters. Null ends the
    scaling. The factor of a type without one follows from max_position_embeddings among `values`.

    Raises ValueError for parameters that transformers refuses, or that it would read as something else or not at all.
    """
    others, old = dict(values), hf_config.rope_parameters
    named = {name: others.pop(name) for name in _NAMES if name in others}
    if len(named) > 1 and named["rope_scaling"] != named["rope_parameters"]:
        raise ValueError(must(option, "have one of rope_scaling and rope_parameters, which are the same", named))
    beside = {name: others.pop(name) for name in _BESIDE if name in others and name in {"rope_theta", *old}}
    if not named and not beside:
        return others
    name, given = next(iter(named.items()), ("rope_parameters", {}))
    given = {"rope_type": "default"} if given is None else given
    if not isinstance(given, Mapping):
        raise ValueError(must(f"{option}.{name}", "be a dict of rotary parameters, or null", given))
    # Some models have one dict for each kind of layer, which then must be named.
    kinds = {kind: inner for kind, inner in old.items() if isinstance(inner, dict)}
    if not kinds:
        given = _with_factor(hf_config, given, values.get("max_position_embeddings"))
        parts = {"": {**beside, **given}}
        hf_config.rope_parameters = _merged(old, parts[""], f"{option}.{name}")
    else:
        if beside or not given.keys() <= kinds.keys() or not all(isinstance(x, Mapping) for x in given.values()):
            each, got = ", ".join(f"{kind}: {{…}}" for kind in kinds), spell({**named, **beside})
            raise ValueError(must(option, f"have rope_parameters: {{{each}}}, by kind of layer", got))
        parts = dict(given)
        merged = {kind: _merged(old[kind], inner, f"{option}.{name}.{kind}") for kind, inner in given.items()}
        hf_config.rope_parameters = {**old, **merged}
    try:
        hf_config.convert_rope_params_to_dict()  # what transformers does to those of a config.json
        hf_config.validate_rope()
    except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError) as error:
        line = must(f"{option}.rope_parameters", f"fit a {type(hf_config).__name__}", {**named, **beside})
        raise ValueError(f"{line} ({str(error).splitlines()[-1]})") from error
    # transformers ignores what it does not read, so that a typo would train another model.
    rope, remote = hf_config.rope_parameters, bool(getattr(hf_config, "auto_map", None))
    for kind, part in parts.items():
        _check_read(rope[kind] if kind else rope, part, f"{option}.{name}" + f".{kind}" * bool(kind), remote)
    return others


def _with_factor(hf_config: Any, given: Mapping[str, Any], length: Any) -> Mapping[str, Any]:
    """Add the least whole factor that reaches `length`, if none is given."""
    kind = given.get("rope_type", given.get("type"))
    if kind not in _SCALED or "factor" in given or not isinstance(length, int):
        return given
    own = given.get("original_max_position_embeddings") or hf_config.max_position_embeddings
    original = {} if kind == "linear" else {"original_max_position_embeddings": own}
    return {**original, **given, "factor": float(max(math.ceil(length / own), 1))}


def _merged(old: Mapping[str, Any], given: Mapping[str, Any], key: str) -> dict[str, Any]:
    types = {name: given[name] for name in ("rope_type", "type") if given.get(name) is not None}
    if not types:
        return {**old, **given}
    if len({*map(str, types.values())}) > 1:
        raise ValueError(must(key, "have one type", types))
    kept = {name: value for name, value in old.items() if name not in _OF_A_TYPE}
    return {**kept, **given, "rope_type": next(iter(types.values()))}


def _check_read(rope: Mapping[str, Any], given: Mapping[str, Any], key: str, remote: bool) -> None:
    """Raise ValueError for an unknown type, unread parameters or a wrong factor."""
    rope_type = rope["rope_type"]
    if not remote and (problem := choice_problem(f"{key}.rope_type", rope_type, _TYPES)):
        raise ValueError(problem)
    if rope_type == "default" and (unread := sorted((given.keys() & _OF_A_TYPE) - {"rope_type", "type"})):
        raise ValueError(must(key, f"name the type that has {', '.join(unread)}", "rope_type=default"))
    factor = given.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise ValueError(must(f"{key}.factor", "be a number", factor))
