r"""A document as groups of tokens that read as text, and as lines for a terminal or a page.

ids      151644 872 198 | 57668 53901 | 151645        one group for each text: 你 of two byte tokens is one
text     <|im_start|>user\n   你好       <|im_end|>
targets  no               no         yes
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from verl_ext.show.data import Row
from verl_ext.show.roles import names_of
from verl_ext.text.documents import CUT, decoded
from verl_ext.values import one_line

MOST_BYTES = 16  # tokens that may form one character, and then some
RUN_CELLS = 400  # of a run of like tokens, without `tokens`: its middle is left out beyond
TARGET, SPECIAL, CONTEXT = "bold green", "magenta", ""

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Cell:
    """A group of tokens, `ids`, that is one piece of text.

    weight: of the target, 1 without weights, 0 if it is none. is_special: one token that the tokenizer marks so.
    """

    text: str
    ids: tuple[int, ...]
    is_target: bool
    is_special: bool
    weight: float


def cells_of(row: Row, tokenizer: Any) -> list[Cell]:
    """Group a document's tokens: as few as read as text, never targets with others, or special tokens with text."""
    special = set(tokenizer.all_special_ids) | _markers(tokenizer)
    cells: list[Cell] = []
    ids, mask = row.input_ids.tolist(), row.loss_mask.tolist()
    weights = [1.0] * len(ids) if row.weights is None else row.weights.tolist()
    begin = 0
    while begin < len(ids):
        end = begin + 1
        is_special = ids[begin] in special
        text = decoded(row.input_ids, begin, end, tokenizer.decode)
        while CUT in text and not is_special and end < len(ids) and end - begin < MOST_BYTES:
            if ids[end] in special or mask[end] != mask[begin]:
                break
            end += 1
            text = decoded(row.input_ids, begin, end, tokenizer.decode)
        if CUT in text and end > begin + 1:  # bytes of no character: shown one by one
            end = begin + 1
            text = decoded(row.input_ids, begin, end, tokenizer.decode)
        weight = weights[begin] if mask[begin] else 0.0
        cells.append(Cell(text, tuple(ids[begin:end]), mask[begin], is_special, weight))
        begin = end
    return cells


def _markers(tokenizer: Any) -> set[int]:
    """Return the ids of added tokens, such as <think>, which not every tokenizer marks as special."""
    return set(getattr(tokenizer, "added_tokens_decoder", {}))


def runs_of(cells: Sequence[Cell]) -> Iterator[tuple[int, str, list[Cell]]]:
    """Yield (position of its first token, name, cells) of each run of equal targets, weights and names."""
    position = 0
    named = zip(cells, names_of(cells), strict=True)
    for (_, _, name), run in groupby(named, key=lambda pair: (pair[0].is_target, pair[0].weight, pair[1])):
        group = [cell for cell, _ in run]
        yield position, name, group
        position += sum(len(cell.ids) for cell in group)


def document_text(cells: Sequence[Cell], in_colour: bool) -> Text:
    """Return a document with a side column: position, tokens, role or kind, and weight of each run.

    Without colours targets are marked [[…]]. A long run is shortened in the middle, which is said.
    """
    text = Text()
    for position, name, run in runs_of(cells):
        tokens, first = sum(len(cell.ids) for cell in run), run[0]
        weight = f" ×{first.weight:g}" if first.is_target and first.weight != 1 else ""
        text.append(f"{position:>8,}  {tokens:>7,}  {name + weight:<12} ", "dim")
        line = Text()
        for cell in _shortened(run):
            style = SPECIAL if cell.is_special and not cell.is_target else TARGET if cell.is_target else CONTEXT
            line.append("\\n\n".join(map(one_line, cell.text.split("\n"))), style)
        if first.is_target and not in_colour:
            line = Text("[[").append_text(line).append("]]")
        indent = " " * 32
        for number, part in enumerate(line.split("\n", allow_blank=False)):
            text.append(indent if number else "").append_text(part).append("\n")
    return text


def tokens_text(cells: Sequence[Cell]) -> Text:
    """Return a cell for each group of tokens, with its ids: `hello·31373`; targets underlined, special tokens named."""
    text = Text()
    for cell in cells:
        shown = one_line(cell.text).replace(" ", "␣") or "∅"
        style = "underline green" if cell.is_target else SPECIAL if cell.is_special else CONTEXT
        mark = "*" if cell.is_target else ""
        text.append(f"{mark}{shown}", style).append(f"·{'+'.join(map(str, cell.ids))}", "dim").append("  ")
    text.append("\n")
    return text


def _shortened(run: list[Cell]) -> list[Cell]:
    if len(run) <= RUN_CELLS:
        return run
    half = RUN_CELLS // 2
    left_out = sum(len(cell.ids) for cell in run[half:-half])
    gap = Cell(f" … {left_out:,} tokens … ", (), run[0].is_target, False, run[0].weight)
    return [*run[:half], gap, *run[-half:]]


def first_difference(one: NDArray[Any], other: NDArray[Any]) -> int | None:
    """Return the first place at which two arrays differ or one of them ends; None if they are equal."""
    most = min(len(one), len(other))
    differs = np.flatnonzero(one[:most] != other[:most])
    if len(differs):
        return int(differs[0])
    return None if len(one) == len(other) else most
