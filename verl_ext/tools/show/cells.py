r"""The tokens of a document in groups that read as text, and the role or kind of target of each group.

ids      151644         872    198   a b   151645        a group is a token, or the byte tokens a b of one character
text     <|im_start|> | user | \n  | 你  | <|im_end|>
targets  no             no     no    no    yes
name     user           user   user  user  end of turn

Names come from the text: a role is a word after or inside a special token, and tags mark reasoning and tool calls.
Before the first role, and in a text that is not a chat, they are "context" and "target".
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.commands.preview import CUT, decoded
from verl_ext.text.chat.parts import is_opened, tagged_blocks
from verl_ext.tools.show.documents import Row

MOST_BYTES = 16  # most tokens of a group, more than one character needs
_ROLES = "system|developer|user|human|assistant|model|tool|function|observation|ipython|environment"
_INSIDE = re.compile(rf"(?<![a-z])({_ROLES})(?![a-z])", re.IGNORECASE)
_AFTER = re.compile(rf"\s*({_ROLES})(?![A-Za-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Cell:
    """A group of tokens, `ids`, that decodes to one piece of text.

    `weight` is 0 if it is not a target, and 1 if the data has no weights. `is_special` marks special and added tokens.
    """

    text: str
    ids: tuple[int, ...]
    is_target: bool
    is_special: bool
    weight: float


def cells_of(row: Row, tokenizer: Any) -> list[Cell]:
    """Group tokens into the smallest readable pieces of one kind each.

    A piece mixes neither targets nor special tokens with others.
    """
    # Added tokens may lack the special mark.
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
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
        if CUT in text and end > begin + 1:  # the bytes form no character, so each is shown alone
            end = begin + 1
            text = decoded(row.input_ids, begin, end, tokenizer.decode)
        weight = weights[begin] if mask[begin] else 0.0
        cells.append(Cell(text, tuple(ids[begin:end]), mask[begin], is_special, weight))
        begin = end
    return cells


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
