"""Checks of verl's nodes for packs, which verl's dataclasses lack."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from hydra.utils import get_class

from verl_ext.config.keys import KEYS, Key
from verl_ext.options import choice_problem, must, spell, type_problems


def upstream_problems(values: Mapping[str, Any]) -> Iterator[str | None]:
    """Yield a line for each ill-typed or out-of-bounds value of verl's nodes."""
    ill_typed: list[str] = []
    for node in ("model", "engine", "optim", "checkpoint", "profiler"):
        cls = get_class(values[node]["_target_"])
        if is_dataclass(cls):
            given = {name: value for name, value in values[node].items() if value != "???"}
            skipped = [key.name.removeprefix(f"{node}.") for key in KEYS if not key.is_typed]
            ill_typed += type_problems(cls, given, node, skipped)
    yield from ill_typed
    for key in KEYS:
        if not any(line.startswith(f"{key.name} ") for line in ill_typed):
            yield from _value_problems(key, select(values, key.name))


def _value_problems(key: Key, value: Any) -> Iterator[str | None]:
    """Yield a line for each value of a key that its row does not allow."""
    if key.holds is not None and not key.holds(value):
        yield must(key.name, f"be {key.requires}", value)
    if key.is_list and not isinstance(value, list):
        yield must(key.name, f"be a list of {', '.join(key.choices)}", value)
    elif key.choices and not (key.takes_null and value is None):
        for each in value if key.is_list else [value]:
            yield choice_problem(key.name, each, key.choices)


def fixed_value_problems(values: Mapping[str, Any], keys: Iterable[Key] = KEYS, condition: str = "") -> Iterator[str]:
    """Yield a line with the reason for each option that has another value than its row fixes."""
    for key in keys:
        if key.fixed is not None and (value := select(values, key.name, key.fixed[0])) != key.fixed[0]:
            yield must(key.name, f"be {spell(key.fixed[0])}{condition}: {key.fixed[1]}", value)


def select(values: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return a dotted key's value in nested mappings, or the default."""
    for name in key.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return default
        values = values[name]
    return values
