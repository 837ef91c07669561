"""Types of a config node's values, from the annotations of its dataclass.

verl's dataclasses are built without any type check, so `optim.lr=abc` would only fail inside the optimizer.
"""

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from verl_ext.config.nearest import show

_NAMES: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false"}


@functools.cache
def simple_fields(cls: type) -> dict[str, tuple[type, bool]]:
    """{field: (int | float | bool, whether null is allowed)} for the fields of a dataclass that are so annotated."""
    hints = typing.get_type_hints(cls)
    simple: dict[str, tuple[type, bool]] = {}
    for field in fields(cls):
        options = _members(hints[field.name])
        kinds = [option for option in options if option is not type(None)]
        if len(kinds) == 1 and kinds[0] in _NAMES:
            # verl writes `micro_batch_size_per_gpu: int = None`
            simple[field.name] = (kinds[0], type(None) in options or field.default is None)
    return simple


def type_problems(cls: type, values: Mapping[str, Any], prefix: str) -> list[str]:
    """One line for each value below the node `prefix` that is not of the type its dataclass field names."""
    problems = []
    for name, (kind, optional) in simple_fields(cls).items():
        if name not in values or (values[name] is None and optional):
            continue
        if not _is_a(values[name], kind):
            problems.append(f"{prefix}.{name} must be {_NAMES[kind]}; got {show(values[name])}")
    return problems


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _is_a(value: Any, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    accepted = (int, float) if kind is float else (int,)
    return isinstance(value, accepted) and not isinstance(value, bool)
