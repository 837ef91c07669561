"""plan_packs and the packing strategies by name: each a pure function (lengths, max_tokens, seed) -> PackPlan.

Next fit: keep the documents' order, close the pack when the next document does not fit.

The original TokenAwareBatchPack. It looks at one open pack only, so that 20–25 % of the budget stays empty on mixed
lengths; it is for data whose order matters, and for comparison.

One document a pack: no packing, for comparison and for parity tests.

Sorted batching: documents of like length share a pack (LongAlign, https://arxiv.org/abs/2401.18058, section 3.2).

LongAlign sorts the set by length and cuts it into batches of a fixed number of sequences, each a row that is padded to
the longest of its batch; the batches are visited in random order. Here a batch is a pack: as many neighbours in the
sorted order as the budget holds, laid end to end. So nothing is padded, short documents come many to a pack and long
ones few, and one `max_tokens` bounds the memory of every step. The random order is the epoch's, as for all packs. What
stays is what sorted batching is for, packs whose documents cost alike, and its flaw: a pack sees one length only.

Documents from the longest to the shortest, in runs of equal length: what every decreasing fit works on.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_ext.packing.best_fit import best_fit, decreasing
from verl_ext.packing.plan import PackPlan, index_type
from verl_ext.values import check_choice, whole_number


def next_fit(lengths: NDArray[np.int64], max_tokens: int, seed: int) -> PackPlan:
    """Packs of consecutive documents; lengths int64[D], each 1..max_tokens. `seed` changes nothing."""
    tokens_before = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=tokens_before[1:])
    ends = (np.searchsorted(tokens_before, tokens_before + max_tokens, side="right") - 1).data
    offsets = [0]
    while offsets[-1] < len(lengths):
        offsets.append(ends[offsets[-1]])  # where the pack ends that begins there
    return PackPlan(np.arange(len(lengths), dtype=index_type(len(lengths))), np.asarray(offsets, np.int64))


def single(lengths: NDArray[np.int64], max_tokens: int, seed: int) -> PackPlan:
    """As many packs as documents, in their order. `max_tokens` and `seed` change nothing."""
    return PackPlan(
        np.arange(len(lengths), dtype=index_type(len(lengths))), np.arange(len(lengths) + 1, dtype=np.int64)
    )


def sorted_batch(lengths: NDArray[np.int64], max_tokens: int, seed: int) -> PackPlan:
    """Packs of consecutive documents in ascending order of length; lengths int64[D], each 1..max_tokens. Among
    documents of equal length the seed decides."""
    if len(lengths) == 0:
        return next_fit(lengths, max_tokens, seed)
    ascending = decreasing(lengths, seed)[0][::-1]
    return next_fit(lengths[ascending], max_tokens, seed).of(ascending)


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
    check_choice("data.strategy", strategy, STRATEGIES)
    budget = whole_number("data.max_tokens", max_tokens, least=1, most=MOST_TOKENS)
    return STRATEGIES[strategy](_checked(lengths, budget), budget, whole_number("data.seed", seed, least=0))


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


MOST_PARTS = 16


PART_PACKS = 256


def plan_repeated(
    lengths: NDArray[np.integer], documents: NDArray[np.int64], max_tokens: int, strategy: str, seed: int
) -> PackPlan:
    """The plan of `documents` int64[D], one as often as it stands there; lengths integer[S] of all documents.

    Strategies other than best_fit get `documents` as they stand, in one part. Raises ValueError as plan_packs does.
    """
    parts = _parts(lengths, documents, max_tokens, seed) if strategy == "best_fit" else [documents]
    plans = [plan_packs(lengths[part], max_tokens, strategy, seed).of(part) for part in parts]
    sizes = np.concatenate([np.diff(plan.pack_offsets) for plan in plans])
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return PackPlan(np.concatenate([plan.document_index for plan in plans]), offsets)


def _parts(
    lengths: NDArray[np.integer], documents: NDArray[np.int64], max_tokens: int, seed: int
) -> list[NDArray[np.int64]]:
    """`documents` in parts, the copies of each in parts one after the other."""
    copies = np.bincount(documents, minlength=len(lengths))
    most_copies = int(copies[2 * lengths.astype(np.int64) <= max_tokens].max(initial=0))  # longer ones cannot meet
    full_packs = int(lengths[documents].sum(dtype=np.int64)) // max_tokens
    parts = min(most_copies, MOST_PARTS, full_packs // PART_PACKS)
    if parts <= 1:
        return [documents]
    first_part = np.random.default_rng(seed).integers(parts, size=len(copies))
    part_of = (np.repeat(first_part, copies) + np.arange(len(documents))) % parts
    by_document = np.repeat(np.arange(len(copies)), copies)
    in_parts = by_document[np.argsort(part_of.astype(np.uint8), kind="stable")]  # uint8: numpy sorts it in linear time
    return np.split(in_parts, np.cumsum(np.bincount(part_of, minlength=parts))[:-1])
