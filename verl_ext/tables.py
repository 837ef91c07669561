"""Tables without borders, for terminals and pages or as plain text."""

import io
from collections.abc import Collection, Iterable, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

Row = dict[str, str]  # the cells of a row by column
_WIDE = 1 << 16  # columns of a text, whose lines are never wrapped


def plain_table(*columns: str, left: int | Collection[str] = 1) -> Table:
    """Return an empty table of numbers, except for the columns of words that `left` names or counts."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        is_words = number < left if isinstance(left, int) else name in left
        justify, header = "left" if is_words else "right", Text(name)
        table.add_column(header, justify=justify, overflow="fold", no_wrap=not is_words)  # type: ignore[arg-type]
    return table


def pivot(
    corner: str,
    cells: Mapping[tuple[str, str], RenderableType],
    columns: Iterable[str] = (),
    missing: str = "",
    left: int = 1,
) -> Table:
    """Return a table of cells by (row, column), in their order.

    columns: those that come first, in this order, with or without cells.
    """
    names = list(dict.fromkeys([*columns, *(column for _, column in cells)]))
    table = plain_table(corner, *names, left=left)
    for row in dict.fromkeys(row for row, _ in cells):
        values = (cells.get((row, column), missing) for column in names)
        table.add_row(Text(row), *(Text(value) if isinstance(value, str) else value for value in values))
    return table


def aligned(rows: Sequence[Row], left: Collection[str] = ()) -> str:
    """Format rows with equal keys as lines; `left` columns are words."""
    table = plain_table(*rows[0], left=left)
    for row in rows:
        table.add_row(*(Text(row[name]) for name in rows[0]))
    return as_text(table)


def as_text(table: Table) -> str:
    """Return a table as lines of text, without colours and trailing spaces."""
    console = Console(file=io.StringIO(), width=_WIDE, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
