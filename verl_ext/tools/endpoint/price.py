"""The prices of a model's tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from verl_ext.options import UsageError, choice_problem, first_line, must, reason_of, refuse
from verl_ext.tools.endpoint.answer import Usage

_KINDS = ("input", "cached", "output")


@dataclass(frozen=True)
class Price:
    """The prices of a million prompt, cached, and generated tokens."""

    input: float
    cached: float
    output: float

    def of(self, usage: Usage) -> float:
        """Return the cost of requests, in the currency of the prices."""
        prompt, cached, output = usage.as_tuple()
        return ((prompt - cached) * self.input + cached * self.cached + output * self.output) / 1e6


def read_price(path: str, model: str | None, key: str) -> Price:
    """Return a model's price from a file of prices; `key` is its option in messages.

    Cached tokens cost `input` by default. Raises `UsageError` if the file cannot be read, lacks the model, or has an
    unknown entry or a malformed number.
    """
    try:
        table = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = reason_of(error) if isinstance(error, OSError) else first_line(error)
        raise UsageError(must(key, "be a YAML file of prices", f"{path}: {why}")) from error
    if not isinstance(table, Mapping) or not all(isinstance(entry, Mapping) for entry in table.values()):
        raise UsageError(must(key, "map models to their prices, {MODEL: {input: 2.5, output: 10}}", repr(table)))
    try:
        refuse([choice_problem(f"{key}: the model", model, map(str, table))])
        entry = {"cached": table[model].get("input"), **table[model]}
        refuse(choice_problem(f"{key}.{model}", name, _KINDS) for name in entry)
        for name in _KINDS:
            value = entry.get(name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ValueError(must(f"{key}.{model}.{name}", "be a number of at least 0", value))
    except ValueError as error:
        raise UsageError(f"{first_line(error)}, in {path}") from error
    return Price(*(float(entry[name]) for name in _KINDS))
