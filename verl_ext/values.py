"""Values that users give: options with their types, defaults, checks and meanings, and the wording of errors.

A dataclass of options states each one once; `--help`, the configuration reference and the checks are made from it:

    @dataclass(frozen=True)
    class PackOptions(Options):
        prefix = "data"
        max_tokens: int = option(8192, "budget of a pack", least=2)
        strategy: str = option("best_fit", "how documents become packs", choices=("best_fit", "none"))

    PackOptions(strategy="best")    data.strategy must be one of best_fit, none; got best (nearest: best_fit)
"""

import dataclasses
import difflib
import functools
import math
import operator
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

MISSING = "???"  # what Hydra has for a value that must be given
REQUIRED: Any = None  # the default of an option that must be given: null until it is
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}

OptionsT = TypeVar("OptionsT", bound="Options")


class UsageError(ValueError):
    """A mistake on the command line or in the configuration: exit code 2."""


class DataError(ValueError):
    """Input that ends the run (a record that cannot be used, an unreadable file), or a dead worker: exit code 1."""


def option(
    default: Any,
    meaning: str,
    *,
    choices: Iterable[str] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    required: bool = False,
    resume: str = "may_change",
) -> Any:
    """A field of an :class:`Options` dataclass.

    Args:
        default: its value when it is not given; a list or dict is copied for every instance.
        meaning: one line for `--help` and the configuration reference.
        choices: the values that are allowed.
        least, most, above: bounds of a number; null passes where the annotation allows it.
        required: null and an empty value are refused.
        resume: "same" if a resumed run must have the value of its checkpoint, "may_grow" if only an extended stream
            may change it, "may_change" otherwise.
    """
    facts = {"choices": tuple(choices), "least": least, "most": most, "above": above, "required": required}
    metadata = {"meaning": meaning, **facts, "resume": resume}
    if isinstance(default, (list, dict, type)):
        factory = default if isinstance(default, type) else functools.partial(type(default), default)
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Options:
    """Base of options dataclasses, whose values are checked when one is made.

    prefix: the dotted key of the node that its fields stand in, "" for the top.
    """

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Raises ValueError with a line for each value that is not allowed."""
        refuse(list(filter(None, _field_problems(type(self), vars(self)))) or self.problems())

    def problems(self) -> Iterable[str | None]:
        """A line for each mistake that several options make together; asked when each of them is right by itself."""
        return ()

    def changed(self) -> dict[str, Any]:
        """The options whose values are not the defaults, by name."""
        return {
            name: getattr(self, name)
            for name, field in options_of(type(self)).items()
            if getattr(self, name) != field.default
        }

    @classmethod
    def read(cls: type[OptionsT], values: Mapping[str, Any], **given: Any) -> OptionsT:
        """The options that a mapping such as a config node holds; its other keys are left alone.

        given: options by name that win over the mapping's, but for None. "???" and verl's DictConfig are understood.
        Raises ValueError as the constructor does.
        """
        values = plain(values)
        named: dict[str, Any] = {}
        lines: list[str] = []
        for name, field in options_of(cls).items():
            value = given.get(name)
            if value is None:
                if name not in values:
                    continue
                value = None if values[name] == MISSING else values[name]
            if isinstance(field.type, type) and issubclass(field.type, Options) and isinstance(value, Mapping):
                try:
                    value = field.type.read(value)
                except ValueError as error:
                    lines += str(error).splitlines()
                    continue
            if value is not None or field.nullable or field.required:
                named[name] = field.converted(value)
        if lines:  # what is wrong between several options is not known without the nodes below
            refuse([*_field_problems(cls, named), *lines])
        return cls(**named)


@dataclasses.dataclass(frozen=True)
class Option:
    """One field of an options dataclass."""

    name: str
    type: Any  # without None
    nullable: bool
    default: Any
    meaning: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    required: bool = False
    resume: str = "may_change"

    def converted(self, value: Any) -> Any:
        """The value as its annotation has it: a whole number as a float, a name that reads as a number as a text."""
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if self.type is str and isinstance(value, (int, float)):
            return show(value)
        return value

    def problem(self, key: str, value: Any) -> str | None:
        """One line when the value is not allowed."""
        if self.required and value in (None, "", [], {}):
            return f"{key} is required: {self.meaning}; got {show(value)}"
        if value is None:
            return None if self.nullable or self.default is None else f"{key} must be {self._kind()}; got null"
        if self.choices:
            return choice_problem(key, value, self.choices)
        kind = typing.get_origin(self.type) or self.type
        if kind in _NAMES and not _is_a(value, kind):
            return f"{key} must be {self._kind()}; got {show(value)}"
        return self._bounds_problem(key, value) if kind in (int, float) else None

    def _kind(self) -> str:
        return (
            f"one of {', '.join(self.choices)}"
            if self.choices
            else _NAMES.get(typing.get_origin(self.type) or self.type, "a value")
        )

    def _bounds_problem(self, key: str, value: float) -> str | None:
        bounds = {"at least": self.least, "above": self.above, "at most": self.most}
        holds = {"at least": operator.ge, "above": operator.gt, "at most": operator.le}
        for words, bound in bounds.items():
            if bound is not None and not holds[words](value, bound):
                return f"{key} must be {words} {show(bound)}; got {show(value)}"
        return None if math.isfinite(value) else f"{key} must be finite; got {show(value)}"


def options_of(cls: Any) -> dict[str, Option]:
    """The fields of a dataclass, verl's included, in their order."""
    return _options_of(cls)


