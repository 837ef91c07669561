"""The tables of other trainers' keys, `tables/NAME.yaml`: what becomes of each key.

A table has these sections, in which several keys stand between spaces:

    like        tables whose rules hold here too, without the keys of `without`
    free_like   tables whose keys need nothing here
    free, read  keys that need nothing; keys that the trainer's function reads
    shared      {a rule of shared.yaml: keys}
    ours        {keys: our key, or a rule}
    rules       further rules, each with its `keys`
    usual       {a key: what the trainer does without it}, where that is not nothing
    answers     {a loss of answers, or `others`: {its option: the keys that have it}}
"""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Rule:
    """The place of one key of another trainer.

    Attributes:
        to: our key, which gets its value; None: there is none, or the trainer's own function reads the key.
        values: {a value in lower case: ours, None for nothing}; others go over as they are.
        names: whether our key takes a list of names.
        lacks: why there is no equivalent; "" if the key needs none.
        differs: what is otherwise here, though the same is trained.
        unless: values in lower case that ask for nothing, beside null, false and empty ones.
        all_but: values in lower case that need nothing, where all others are said, false too.
        read: whether the trainer's function reads the key.
    """

    to: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    names: bool = False
    lacks: str = ""
    differs: str = ""
    unless: tuple[str, ...] = ()
    all_but: tuple[str, ...] = ()
    read: bool = False


@cache
def page(name: str) -> Mapping[str, Any]:
    """Return `tables/NAME.yaml` as it is written."""
    import yaml  # type: ignore[import-untyped]

    file = resources.files("verl_ext.tools.migrate").joinpath("tables", f"{name}.yaml")
    return dict(yaml.safe_load(file.read_text(encoding="utf-8")))


def _rule(row: str | Mapping[str, Any]) -> Rule:
    """Return the rule of a row, which may be our key alone."""
    fields: dict[str, Any] = {"to": row} if isinstance(row, str) else dict(row)
    fields.pop("keys", None)
    lists = {name: tuple(fields[name].split()) for name in ("unless", "all_but") if name in fields}
    return Rule(**(fields | lists))


@cache
def _shared() -> Mapping[str, Rule]:
    return {name: _rule(row) for name, row in page("shared").items()}


def reason(name: str) -> str:
    """Return why a rule of shared.yaml has no equivalent, or what is otherwise."""
    rule = _shared()[name]
    return rule.lacks or rule.differs


@cache
def values_of(section: str) -> Mapping[str, Any]:
    """Return {another trainer's name: ours} of a section of values.yaml."""
    rows = page("values")[section].items()
    return {name: ours for several, ours in rows for name in several.split()}


def section(name: str, of: str) -> dict[str, Any]:
    """Return a mapping of `tables/NAME.yaml`, with what the tables that it is like have there."""
    sections = page(name)
    inherited = (section(other, of) for other in sections.get("like", "").split())
    return dict(ChainMap(sections.get(of, {}), *inherited))


@cache
def key_table(name: str) -> Mapping[str, Rule]:
    """Return {key of another trainer: its rule} of `tables/NAME.yaml`."""
    sections = page(name)
    table: dict[str, Rule] = {}

    def add(rule: Rule, keys: str) -> None:
        table.update(dict.fromkeys(keys.split(), rule))

    for other in sections.get("like", "").split():
        table.update(key_table(other))
    for key in sections.get("without", "").split():
        del table[key]
    for other in sections.get("free_like", "").split():
        add(Rule(), " ".join(key_table(other)))
    add(Rule(), sections.get("free", ""))
    add(Rule(read=True), sections.get("read", ""))
    for name, keys in sections.get("shared", {}).items():
        add(_shared()[name], keys)
    for keys, row in sections.get("ours", {}).items():
        add(_rule(row), keys)
    for row in sections.get("rules", ()):
        add(_rule(row), row["keys"])
    return table
