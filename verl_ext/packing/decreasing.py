"""Documents from the longest to the shortest, in runs of equal length: what every decreasing fit works on."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.packing.plan import index_type

FEWEST_RANDOM_BITS = 16


class Runs(NamedTuple):
    """lengths int64[R], strictly decreasing, and counts int64[R]: so many documents of each."""

    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]


def decreasing(lengths: NDArray[np.int64], seed: int) -> tuple[NDArray[np.integer], Runs]:
    """(documents int32 or int64[D], longest first, and their runs); lengths int64[D], D at least 1.

    Among documents of equal length the seed decides. One sort of one 64-bit key a document, which vectorised sorts
    do in about a tenth of an argsort's time:

        highest bits                                  lowest bits
        longest - length  |  random bits of the seed  |  number of the document
    """
    documents = len(lengths)
    longest, shortest = int(lengths.max()), int(lengths.min())
    number_bits, length_bits = (documents - 1).bit_length(), max((longest - shortest).bit_length(), 1)
    if number_bits + length_bits + FEWEST_RANDOM_BITS > 64:  # ranks of lengths need fewer bits than lengths
        distinct, ranks = np.unique(lengths, return_inverse=True)
        order, runs = _sorted(ranks, len(distinct) - 1, number_bits, number_bits, seed)
        return order, Runs(distinct[runs.lengths], runs.counts)
    return _sorted(lengths, longest, length_bits, number_bits, seed)


def _sorted(
    lengths: NDArray[np.int64], longest: int, length_bits: int, number_bits: int, seed: int
) -> tuple[NDArray[np.integer], Runs]:
    keys = np.random.default_rng(seed).bit_generator.random_raw(len(lengths))
    keys >>= np.uint64(length_bits + number_bits)
    part = np.subtract(longest, lengths, dtype=np.int64).view(np.uint64)
    part <<= np.uint64(64 - length_bits - number_bits)
    keys |= part
    keys <<= np.uint64(number_bits)
    keys |= np.arange(len(lengths), dtype=np.uint64)
    keys.sort()
    np.bitwise_and(keys, np.uint64((1 << number_bits) - 1), out=part)
    documents = part.astype(index_type(len(lengths)))
    keys >>= np.uint64(64 - length_bits)
    starts = np.concatenate([[0], np.flatnonzero(keys[1:] != keys[:-1]) + 1])
    return documents, Runs(longest - keys[starts].astype(np.int64), np.diff(starts, append=len(lengths)))
