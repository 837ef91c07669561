"""Expect the error line of a mistake: what it names and the values received, never its sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from verl_ext.options import spell


def names(line: str, *things: Any) -> bool:
    """Whether a line has each key, path or value as a whole: `data.max` is not in `data.max_tokens`."""
    return all(re.search(rf"(?<![\w.]){re.escape(spell(thing))}(?!\w|\.\w)", line) for thing in things)


@contextmanager
def refused(
    *things: Any, error: type[BaseException] = ValueError, alone: bool = True
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect one line that names the given keys, places, reasons and received values, in any order.

        with refused("data.max_tokens", 1):
            PackOptions(max_tokens=1)

    A value is looked for as users write it (null, true), and the reason code of a bad record beside its line, which
    is `raised.value` of what `as raised` gives. alone: no line of another mistake stands beside it.
    """
    with pytest.raises(error) as raised:
        yield raised
    lines, reason = str(raised.value).splitlines(), getattr(raised.value, "reason", None)
    assert len(lines) == 1 or not alone, f"the error is one line; got {lines}"
    missing = min(([each for each in things if each != reason and not names(line, each)] for line in lines), key=len)
    assert not missing, f"a line must name {missing} of {things}; got {lines}"
