"""The tables of other trainers' keys, `tables/NAME.yaml`: what becomes of each key.

A table has these sections, in which several keys stand between spaces:

    like          tables whose rules hold here too, without the keys of `without`
    free_like     tables whose keys need nothing here
    free, read    keys that need nothing; keys that the trainer's function reads
    read_unless   {keys that the function reads: values that need nothing}
    shared        {a rule of shared.yaml: keys}
    ours          {keys: our key}, or {keys: {to: our key, values: {theirs: ours}, names: whether it takes names}}
    lacking       why there is no equivalent, the keys, and by `unless` the values that ask for nothing
    differing     what is otherwise here; `unless` as before
    differing_unless   what is otherwise here with every value but the usual ones
    usual         {a key: what the trainer does without it}, where that is not nothing
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
        lacks: why there is no equivalent; "" if the key needs none.
        differs: what is otherwise here, though the same is trained.
        idle: values in lower case that ask for nothing, beside null, false and empty ones.
        usual: values in lower case that need nothing, where all others are said, false too.
        is_read: whether the trainer's function reads the key.
        is_names: whether our key takes a list of names.
    """

    to: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    lacks: str = ""
    differs: str = ""
    idle: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    is_read: bool = False
    is_names: bool = False


FREE, READ = Rule(), Rule(is_read=True)


@cache
def page(name: str) -> Mapping[str, Any]:
    """Return `tables/NAME.yaml` as it is written."""
    import yaml  # type: ignore[import-untyped]

    file = resources.files("verl_ext.tools.migrate").joinpath("tables", f"{name}.yaml")
    return dict(yaml.safe_load(file.read_text(encoding="utf-8")))


def _ours(to: str | Mapping[str, Any]) -> Rule:
    row: Mapping[str, Any] = {"to": to} if isinstance(to, str) else to
    return Rule(to=row["to"], values=row.get("values", {}), is_names=row.get("names", False))


@cache
def _shared() -> Mapping[str, Rule]:
    rows = page("shared").items()
    return {
        name: _ours(row)
        if "to" in row
        else Rule(lacks=row.get("lacks", ""), differs=row.get("differs", ""), idle=tuple(row.get("unless", "").split()))
        for name, row in rows
    }


def reason(name: str) -> str:
    """Return why a rule of shared.yaml has no equivalent, or what is otherwise."""
    rule = _shared()[name]
    return rule.lacks or rule.differs


@cache
def values_of(section: str) -> Mapping[str, Any]:
    """Return {another trainer's name: ours} of a section of values.yaml."""
    rows = page("values")[section].items()
    return {name: ours for several, ours in rows for name in several.split()}


@cache
def usual_values(name: str) -> Mapping[str, Any]:
    """Return {key of another trainer: what it does without that key} of `tables/NAME.yaml`."""
    sections = page(name)
    inherited = (usual_values(other) for other in sections.get("like", "").split())
    return dict(ChainMap(sections.get("usual", {}), *inherited))


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
        add(FREE, " ".join(key_table(other)))
    add(FREE, sections.get("free", ""))
    add(READ, sections.get("read", ""))
    for keys, usual in sections.get("read_unless", {}).items():
        add(Rule(is_read=True, usual=tuple(usual.split())), keys)
    for rule, keys in sections.get("shared", {}).items():
        add(_shared()[rule], keys)
    for keys, ours in sections.get("ours", {}).items():
        add(_ours(ours), keys)
    for row in sections.get("lacking", ()):
        add(Rule(lacks=row["why"], idle=tuple(row.get("unless", "").split())), row["keys"])
    for row in sections.get("differing", ()):
        add(Rule(differs=row["why"], idle=tuple(row.get("unless", "").split())), row["keys"])
    for row in sections.get("differing_unless", ()):
        add(Rule(differs=row["why"], usual=tuple(row["unless"].split())), row["keys"])
    return table
