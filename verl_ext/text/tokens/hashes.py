"""Hashes of documents' tokens, by which equal documents are found.

hash           Σ mix(id_t + 1) · r_t      mod 2^64, with a random odd r_t for every position t of the document
"""

import numpy as np
from numpy.typing import NDArray

_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads small ids over all bits
_factors = np.zeros(0, np.uint64)


def token_hashes(
    ids: NDArray[np.integer], starts: NDArray[np.int64], lengths: NDArray[np.integer]
) -> NDArray[np.uint64]:
    """Return each document's hash.

    Equal documents have equal ones, others with a probability of about 2^-63. starts, lengths: integer[D], of documents
    that are not empty and lie one after the other.
    """
    if not len(starts):
        return np.zeros(0, np.uint64)
    # A factor for every position makes the hash depend on the order of tokens.
    position = np.arange(len(ids)) - np.repeat(starts, lengths)
    return np.add.reduceat(
        mix_bits(ids.astype(np.uint64) + np.uint64(1)) * position_factors(int(lengths.max()))[position], starts
    )


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the numbers with all their bits mixed."""
    values = values * _MIX
    return values ^ (values >> np.uint64(29))


def position_factors(count: int) -> NDArray[np.uint64]:
    """Return the odd factors of the first positions, always the same."""
    global _factors
    if len(_factors) < count:
        size = 1 << (count - 1).bit_length()
        _factors = np.random.default_rng(0).integers(0, 2**63, size, np.uint64) * np.uint64(2) + np.uint64(1)
    return _factors[:count]


def repeated(hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return bool[D]: whether an earlier document has the same hash."""
    again = np.ones(len(hashes), bool)
    again[np.unique(hashes, return_index=True)[1]] = False
    return again
