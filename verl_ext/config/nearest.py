"""Which known name a mistyped one was meant to be."""

import difflib
from collections.abc import Iterable


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


def choice_problem(key: str, value: object, options: Iterable[str]) -> str | None:
    """One line when value is none of the options: the options, the value received and the nearest; None when it is."""
    options = list(options)
    if value in options:
        return None
    line = f"{key} must be one of {', '.join(options)}; got {show(value)}"
    nearest = nearest_name(str(value), options)
    return f"{line} (nearest: {nearest})" if nearest else line


def show(value: object) -> str:
    """A received value as the user would write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if value == "" else str(value)
