"""Packs of documents of which some are repeated: the copies of one document go into different packs.

    drawn        a a a  b b  c d e              a three times, b twice
    parts        a b d | a b c | a e            each copy in another part, the rest at random
    packs        made inside a part, so that none holds a document twice

best_fit places documents of equal length one after the other: packed as one list, the copies of a long document would
mostly meet in one pack and weigh double in its step. Every part has documents of all lengths and is packed nearly as
full as the whole would be: with at least PART_PACKS packs of tokens each, the parts need up to 2 % more packs, and on
many documents much shorter than a pack hardly any. Where a document is repeated more often than there are such parts,
some of its copies may still share a pack.
"""

import numpy as np
from numpy.typing import NDArray

from verl_ext.packing.plan import PackPlan
from verl_ext.packing.strategies import plan_packs

PART_PACKS = 64


def plan_repeated(
    lengths: NDArray[np.integer], documents: NDArray[np.int64], max_tokens: int, strategy: str, seed: int
) -> PackPlan:
    """The plan of `documents` int64[D], one as often as it stands there; lengths integer[S] of all documents.

    Strategies other than best_fit get `documents` as they stand, in one part. Raises ValueError as plan_packs does.
    """
    part_of = _parts(lengths, documents, max_tokens, seed) if strategy == "best_fit" else np.zeros(len(documents), int)
    index, offsets = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
    for part in range(int(part_of.max(initial=0)) + 1):
        ours = documents[part_of == part]
        plan = plan_packs(lengths[ours], max_tokens, strategy, seed)
        index.append(ours[plan.document_index])
        offsets.append(offsets[-1][-1] + plan.pack_offsets[1:].astype(np.int64))
    return PackPlan(np.concatenate(index), np.concatenate(offsets))


def _parts(
    lengths: NDArray[np.integer], documents: NDArray[np.int64], max_tokens: int, seed: int
) -> NDArray[np.integer]:
    """int[D]: the part of each entry; the copies of a document in parts one after the other from a random one on."""
    copies = np.bincount(documents)
    full_packs = int(lengths[documents].sum(dtype=np.int64)) // max_tokens
    parts = min(int(copies.max(initial=0)), full_packs // PART_PACKS)
    if parts <= 1:
        return np.zeros(len(documents), np.int64)
    first_part = np.random.default_rng(seed).integers(parts, size=len(copies))
    repeated = np.flatnonzero(copies[documents] > 1)
    repeated = repeated[np.argsort(documents[repeated], kind="stable")]
    among_repeated = np.where(copies > 1, copies, 0)
    first_entry = np.cumsum(among_repeated) - among_repeated
    part_of = first_part[documents]
    part_of[repeated] += np.arange(len(repeated)) - first_entry[documents[repeated]]  # 0, 1, … for the copies of each
    return part_of % parts
