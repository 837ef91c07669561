"""Which known name a mistyped one was meant to be."""

import difflib
from collections.abc import Iterable


def nearest_name(name: str, options: Iterable[str]) -> str | None:
    """The option closest to name by difflib's ratio, None when nothing is close."""
    found = difflib.get_close_matches(name, list(options), n=1, cutoff=0.5)
    return found[0] if found else None


def nearest_key(key: str, keys: Iterable[str]) -> str | None:
    """The dotted key closest to key: below the same node first, then anywhere, then by the last name alone."""
    keys = sorted(keys)
    node, _, name = key.rpartition(".")
    siblings = [other for other in keys if node and other.rpartition(".")[0] == node]
    by_name: dict[str, str] = {}
    for other in keys:  # the shallowest key of a name stands for it
        last = other.rpartition(".")[2]
        if last not in by_name or other.count(".") < by_name[last].count("."):
            by_name[last] = other
    if sibling := nearest_name(key, siblings):
        last = sibling.rpartition(".")[2]
        # The common node alone makes siblings alike, so the names must be alike as well.
        if nearest_name(name, [last]):
            return sibling
    if name in by_name:
        return by_name[name]
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    if close:
        return close[0]
    last_name = nearest_name(name, by_name)
    return by_name[last_name] if last_name else None


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
