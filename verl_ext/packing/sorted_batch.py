"""Sorted batching: documents of like length share a pack (LongAlign, https://arxiv.org/abs/2401.18058, section 3.2).

LongAlign sorts the set by length and cuts it into batches of a fixed number of sequences, each a row that is padded to
the longest of its batch; the batches are visited in random order. Here a batch is a pack: as many neighbours in the
sorted order as the budget holds, laid end to end. So nothing is padded, short documents come many to a pack and long
ones few, and one `max_tokens` bounds the memory of every step. The random order is the epoch's, as for all packs. What
stays is what sorted batching is for, packs whose documents cost alike, and its flaw: a pack sees one length only.
"""

import numpy as np
from numpy.typing import NDArray

from verl_ext.packing.decreasing import decreasing
from verl_ext.packing.next_fit import next_fit
from verl_ext.packing.plan import PackPlan


def sorted_batch(lengths: NDArray[np.int64], max_tokens: int, seed: int) -> PackPlan:
    """Packs of consecutive documents in ascending order of length; lengths int64[D], each 1..max_tokens. Among
    documents of equal length the seed decides."""
    if len(lengths) == 0:
        return next_fit(lengths, max_tokens, seed)
    ascending = decreasing(lengths, seed)[0][::-1]
    return next_fit(lengths[ascending], max_tokens, seed).of(ascending)
