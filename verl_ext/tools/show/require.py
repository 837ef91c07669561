"""Requirements on an audit, for CI: `require='no_target=0,duplicates<0.1%'`.

A name is a finding of the audit; a number counts documents or records, a number with % is a share of those checked.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from verl_ext.options import UsageError, choice_problem, must
from verl_ext.tools.show.audit import CHECKS

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_TERM = re.compile(r"\s*(\w+)\s*(<=|>=|<|>|=)\s*(\d+(?:\.\d+)?)\s*(%?)\s*")


class Requirement(NamedTuple):
    """A finding and the bound on its count or its share."""

    name: str
    holds: Callable[[float, float], bool]
    bound: float
    is_share: bool
    text: str


def read_requirements(text: str) -> list[Requirement]:
    """Read a comma-separated list; raise UsageError for a wrong term."""
    found = []
    for term in text.split(","):
        match = _TERM.fullmatch(term)
        if match is None:
            raise UsageError(must("require", "be a list of terms like no_target=0 or duplicates<0.1%", term))
        name, sign, number, percent = match.groups()
        if problem := choice_problem("require", name, CHECKS):
            raise UsageError(problem)
        bound = float(number) / 100 if percent else float(number)
        found.append(Requirement(name, _OPERATORS[sign], bound, bool(percent), term.strip()))
    return found


def broken(requirements: list[Requirement], audit: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each requirement unmet or not checked."""
    for each in requirements:
        finding = audit["findings"].get(each.name)
        if finding is None:
            reason = audit["not_checked"].get(each.name, "the data does not have it")
            yield f"{each.text}: {each.name} was not checked: {reason}"
        elif not each.holds(finding["share"] if each.is_share else finding["count"], each.bound):
            yield f"{each.text}: got {finding['count']:,} of {finding['of']:,} ({finding['share']:.3%})"
