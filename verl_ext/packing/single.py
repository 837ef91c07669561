"""One document a pack: no packing, for comparison and for parity tests."""

import numpy as np
from numpy.typing import NDArray

from verl_ext.packing.plan import PackPlan, index_type


def single(lengths: NDArray[np.int64], max_tokens: int, seed: int) -> PackPlan:
    """As many packs as documents, in their order. `max_tokens` and `seed` change nothing."""
    return PackPlan(
        np.arange(len(lengths), dtype=index_type(len(lengths))), np.arange(len(lengths) + 1, dtype=np.int64)
    )
