"""plan_packs and the packing strategies by name: each a pure function (lengths, max_tokens, seed) -> PackPlan."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_ext.packing.best_fit import best_fit
from verl_ext.packing.checks import check_choice, whole_number
from verl_ext.packing.next_fit import next_fit
from verl_ext.packing.plan import PackPlan
from verl_ext.packing.single import single
from verl_ext.packing.sorted_batch import sorted_batch

Strategy = Callable[[NDArray[np.int64], int, int], PackPlan]

MOST_TOKENS = 2**53  # of a pack, so that sums with it are exact

STRATEGIES: dict[str, Strategy] = {
    "best_fit": best_fit,
    "next_fit": next_fit,
    "none": single,
    "sorted_batch": sorted_batch,
}


def plan_packs(lengths: ArrayLike, max_tokens: int, strategy: str = "best_fit", seed: int = 0) -> PackPlan:
    """Packs of whole documents, none above `max_tokens` tokens: (document_index int32[D], pack_offsets int64[P+1]).

    From 2^31 documents on the index is int64.

    Args:
        lengths: integer[D], tokens of each document, each 1..max_tokens; may be empty.
        max_tokens: budget of a pack, in tokens.
        strategy: `best_fit` (fewest packs), `next_fit` (order preserved), `sorted_batch` (documents of like length
            together), `none` (one document a pack).
        seed: decides between documents of equal length; the plan depends on the arguments alone.

    Raises:
        ValueError: an unknown strategy, lengths that are no integers or outside 1..max_tokens, max_tokens
            outside 1..2^53, a negative seed.
    """
    plan = STRATEGIES[check_choice("data.strategy", strategy, STRATEGIES)]
    budget = whole_number("data.max_tokens", max_tokens, least=1, most=MOST_TOKENS)
    return plan(_checked(lengths, budget), budget, whole_number("data.seed", seed, least=0))


def _checked(lengths: ArrayLike, max_tokens: int) -> NDArray[np.int64]:
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional; got shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"lengths must be integers; got {array.dtype}")
    if array.min() < 1:
        raise ValueError(f"lengths must be at least 1; got {array.min()} at document {array.argmin()}")
    if array.max() > max_tokens:
        raise ValueError(
            f"lengths must be at most data.max_tokens={max_tokens}; got {array.max()} at document {array.argmax()}"
        )
    return array.astype(np.int64, copy=False)
