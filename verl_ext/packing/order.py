"""The order in which an epoch visits its packs."""

import numpy as np
from numpy.typing import NDArray


def epoch_order(num_packs: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """int64[P]: a permutation of the packs that depends on seed and epoch alone, never on ranks or workers."""
    if num_packs < 0 or seed < 0 or epoch < 0:
        raise ValueError(
            f"num_packs, data.seed and epoch must be at least 0; got num_packs={num_packs}, seed={seed}, epoch={epoch}"
        )
    return np.random.default_rng([seed, epoch]).permutation(num_packs)