@functools.cache  # below: mypy takes the type of a dataclass for one that cannot be hashed
def _options_of(cls: Any) -> dict[str, Option]:
    hints = typing.get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        hint = hints[field.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        members = typing.get_args(hint) if is_union else (hint,)
        kinds = [member for member in members if member is not type(None)]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        nullable = type(None) in members or default is None  # verl writes `micro_batch_size_per_gpu: int = None`
        kind = kinds[0] if len(kinds) == 1 else Any
        found[field.name] = Option(field.name, kind, nullable, default, **field.metadata)
    return found


def type_problems(cls: type, values: Mapping[str, Any], prefix: str) -> list[str]:
    """One line for each number or flag below the node `prefix` that is not of the type its dataclass field names."""
    found: list[str | None] = []
    for name, field in options_of(cls).items():
        if field.type in (int, float, bool) and name in values:
            found.append(field.problem(f"{prefix}.{name}", values[name]))
    return list(filter(None, found))


def plain(config: Any) -> Any:
    """A config node as plain dicts and lists, what it refers to resolved; anything else as it is."""
    from omegaconf import OmegaConf  # here: not every program that checks values has configs

    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def refuse(problems: Iterable[str | None]) -> None:
    """Raises ValueError with a line for each problem that is not None, repeated lines left out."""
    lines = list(dict.fromkeys(problem for problem in problems if problem))
    if lines:
        raise ValueError("\n".join(lines))


def choice_problem(key: str, value: object, options: Iterable[str]) -> str | None:
    """One line when value is none of the options: the options, the value received and the nearest; None when it is."""
    options = list(options)
    if value in options:
        return None
    nearest = nearest_name(str(value), options) if len(options) > 1 else None
    return f"{key} must be {'one of ' * (len(options) > 1)}{', '.join(options)}; got {show(value)}" + (
        f" (nearest: {nearest})" if nearest else ""
    )


def check_choice(key: str, value: object, choices: Iterable[str]) -> None:
    """Raises ValueError with :func:`choice_problem`'s line."""
    refuse([choice_problem(key, value, choices)])


def whole_number(key: str, value: object, least: int, most: int | None = None) -> int:
    """`value` as an int; ValueError that names `key` when it is no whole number, below `least` or above `most`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{key} must be a whole number; got {value!r}")
    if number < least:
        raise ValueError(f"{key} must be at least {least}; got {number}")
    if most is not None and number > most:
        raise ValueError(f"{key} must be at most {most}; got {number}")
    return number


def nearest_name(name: str, options: Iterable[str]) -> str | None:
    """The option closest to name by difflib's ratio, None when nothing is close."""
    found = difflib.get_close_matches(name, list(options), n=1, cutoff=0.6)
    return found[0] if found else None


def nearest_key(key: str, keys: Iterable[str]) -> str | None:
    """The dotted key closest to key: the same last name elsewhere, a like one of the same node, then any like key."""
    keys = sorted(keys, key=lambda other: (other.count("."), other))  # the shallowest key of a name stands for it
    node, _, name = key.rpartition(".")
    by_name: dict[str, str] = {}
    siblings: dict[str, str] = {}
    for other in keys:
        parent, _, last = other.rpartition(".")
        by_name.setdefault(last, other)
        if parent == node:
            siblings[last] = other
    if name in by_name:
        return by_name[name]
    if close := nearest_name(name, siblings):
        return siblings[close]
    if found := difflib.get_close_matches(key, keys, n=1, cutoff=0.75):
        return found[0]
    close = nearest_name(name, by_name)
    return by_name[close] if close else None


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested mappings; an empty one is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def show(value: object) -> str:
    """A received value as the user would write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if value == "" else str(value)


def one_line(text: str) -> str:
    """Text on one line that any terminal or file takes: characters that do not print are written as Python does."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """An exception's message as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def file_of(error: OSError) -> str | None:
    """The file that an error names; a write that fails names none."""
    return os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else None


def reason_of(error: OSError) -> str:
    """Why, without number and file: "No space left on device"."""
    return error.strerror or first_line(error)


def _field_problems(cls: type[Options], values: Mapping[str, Any]) -> Iterable[str | None]:
    for name, field in options_of(cls).items():
        if name in values:
            yield field.problem(f"{cls.prefix}.{name}" if cls.prefix else name, values[name])


def _is_a(value: Any, kind: Any) -> bool:
    if kind is bool or kind is str:
        return isinstance(value, kind)
    if kind is list:
        return isinstance(value, (list, tuple))
    if isinstance(value, bool):
        return False
    if kind is float and isinstance(value, float):
        return True
    try:
        operator.index(value)  # numpy's whole numbers too
    except TypeError:
        return False
    return True
