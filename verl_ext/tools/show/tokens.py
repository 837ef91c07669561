"""Facts that only tokens show, found in one vectorised pass.

document       <bos> a b | c d <eot>      the targets are c d <eot>
hash           by text/tokens/hashes
last_target    <eot>                      -1 without a target
ends_in_target yes                        the last token is a target
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.packing.plan import offsets_of
from verl_ext.text.tokens.hashes import token_hashes
from verl_ext.tools.show.documents import ShownDocuments


@dataclass(frozen=True)
class TokenFacts:
    """Facts of each document.

    Attributes:
        hashes: uint64[D]; equal documents have equal hashes, different ones with a probability of about 2^-63.
        last_target: integer[D], the id of the last target token, -1 without one.
        ends_in_target: bool[D], whether the last token is a target.
        double_start: bool[D], whether the document begins with the same token `bos` twice.
        sequence: bool[D], whether the targets contain the whole given sequence of tokens.
    """

    hashes: NDArray[np.uint64]
    last_target: NDArray[np.int64]
    ends_in_target: NDArray[np.bool_]
    double_start: NDArray[np.bool_]
    sequence: NDArray[np.bool_]


def read_tokens(documents: ShownDocuments, bos: int | None = None, sequence: Sequence[int] = ()) -> TokenFacts:
    """Read every token once.

    bos: the token of `double_start`. sequence: the token ids to find among the targets.
    """
    count = len(documents)
    hashes, last = np.zeros(count, np.uint64), np.full(count, -1)
    at_end, double, found = (np.zeros(count, bool) for _ in range(3))
    for block in documents.blocks():
        has_tokens = block.lengths > 0
        rows, lengths = block.first + np.flatnonzero(has_tokens), block.lengths[has_tokens]
        if not len(rows):
            continue
        offsets = offsets_of(lengths)
        starts, ends, ids = offsets[:-1], offsets[1:], block.input_ids
        hashes[rows] = token_hashes(ids, starts, lengths)
        # A first token has nothing to be predicted from, whatever its mask says.
        mask = block.loss_mask != 0
        mask[starts] = False
        places = np.where(mask, np.arange(len(ids)), -1)
        last_place = np.maximum.reduceat(places, starts)
        has_target = last_place >= 0
        last[rows[has_target]] = ids[last_place[has_target]]
        at_end[rows] = mask[ends - 1]
        if bos is not None:
            second = np.minimum(starts + 1, ends - 1)
            double[rows] = (lengths > 1) & (ids[starts] == bos) & (ids[second] == bos)
        found[rows] = _has_sequence(ids, mask, starts, sequence)
    return TokenFacts(hashes, last, at_end, double, found)


def _has_sequence(
    ids: NDArray[Any], mask: NDArray[np.bool_], starts: NDArray[np.int64], sequence: Sequence[int]
) -> NDArray[np.bool_]:
    """Return bool[documents]: whether targets contain `sequence` within one document."""
    if not sequence or len(ids) < len(sequence):
        return np.zeros(len(starts), bool)
    last = len(ids) - len(sequence) + 1
    begins = np.ones(last, bool)
    for offset, token in enumerate(sequence):
        begins &= (ids[offset : offset + last] == token) & mask[offset : offset + last]
    whole = np.zeros(len(ids), bool)
    whole[:last] = begins
    return np.logical_or.reduceat(whole, starts)
