"""The output of `verl-ext show`: terminal, file or pipe."""

import os
import sys
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.text import Text

WIDTH = 100  # columns of output to a file or a pipe


def terminal() -> Console:
    """Return the console; without a terminal, WIDTH columns unless COLUMNS is set."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH, highlight=False)


def has_colours() -> bool:
    """Return whether the console shows colours."""
    console = terminal()
    return bool(console.is_terminal and console.color_system and not console.no_color)


def print_parts(parts: Iterable[RenderableType]) -> None:
    """Print tables and texts with one empty line between them."""
    console, needs_line = terminal(), False
    for part in parts:
        if needs_line:
            console.print()
        text = part if isinstance(part, Text) else Text()
        console.print(part, soft_wrap=bool(text.no_wrap))
        needs_line = not text.plain.endswith("\n")
