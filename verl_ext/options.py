"""Options: types, defaults, checks, meanings, and the wording of errors.

A dataclass defines each option once; `--help`, the configuration reference and the checks derive from it:

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
import numbers
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import ge, gt, index, le
from typing import Any, ClassVar, TypeVar

MISSING = "???"  # Hydra's marker of a value that must be given
_FEW_KEYS = 20  # that an error lists if none of them is near
REQUIRED: Any = None  # the default of an option that must be given
# The types whose values are checked: {annotation: (words in errors, allowed classes)}.
_KINDS: dict[Any, tuple[str, Any]] = {
    int: ("a whole number", numbers.Integral),  # also numpy's integers, but not true and false
    float: ("a number", numbers.Real),
    bool: ("true or false", bool),
    str: ("a text", str),
    list: ("a list", (list, tuple)),
    dict: ("a mapping of names to values", Mapping),
}

OptionsT = TypeVar("OptionsT", bound="Options")


class UsageError(ValueError):
    """A mistake in command line or configuration; exit code 2."""


class DataError(ValueError):
    """Unusable input, or a dead worker; exit code 1."""


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
    """Return a field of an :class:`Options` dataclass.

    Args:
        default: the value if the option is not given; a list or dict is copied for every instance.
        meaning: one line for `--help` and the configuration reference.
        choices: the allowed values.
        least: the lowest allowed number; null passes if the annotation allows it.
        most: the highest allowed number.
        above: a number that the value must exceed.
        required: whether null and empty values are refused.
        resume: "same" if a resumed run must have the value of its checkpoint, "may_grow" if only an extended stream
            may change it, "ahead" if it may change for future steps, "may_change" otherwise.
    """
    bounds = {"least": least, "most": most, "above": above}
    metadata = {"meaning": meaning, "choices": tuple(choices), **bounds, "required": required, "resume": resume}
    if isinstance(default, (list, dict, type)):
        factory = default if isinstance(default, type) else functools.partial(type(default), default)
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Options:
    """The base class of options dataclasses, which check their values at construction.

    prefix: the dotted key of the config node that holds the fields, "" for the top level. gone: {a key of an earlier
    version: what does its work}.
    """

    prefix: ClassVar[str] = ""
    gone: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Raise ValueError with a line for each value that is not allowed."""
        refuse(self._field_problems(vars(self)) or self.problems())

    @classmethod
    def _field_problems(cls, values: Mapping[str, Any]) -> list[str]:
        prefix = f"{cls.prefix}." if cls.prefix else ""
        fields = ((name, field) for name, field in options_of(cls).items() if name in values)
        return [line for name, field in fields if (line := field.problem(f"{prefix}{name}", values[name]))]

    def problems(self) -> Iterable[str | None]:
        """Return a line for each invalid combination of valid options."""
        return ()

    def changed(self) -> dict[str, Any]:
        """Return the options whose values are not the defaults, by name."""
        fields = options_of(type(self)).items()
        return {name: getattr(self, name) for name, field in fields if getattr(self, name) != field.default}

    @classmethod
    def read(cls: type[OptionsT], values: Mapping[str, Any], **overrides: Any) -> OptionsT:
        """Read the options from a mapping and ignore its other keys.

        overrides: options by name that override the mapping's unless they are None. "???" and DictConfig are accepted.
        Raises ValueError as the constructor does.
        """
        values = {**plain(values), **{name: value for name, value in overrides.items() if value is not None}}
        options: dict[str, Any] = {}
        below: list[str] = []  # mistakes in the nodes below
        for name, field in options_of(cls).items():
            if name not in values:
                continue
            value = None if values[name] == MISSING else values[name]
            if field.is_node and isinstance(value, Mapping):
                try:
                    value = field.type.read(value)
                except ValueError as error:
                    below += str(error).splitlines()
                    continue
            options[name] = field.converted(value)
        if below:  # combinations of options can only be checked if each option is valid
            refuse([*cls._field_problems(options), *below])
        return cls(**options)


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

    @property
    def is_node(self) -> bool:
        """Whether it is a node of further options."""
        return isinstance(self.type, type) and issubclass(self.type, Options)

    def converted(self, value: Any) -> Any:
        """Convert ints to floats and numbers to texts, as annotated."""
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        return spell(value) if self.type is str and isinstance(value, (int, float)) else value

    def problem(self, key: str, value: Any) -> str | None:
        """Return one line if the value is not allowed."""
        if self.required and value in (None, "", [], {}):
            return f"{key} is required: {self.meaning}; got {spell(value)}"
        kind = typing.get_origin(self.type) or self.type
        words, classes = ("given by its keys", kind) if self.is_node else _KINDS.get(kind, ("a value", object))
        if value is None:
            words = f"one of {', '.join(self.choices)}" if self.choices else words
            return None if self.nullable or self.default is None else must(key, f"be {words}", None)
        if self.choices:
            return choice_problem(key, value, self.choices)
        if not isinstance(value, classes) or (kind in (int, float) and isinstance(value, bool)):
            return must(key, f"be {words}", value)
        of = (*typing.get_args(self.type), Any)[0] if kind is list else Any
        if of in _KINDS and any(Option(key, of, False, ()).problem(key, each) for each in value):
            return must(key, f"be a list of {_KINDS[of][0].removeprefix('a ')}s", value)
        if kind not in (int, float):
            return None
        bounds = (("at least", ge, self.least), ("above", gt, self.above), ("at most", le, self.most))
        for words, holds, bound in bounds:
            if bound is not None and not holds(value, bound):
                return must(key, f"be {words} {spell(bound)}", value)
        return None if math.isfinite(value) else must(key, "be finite", value)


