"""Every option refuses what it does not take, in one line with its key and the value, and takes the rest."""

import dataclasses
import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_origin

import pytest

from tests.lib.errors import names
from verl_ext.__main__ import COMMANDS
from verl_ext.config import run, schema
from verl_ext.options import Option, Options, options_of, spell

# {type: (its name in errors, values of other types)}
KINDS: dict[Any, tuple[str, list[Any]]] = {
    int: ("a whole number", ["many", 2.5, True, [1]]),
    float: ("a number", ["many", True, [1]]),
    bool: ("true or false", ["maybe", 1, [True]]),
    str: ("a text", [["a"], {"a": 1}]),
    list: ("a list", ["abc", {"a": 1}, 1]),
    dict: ("a mapping", ["abc", [1], 1]),
}
ELEMENTS = {int: "a", float: "a", str: 1}  # what a list of the type does not take


def options_classes() -> list[type[Options]]:
    """Return the options dataclasses of the package; those that are verl's too build models when they are made."""
    for module, _ in COMMANDS.values():
        import_module(module)
    assert schema.dataset_families()
    assert schema.model_kinds()
    assert run.NODES
    found: dict[type[Options], None] = {}
    waiting: list[type[Options]] = [Options]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        found |= dict.fromkeys(cls for cls in below if cls.__module__.startswith("verl_ext."))
    return [cls for cls in found if all(issubclass(base, Options) or base is object for base in cls.__mro__)]


def next_to(bound: float, kind: Any, direction: int) -> float:
    return int(bound) + direction if kind is int else math.nextafter(bound, direction * math.inf)


def wrong_values(option: Option) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield (value, what its line must name beside the key and the value)."""
    kind = get_origin(option.type) or option.type
    if option.required:
        yield from ((value, (option.meaning,)) for value in (None, ""))
    name, wrong = KINDS.get(kind, ("a value", []))
    if option.choices:
        yield from ((value, option.choices) for value in ("nonsense", 7))
    else:
        yield from ((value, (name,)) for value in wrong)
    if not (option.required or option.nullable or option.default is None):
        yield None, option.choices or (name,)
    element = (*getattr(option.type, "__args__", ()), None)[0]
    if kind is list and element in ELEMENTS:
        yield [ELEMENTS[element]], ("a list",)
    if option.least is not None:
        yield next_to(option.least, kind, -1), ("at least", option.least)
    if option.most is not None:
        yield next_to(option.most, kind, 1), ("at most", option.most)
    if option.above is not None:
        yield option.above, ("above", option.above)
    if kind is float:
        yield from ((value, ()) for value in (math.nan, math.inf))


def allowed(option: Option) -> Iterator[Any]:
    """Yield the default, each choice, null where it is one of the values, and the bounds."""
    kind = get_origin(option.type) or option.type
    yield from option.choices
    if not option.required:
        yield option.default
        yield from [None] * option.nullable
    yield from (bound for bound in (option.least, option.most) if bound is not None)
    if option.above is not None:
        yield next_to(option.above, kind, 1)


def lines(cls: type[Options], name: str, value: Any) -> list[str]:
    """Return the lines about one option of a class, of which only this option is given, without combinations."""
    alone = type("Alone", (cls,), {"problems": lambda self: ()})
    try:
        alone.read({name: value})
    except ValueError as error:
        key = f"{cls.prefix}.{name}" if cls.prefix else name
        return [line for line in str(error).splitlines() if line.split()[0] == key]
    return []


@pytest.mark.parametrize("cls", options_classes(), ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_an_option_refuses_what_it_does_not_take_and_takes_its_bounds_and_choices(cls):
    own = {name: option for name, option in options_of(cls).items() if not dataclasses.is_dataclass(option.type)}
    for name, option in own.items():
        for value, things in wrong_values(option):
            (line,) = lines(cls, name, value)
            got = line.rpartition("; got ")[2].partition(" (nearest")[0]
            assert got in (spell(value), spell(option.converted(value))), line
            assert "read" in vars(cls) or names(line, *things), (line, things)  # or it has its own sentence
        for value in allowed(option):
            if "read" in vars(cls) and value == {}:
                continue  # a mixture needs a source, which the default cannot name
            assert lines(cls, name, value) == []
