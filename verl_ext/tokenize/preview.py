"""Written documents as text with their targets marked: most mistakes of a mask are seen at a glance.

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n[[hello<|im_end|>]]\\n

On a terminal the targets are in colour instead of `[[…]]`. A document is decoded in runs of targets and others, so that
a character of several tokens stays whole; long runs, and a document of many, are shortened in the middle.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from verl_ext.commands.errors import one_line

RUNS = 12  # of a document, at most
RUN_TOKENS = 96  # of a run, at most
CUT = "�"  # what bytes that are no character decode to
Run = tuple[bool, str]  # whether it is of targets; its text


def preview_of(input_ids: np.ndarray, loss_mask: np.ndarray, decode: Callable[[list[int]], str]) -> list[Run]:
    """The runs of a document of input_ids[T] and loss_mask[T], decoded and shortened."""
    borders = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist(), len(loss_mask)]
    spans = list(pairwise(borders))
    shown = [spans] if len(spans) <= RUNS else [spans[: RUNS // 2], spans[-RUNS // 2 :]]
    parts = [[(bool(loss_mask[a]), _run(input_ids, a, b, decode)) for a, b in part] for part in shown]
    if len(parts) == 1:
        return parts[0]
    return [*parts[0], (False, f" … {shown[1][0][0] - shown[0][-1][1]:,} tokens … "), *parts[1]]


def _run(ids: np.ndarray, start: int, stop: int, decode: Callable[[list[int]], str]) -> str:
    if stop - start <= RUN_TOKENS:
        return _decoded(ids, start, stop, decode)
    half = RUN_TOKENS // 2
    head = _decoded(ids, start, start + half, decode).rstrip(CUT)
    tail = _decoded(ids, stop - half, stop, decode).lstrip(CUT)
    return f"{head} … {stop - start - 2 * half:,} tokens … {tail}"


def _decoded(ids: np.ndarray, start: int, stop: int, decode: Callable[[list[int]], str]) -> str:
    """Tokens start..stop as they read after the one before, without which some tokenizers drop a leading space."""
    if start:
        before, text = decode(ids[start - 1 : start].tolist()), decode(ids[start - 1 : stop].tolist())
        if CUT not in before and text.startswith(before):
            return text[len(before) :]
    return decode(ids[start:stop].tolist())


def previews_text(previews: Mapping[str, Sequence[Sequence[Run]]], console: Any) -> str:
    """Every source's documents for a rich console: in colour where it has colours, else with `[[…]]`."""
    from rich.text import Text  # not for a command with a mistake in it

    in_colour = console.is_terminal and console.color_system and not console.no_color
    text = Text()
    for name, documents in previews.items():
        for number, runs in enumerate(documents, start=1):
            text.append(f"\n{name}, document {number}", style="bold").append(
                " (targets in green):\n" if in_colour else " (targets in [[…]]):\n", style="dim"
            )
            for is_target, run in runs:
                shown = "\\n\n".join(map(one_line, run.split("\n")))
                marked = shown if in_colour or not is_target else f"[[{shown}]]"
                text.append(marked, style="bold green" if is_target else "")
            text.append("" if text.plain.endswith("\n") else "\n")
    with console.capture() as capture:
        console.print(text, soft_wrap=True, highlight=False, end="")
    return capture.get()
