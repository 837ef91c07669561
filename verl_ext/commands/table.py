"""Rows as a text table."""

from collections.abc import Collection, Sequence

Row = dict[str, str]


def aligned(rows: Sequence[Row], left: Collection[str]) -> str:
    """Rows of the same keys as lines under a header: the columns named in `left` to the left, numbers to the right."""
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}

    def line(cells: Row) -> str:
        padded = (cells[k].ljust(w) if k in left else cells[k].rjust(w) for k, w in widths.items())
        return "  ".join(padded).rstrip()

    return "\n".join([line({key: key for key in widths}), *map(line, rows)])
