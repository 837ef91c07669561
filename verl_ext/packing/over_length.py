"""What becomes of documents longer than a pack: pure, from lengths to spans.

    max_tokens = 4        row 0 (3 tokens)    row 1 (9 tokens)
    drop                  0:[0,3)
    truncate              0:[0,3)             1:[0,4)
    split                 0:[0,3)             1:[0,4) 1:[4,8) 1:[8,9)

Every piece is a document of its own: positions restart and its first token is never a target.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_ext.packing.checks import check_choice

OVER_LENGTH_POLICIES = ("error", "drop", "truncate", "split")


@dataclass(frozen=True)
class Spans:
    """row int64[S], start int64[S], length int32[S]: span s is tokens start..start+length of dataset row `row`;
    rows ascending, every length at least 1."""

    row: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.row)


def cut_spans(lengths: NDArray[np.int64], max_tokens: int, policy: str, key: str = "data.train_dir") -> Spans:
    """The documents to pack: rows without a token are left out, rows over `max_tokens` follow `policy`.

    Raises:
        ValueError: rows over max_tokens under `error`; no document left under `drop`; no token at all.
    """
    check_choice("data.over_length", policy, OVER_LENGTH_POLICIES)
    if not lengths.any():
        raise ValueError(f"{key} must hold at least one token; all of its {len(lengths)} documents are empty")
    over = lengths > max_tokens
    if over.any() and policy == "error":
        raise ValueError(_over_length_message(lengths, over, max_tokens, key))
    if policy == "drop" and (over | (lengths == 0)).all():
        raise ValueError(
            f"data.max_tokens must hold at least one document of {key}; got {max_tokens}, the shortest document has "
            f"{lengths[over].min()} tokens and data.over_length=drop leaves none"
        )
    return _cut(lengths, max_tokens, policy)


def _cut(lengths: NDArray[np.int64], max_tokens: int, policy: str) -> Spans:
    pieces = -(-lengths // max_tokens)  # 0 for an empty row
    if policy == "drop":
        pieces[pieces > 1] = 0
    elif policy == "truncate":
        np.minimum(pieces, 1, out=pieces)
    row = np.repeat(np.arange(len(lengths)), pieces)
    pieces_before = np.cumsum(pieces) - pieces
    start = (np.arange(len(row)) - pieces_before[row]) * max_tokens
    length = np.minimum(lengths[row] - start, max_tokens).astype(np.int32)
    return Spans(row, start, length)


def _over_length_message(lengths: NDArray[np.int64], over: NDArray[np.bool_], max_tokens: int, key: str) -> str:
    return (
        f"data.max_tokens must hold every document of {key}; got {max_tokens}, but {int(over.sum())} of {len(lengths)} "
        f"documents are longer, the longest has {lengths.max()} tokens: raise data.max_tokens or choose "
        f"data.over_length=drop|truncate|split"
    )
