"""Checks of single values: each returns the value or raises one line that names its key."""

import operator
from collections.abc import Iterable
from difflib import get_close_matches


def check_choice(key: str, value: object, choices: Iterable[str]) -> str:
    """`value` when it is one of `choices`; else ValueError that names `key`, the choices and the nearest one."""
    names = list(choices)
    if isinstance(value, str) and value in names:
        return value
    nearest = get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    raise ValueError(f"{key} must be one of {', '.join(names)}; got {value!r}{hint}")


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
