r"""The role or kind of target of each token group.

text    <|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\nsum\n</think>\n\n4<|im_end|>
name    user                              assistant              reasoning              answer  end of turn

Both come from the text: a role is a word after or inside a special token, and tags mark reasoning and tool calls.
Before the first role, and in a text that is not a chat, the names are "context" and "target".
"""

import re
from collections.abc import Sequence

from verl_ext.text.chat.parts import is_opened, tagged_blocks
from verl_ext.tools.show.cells import Cell

_ROLES = "system|developer|user|human|assistant|model|tool|function|observation|ipython|environment"
_INSIDE = re.compile(rf"(?<![a-z])({_ROLES})(?![a-z])", re.IGNORECASE)
_AFTER = re.compile(rf"\s*({_ROLES})(?![A-Za-z])", re.IGNORECASE)


def names_of(cells: Sequence[Cell]) -> list[str]:
    """Return each cell's name: a role, or a kind of target."""
    names: list[str] = []
    role, before, at = "context", "", 0
    while at < len(cells):
        end = at
        while end < len(cells) and cells[end].is_target == cells[at].is_target:
            end += 1
        run = cells[at:end]
        if run[0].is_target:
            names += ["target"] * len(run) if role == "context" else _kinds(run, before)
        else:
            for place, cell in enumerate(run, start=at):
                role = _role(cells, place, role) if cell.is_special else role
                names.append(role)
        before = (before + "".join(cell.text for cell in run))[-64:]
        at = end
    return names


def _role(cells: Sequence[Cell], place: int, role: str) -> str:
    """Return a special token's role, or the current one without any."""
    following = "".join(cell.text for cell in cells[place + 1 : place + 9])
    found = _INSIDE.search(cells[place].text) or _AFTER.match(following)
    return found[1].lower() if found else role


def _kinds(run: Sequence[Cell], before: str) -> list[str]:
    last = len(run)
    while last and (run[last - 1].is_special or not run[last - 1].text.strip()):
        last -= 1
    if not any(cell.is_special for cell in run[last:]):
        last = len(run)
    text = "".join(cell.text for cell in run[:last])
    borders = iter(tagged_blocks(text, 0, len(text), is_opened(before)) if text else [])
    border, names, at = next(borders, None), [], 0
    for cell in run[:last]:
        while border is not None and at >= border.stop:
            border = next(borders, None)
        names.append(border.kind.removeprefix("empty_").replace("_", " ") if border is not None else "answer")
        at += len(cell.text)
    return names + ["end of turn"] * (len(run) - last)
