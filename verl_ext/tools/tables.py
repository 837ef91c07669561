"""Tables of tools for a terminal and a page."""

from rich.table import Table


def plain_table(*columns: str, left: int = 1) -> Table:
    """Return an empty table without borders; the first `left` columns are words, the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        is_words = number < left
        table.add_column(name, justify="left" if is_words else "right", overflow="fold", no_wrap=not is_words)
    return table