def options_of(cls: Any) -> dict[str, Option]:
    """Return the fields of a dataclass, also of verl's, in their order."""
    return _options_of(cls)


@functools.cache  # separate from options_of, because mypy takes the type of a dataclass to be unhashable
def _options_of(cls: Any) -> dict[str, Option]:
    hints = typing.get_type_hints(cls)
    options = {}
    for field in (field for field in dataclasses.fields(cls) if field.init):
        hint = hints[field.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        members = typing.get_args(hint) if is_union else (hint,)
        kinds = [member for member in members if member is not type(None)]
        has_factory = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if has_factory else field.default  # type: ignore[misc]
        nullable = type(None) in members or default is None  # verl writes `micro_batch_size_per_gpu: int = None`
        kind = kinds[0] if len(kinds) == 1 else Any
        options[field.name] = Option(field.name, kind, nullable, default, **field.metadata)
    return options


def default_values(cls: type[Options]) -> dict[str, Any]:
    """Return {name: default} of options, nodes below as mappings."""
    fields = options_of(cls).items()
    return {name: default_values(e.type) if e.is_node else e.default for name, e in fields}


def type_problems(cls: type, values: Mapping[str, Any], prefix: str, skipped: Iterable[str] = ()) -> list[str]:
    """Return a line for each mistyped value at or below `prefix`.

    cls: a dataclass, also of verl. skipped: the fields that are checked elsewhere.
    """
    lines: list[str | None] = []
    for name, field in options_of(cls).items():
        if name not in values or name in skipped:
            continue
        key, value = f"{prefix}.{name}", values[name]
        if dataclasses.is_dataclass(field.type) and isinstance(value, Mapping):
            lines += type_problems(typing.cast(type, field.type), value, key)
        elif dataclasses.is_dataclass(field.type):
            lines.append(must(key, "be given by its keys", value))
        elif (typing.get_origin(field.type) or field.type) in _KINDS:
            lines.append(field.problem(key, field.converted(value)))
    return [line for line in lines if line]


def plain(config: Any) -> Any:
    """Return a config node as plain values, its interpolations resolved; other values unchanged."""
    from omegaconf import OmegaConf  # here, because not every program that checks values uses configs

    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def refuse(problems: Iterable[str | None]) -> None:
    """Raise ValueError with a line for each distinct problem, if any."""
    lines = list(dict.fromkeys(problem for problem in problems if problem))
    if lines:
        raise ValueError("\n".join(lines))


def choice_problem(key: str, value: object, options: Iterable[str]) -> str | None:
    """Return an error line with the nearest option; None for an option."""
    options = list(options)
    if value in options:
        return None
    hint = nearest_hint(str(value), options) if len(options) > 1 else ""
    return must(key, f"be {'one of ' * (len(options) > 1)}{', '.join(options)}", value) + hint


def check_choice(key: str, value: object, choices: Iterable[str]) -> None:
    """Raise ValueError with :func:`choice_problem`'s line."""
    refuse([choice_problem(key, value, choices)])


def whole_number(key: str, value: Any, least: int, most: int | None = None) -> int:
    """Return `value` as an int from `least` to `most`; else raise ValueError."""
    refuse([Option(key, int, False, least, least=least, most=most).problem(key, value)])
    return index(value)


def nearest_name(name: str, options: Iterable[str]) -> str | None:
    """Return the option closest to `name`, or None if none is close."""
    names = difflib.get_close_matches(name, list(options), n=1, cutoff=0.6)
    return names[0] if names else None


def nearest_hint(name: str, options: Iterable[str]) -> str:
    """Return " (nearest: …)" for an error line, or ""."""
    nearest = nearest_name(name, options)
    return f" (nearest: {nearest})" if nearest else ""


def nearest_key(key: str, keys: Iterable[str]) -> str | None:
    """Return the dotted key closest to `key`, or None.

    The preference is the same last name elsewhere, a similar name in the same node, a similar key, a similar last name.
    """
    keys = sorted(keys, key=lambda other: (other.count("."), other), reverse=True)
    node, _, name = key.rpartition(".")
    by_name = {other.rpartition(".")[2]: other for other in keys}  # the shallowest key with each last name
    siblings = {other.rpartition(".")[2]: other for other in keys if other.rpartition(".")[0] == node}
    if name in by_name:
        return by_name[name]
    if close := nearest_name(name, siblings):
        return siblings[close]
    if names := difflib.get_close_matches(key, keys, n=1, cutoff=0.75):
        return names[0]
    close = nearest_name(name, by_name)
    return by_name[close] if close else None


def unknown(
    key: str, keys: Iterable[str], node: str = "", owner: str = "", renamed: Mapping[str, str] | None = None
) -> str:
    """Return an unknown key's error line; `keys` stand below `node`.

    owner: what has the keys, if the key alone does not say it. renamed: {an old key: its current name}.
    """
    keys, above = list(keys), f"{node}." if node else ""
    line = f"unknown key {above}{key}" + (f" of {owner}" if owner else "")
    if nearest := nearest_key(key, keys):
        return f"{line}; nearest: {above}{(renamed or {}).get(nearest, nearest)}"
    few = ", ".join(f"{above}{name}" for name in keys) if len(keys) <= _FEW_KEYS else ""
    return f"{line}; known keys: {few}" if few else line


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value), with empty mappings as values."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def must(key: str, requirement: str, got: object) -> str:
    """Word an error in one line: `key must requirement; got value`."""
    return f"{key} must {requirement}; got {one_line(spell(got))}"


def spell(value: object) -> str:
    """Return a value as users write it: null, true, an empty text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if value == "" else str(value)


def one_line(text: str) -> str:
    """Return a text as one line, with unprintable characters escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shortened(names: Sequence[str], most: int) -> str:
    """Join the first names, and count the others: `a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, with the next one after a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])


def file_of(error: OSError) -> str | None:
    """Return the file that an error names, None for failed writes."""
    return os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else None


def reason_of(error: OSError) -> str:
    """Return an error's reason without its number and file."""
    return error.strerror or first_line(error)
