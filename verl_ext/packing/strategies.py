"""plan_packs: the packing strategies, each pure (lengths, max_tokens, seed) -> PackPlan.

A new strategy is one function, in a file of its own if it has more than a few lines, and a line in STRATEGIES.
lengths are int64[D], each 1..max_tokens; the plan depends on the arguments alone.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from verl_ext.options import check_choice, must, whole_number
from verl_ext.packing.best_fit import best_fit, sort_by_length
from verl_ext.packing.plan import Indices, Ints, PackPlan, index_type, offsets_of

MOST_TOKENS = 2**53  # of a pack, so that sums with it are exact
MOST_PARTS = 16  # most parts over which plan_repeated deals the copies of documents
PART_PACKS = 256  # least number of full packs in a part


def next_fit(lengths: Ints, max_tokens: int, seed: int) -> PackPlan:
    """Pack documents in their order, closing packs that are full.

    A pack is closed when the next document does not fit (as TokenAwareBatchPack). One open pack alone leaves 20–25 % of
    the budget empty on mixed lengths: it is for data whose order matters, and for comparison. `seed` is not used.
    """
    tokens_before = offsets_of(lengths)
    ends = (np.searchsorted(tokens_before, tokens_before + max_tokens, side="right") - 1).data
    offsets = [0]
    while offsets[-1] < len(lengths):
        offsets.append(ends[offsets[-1]])  # the end of the pack that begins there
    return PackPlan(np.arange(len(lengths), dtype=index_type(len(lengths))), np.asarray(offsets, np.int64))


def single(lengths: Ints, max_tokens: int, seed: int) -> PackPlan:
    """Put one document into each pack; only `lengths` is used."""
    documents = len(lengths)
    return PackPlan(np.arange(documents, dtype=index_type(documents)), np.arange(documents + 1, dtype=np.int64))


def sorted_batch(lengths: Ints, max_tokens: int, seed: int) -> PackPlan:
    """Pack documents of similar length, ascending; the seed breaks ties.

    LongAlign's sorted batching (https://arxiv.org/abs/2401.18058, section 3.2), with a pack in place of a batch of
    padded rows: each pack contains similar lengths only. The epoch's order of packs is random.
    """
    if len(lengths) == 0:
        return next_fit(lengths, max_tokens, seed)
    ascending = sort_by_length(lengths, seed)[0][::-1]
    return next_fit(lengths[ascending], max_tokens, seed).renumbered(ascending)


STRATEGIES: dict[str, Callable[[Ints, int, int], PackPlan]] = {
    "best_fit": best_fit,
    "next_fit": next_fit,
    "none": single,
    "sorted_batch": sorted_batch,
}


def plan_packs(lengths: ArrayLike, max_tokens: int, strategy: str = "best_fit", seed: int = 0) -> PackPlan:
    """Return packs of whole documents, lengths integer[D] each 1..max_tokens.

    strategy: `best_fit` (fewest packs), `next_fit` (order preserved), `sorted_batch` (documents of similar length
    together), `none` (one document per pack). seed: decides between documents of equal length. Raises ValueError for an
    unknown strategy, lengths or a seed outside their range, and max_tokens outside 1..2^53.
    """
    check_choice("data.strategy", strategy, STRATEGIES)
    budget = whole_number("data.max_tokens", max_tokens, least=1, most=MOST_TOKENS)
    return STRATEGIES[strategy](_checked(lengths, budget), budget, whole_number("data.seed", seed, least=0))


def _checked(lengths: ArrayLike, max_tokens: int) -> Ints:
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(must("lengths", "be one-dimensional", f"shape {array.shape}"))
    if array.size == 0:
        return np.zeros(0, np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(must("lengths", "be integers", array.dtype))
    if array.min() < 1:
        raise ValueError(must("lengths", "be at least 1", f"{array.min()} at document {array.argmin()}"))
    if array.max() > max_tokens:
        got = f"{array.max()} at document {array.argmax()}"
        raise ValueError(must("lengths", f"be at most data.max_tokens={max_tokens}", got))
    return array.astype(np.int64, copy=False)


def deal_copies(lengths: Indices, documents: Ints, max_tokens: int, strategy: str, seed: int) -> list[Ints]:
    """Return the parts of `documents` int64[D] that are packed separately; lengths integer[S] of all.

        documents    a a a  b b  c d e          a three times, b twice
        parts        a b d | a b c | a e        copies dealt over the parts, from a random one on; packed part by part

    best_fit places documents of equal length one after the other. In one list, the copies of a long document would
    mostly meet in one pack and weigh double in its step. A document repeated at most as often as there are parts never
    meets itself. The parts cost up to 0.1 % more packs. Other strategies pack one list.
    """
    if strategy != "best_fit":
        return [documents]
    copies = np.bincount(documents, minlength=len(lengths))
    can_meet = 2 * lengths.astype(np.int64) <= max_tokens  # two longer ones never share a pack
    full_packs = int(lengths[documents].sum(dtype=np.int64)) // max_tokens
    number = min(int(copies[can_meet].max(initial=0)), MOST_PARTS, full_packs // PART_PACKS)
    if number <= 1:
        return [documents]
    first_part = np.random.default_rng(seed).integers(number, size=len(copies))
    part_of = (np.repeat(first_part, copies) + np.arange(len(documents))) % number
    by_document = np.repeat(np.arange(len(copies)), copies)
    in_parts = by_document[np.argsort(part_of.astype(np.uint8), kind="stable")]  # sorted in linear time
    return np.split(in_parts, np.cumsum(np.bincount(part_of, minlength=number))[:-1])


def plan_repeated(lengths: Indices, documents: Ints, max_tokens: int, strategy: str, seed: int) -> PackPlan:
    """Return the plan of `documents` int64[D], each as often as it is named.

    lengths: integer[S] of all documents. Raises as plan_packs does.
    """
    parts = deal_copies(lengths, documents, max_tokens, strategy, seed)
    return PackPlan.joined([plan_packs(lengths[part], max_tokens, strategy, seed).renumbered(part) for part in parts])
