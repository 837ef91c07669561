r"""Documents as text with targets marked, coloured on terminals: wrong masks show.

<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[hello<|im_end|>]]\n
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from verl_ext.options import one_line

RUNS = 12  # the maximum number of runs of a document in a preview
RUN_TOKENS = 96  # the maximum number of tokens of a run in a preview
CUT = "�"  # the decoded form of bytes that are not a character
Run = tuple[bool, str]  # True for a run of targets; its text
Decode = Callable[[list[int]], str]


def preview_of(input_ids: np.ndarray, loss_mask: np.ndarray, decode: Decode) -> list[Run]:
    """Decode a document's runs of targets and of other tokens.

    Long runs, and documents of many runs, are shortened in the middle.
    """

    def run(start: int, stop: int) -> str:
        if stop - start <= RUN_TOKENS:
            return decoded(input_ids, start, stop, decode)
        half = RUN_TOKENS // 2
        head = decoded(input_ids, start, start + half, decode)
        tail = decoded(input_ids, stop - half, stop, decode)
        return f"{head.rstrip(CUT)} … {stop - start - 2 * half:,} tokens … {tail.lstrip(CUT)}"

    borders = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist(), len(loss_mask)]
    spans, half = list(pairwise(borders)), RUNS // 2
    kept = spans if len(spans) <= RUNS else spans[:half] + spans[-half:]
    shown = [(bool(loss_mask[start]), run(start, stop)) for start, stop in kept]
    if len(spans) > RUNS:
        shown.insert(half, (False, f" … {spans[-half][0] - spans[half - 1][1]:,} tokens … "))
    return shown


def decoded(ids: np.ndarray, start: int, stop: int, decode: Decode) -> str:
    """Return the text of tokens start..stop-1."""
    if start:  # some tokenizers drop a leading space unless a token stands before
        before, text = decode(ids[start - 1 : start].tolist()), decode(ids[start - 1 : stop].tolist())
        if CUT not in before and text.startswith(before):
            return text[len(before) :]
    return decode(ids[start:stop].tolist())


def previews_text(previews: Mapping[str, Sequence[Sequence[Run]]], console: Any) -> str:
    """Format documents for a rich console, in colour or with `[[…]]`."""
    from rich.text import Text  # imported here: a command that only reports a mistake does not need it

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
