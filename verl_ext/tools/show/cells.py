r"""The tokens of a document in groups that read as text.

ids      151644         872    198   a b   151645        a group is a token, or the byte tokens a b of one character
text     <|im_start|> | user | \n  | 你  | <|im_end|>
targets  no             no     no    no    yes
"""

from dataclasses import dataclass
from typing import Any

from verl_ext.commands.preview import CUT, decoded
from verl_ext.tools.show.documents import Row

MOST_BYTES = 16  # most tokens of a group, more than one character needs


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
        if CUT in text and end > begin + 1:  # the bytes form no character, so each is shown alone
            end = begin + 1
            text = decoded(row.input_ids, begin, end, tokenizer.decode)
        weight = weights[begin] if mask[begin] else 0.0
        cells.append(Cell(text, tuple(ids[begin:end]), mask[begin], is_special, weight))
        begin = end
    return cells


def _markers(tokenizer: Any) -> set[int]:
    """Return ids of added tokens, which may lack the special mark."""
    return set(getattr(tokenizer, "added_tokens_decoder", {}))
