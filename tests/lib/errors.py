"""Expect the error line of a mistake: what it names and the values received, never its sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from verl_ext.options import spell


def names(line: str, thing: Any) -> bool:
    """Whether a line has a key, a path or a value as a whole: `data.max` is not in `data.max_tokens`."""
    return re.search(rf"(?<![\w.]){re.escape(spell(thing))}(?![\w]|\.\w)", line) is not None


@contextmanager
def refused(*things: Any, error: type[Exception] = ValueError) -> Iterator[pytest.ExceptionInfo]:
    """Expect one line that names the given keys, places, reasons and received values, in any order.

        with refused("data.max_tokens", 1):
            PackOptions(max_tokens=1)

    A value is looked for as users write it (null, true). The line itself is `raised.value` of what `as raised` gives.
    """
    with pytest.raises(error) as raised:
        yield raised
    line = str(raised.value)
    assert len(line.splitlines()) == 1, f"an error is one line; got {line!r}"
    missing = [thing for thing in things if not names(line, thing)]
    assert not missing, f"the line must name {missing}; got {line!r}"
