"""The lines and pages that show a document, by its cells."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.text import Text

from verl_ext.options import one_line
from verl_ext.tools.show.cells import Cell, cells_of, names_of
from verl_ext.tools.show.documents import Row

# Cells of a run that are shown; the middle of a longer run is left out.
RUN_CELLS, RUN_CELLS_OF_PAGE = 400, 20_000
TARGET, SPECIAL, CONTEXT, REJECTED = "bold green", "magenta", "", "bold red"
WHOLE = slice(None)


def runs_of(cells: Sequence[Cell], part: slice = WHOLE) -> Iterator[tuple[int, str, list[Cell]]]:
    """Yield (first token's position, name, cells) of a part's runs.

    The cells of a run have equal target, weight and name.
    """
    position = sum(len(cell.ids) for cell in cells[: part.start or 0])
    named = zip(cells[part], names_of(cells)[part], strict=True)
    for (_, _, name), run in groupby(named, key=lambda pair: (pair[0].is_target, pair[0].weight, pair[1])):
        group = [cell for cell, _ in run]
        yield position, name, group
        position += sum(len(cell.ids) for cell in group)


def document_text(
    cells: Sequence[Cell],
    in_colour: bool,
    longest: int = RUN_CELLS,
    part: slice = WHOLE,
    target: str = TARGET,
) -> Text:
    """Return a part of a document with facts of its runs.

    Without colours, targets are marked [[…]]. A note replaces the middle of a run of more than `longest` cells.
    """
    text = Text()
    for position, name, run in runs_of(cells, part):
        tokens, first = sum(len(cell.ids) for cell in run), run[0]
        weight = f" ×{first.weight:g}" if first.is_target and first.weight != 1 else ""
        text.append(f"{position:>8,}  {tokens:>7,}  {name + weight:<12} ", "dim")
        line = Text()
        for cell in _shortened(run, longest):
            style = SPECIAL if cell.is_special and not cell.is_target else target if cell.is_target else CONTEXT
            line.append("\\n\n".join(map(one_line, cell.text.split("\n"))), style)
        if first.is_target and not in_colour:
            line = Text("[[").append_text(line).append("]]")
        indent = " " * 32
        for number, written in enumerate(line.split("\n", allow_blank=False)):
            text.append(indent if number else "").append_text(written).append("\n")
    return text


def tokens_text(cells: Sequence[Cell]) -> Text:
    """Return token groups with ids, as `hello·31373`; targets start with `*`."""
    text = Text()
    for cell in cells:
        shown = one_line(cell.text).replace(" ", "␣") or "∅"
        style = "underline green" if cell.is_target else SPECIAL if cell.is_special else CONTEXT
        mark = "*" if cell.is_target else ""
        text.append(f"{mark}{shown}", style).append(f"·{'+'.join(map(str, cell.ids))}", "dim").append("  ")
    text.append("\n")
    return text


def _shortened(run: list[Cell], longest: int) -> list[Cell]:
    if len(run) <= longest:
        return run
    half = longest // 2
    left_out = sum(len(cell.ids) for cell in run[half:-half])
    gap = Cell(f" … {left_out:,} tokens … ", (), run[0].is_target, False, run[0].weight)
    return [*run[:half], gap, *run[-half:]]


@dataclass(frozen=True)
class Drawing:
    """How documents are drawn.

    Attributes:
        tokenizer: the tokenizer of the documents.
        by_token: whether tokens stand one by one with their ids, and not as text.
        in_colour: whether targets are coloured; else they are marked [[…]].
        longest: the cells of a run that are shown.
    """

    tokenizer: Any
    by_token: bool
    in_colour: bool
    longest: int = RUN_CELLS

    def document(self, facts: str, row: Row) -> Text:
        """Return a document below its facts."""
        return self._head(facts).append_text(self._part(cells_of(row, self.tokenizer)))

    def unit(self, facts: str, rows: Sequence[Row], sides: Sequence[int], facts_of_answers: Sequence[str]) -> Text:
        """Return a prompt once, and the answers that follow it."""
        cells = [cells_of(row, self.tokenizer) for row in rows]
        alike = zip(*cells) if len(cells) > 1 else ()  # noqa: B905, answers differ in length
        fork = next((at for at, each in enumerate(alike) if each[0].is_target or len({*each}) > 1), None)
        if fork is None:  # one answer, or one that another begins with
            fork = next((at for at, cell in enumerate(cells[0]) if cell.is_target), min(map(len, cells)))
        text = self._head(facts).append("prompt\n", "bold").append_text(self._part(cells[0], slice(0, fork), CONTEXT))
        for line, own, side in zip(facts_of_answers, cells, sides, strict=True):
            style = REJECTED if side < 0 else TARGET
            text.append(f"{line}\n", style).append_text(self._part(own, slice(fork, None), style))
        return text

    def _head(self, facts: str) -> Text:
        return Text(no_wrap=not self.by_token).append(f"{facts}\n", "bold")

    def _part(self, cells: Sequence[Cell], part: slice = WHOLE, target: str = TARGET) -> Text:
        if self.by_token:
            return tokens_text(cells[part])
        return document_text(cells, self.in_colour, self.longest, part, target)
