"""Documents, packs and layouts of ranks on which losses must be equal."""

import numpy as np

from tests.lib.reference import Document

TOLERANCE = 1e-5
MAX_TOKENS = 24
CATEGORIES = {7: "gsm8k", 9: "code", 11: "absent"}  # no document has a token of the last
CATEGORY_WEIGHTS = {"gsm8k": 0.5, "code": 3.0}


def _documents() -> list[Document]:
    """Make thirteen documents, including every special case that a mask can get wrong."""
    rng = np.random.default_rng(5)

    def document(loss_mask: list[int], category_ids: list[int]) -> Document:
        size = len(loss_mask)
        category_ids = [c * m for c, m in zip(category_ids, loss_mask, strict=True)]
        return Document(
            rng.integers(4, 128, size).tolist(), loss_mask, category_ids, rng.uniform(0.25, 2.0, size).tolist()
        )

    special = [
        document([0] + [1] * 23, [7] * 10 + [9] * 14),  # exactly max_tokens; two categories
        document([0], [0]),  # one token
        document([0] * 5, [0] * 5),  # no target
        document([0, 1, 0, 0, 0, 1], [7] * 6),  # its first possible target and its last token
        document([0, 1, 1, 0, 1, 1, 1, 1, 1], [9, 9, 9, 0, 0, 0, 7, 7, 7]),  # targets of no category
        document([0, 1], [9, 9]),
    ]
    usual = []
    for size in (13, 7, 11, 4, 17, 3, 10):
        mask = [0, *rng.integers(0, 2, size - 2).tolist(), 1]
        usual.append(document(mask, [int(rng.choice([7, 9]))] * size))
    return special + usual


DOCUMENTS = _documents()


# Seven packs, an odd number: with two data-parallel ranks one idles in the last slot. Their lengths are 24 16 20 21 19
# 8 4, not all divisible by 2 or 4.
_GROUPS = [[0], [1, 3, 4], [6, 7], [8, 12], [10, 5], [2, 11], [9]]


# Labelled: the last token of a pack is only predicted, and the model does not read it.
GROUPS = {"none": [[i] for i in range(13)], "packed": _GROUPS, "padded": _GROUPS, "labelled": _GROUPS}


def _tries() -> list[list[Document]]:
    """Make packs whose documents begin with tokens of those before, with masks, categories and weights of their own."""
    rng = np.random.default_rng(6)
    packs = []
    for size in (5, 1, 4, 6, 2, 3, 4):
        pack: list[Document] = []
        for _ in range(size):
            before = pack[-1].input_ids if pack else []
            kept = before[: rng.integers(len(before) + 1)]
            ids = [*kept, *rng.integers(4, 128, rng.integers(not kept, 12)).tolist()]
            mask = [0, *(rng.random(len(ids) - 1) < 0.6).astype(int).tolist()]
            categories = (rng.choice([0, 7, 9], len(ids)) * mask).tolist()
            pack.append(Document(ids, mask, categories, rng.uniform(0.25, 2.0, len(ids)).tolist()))
        packs.append(pack)
    packs[3].append(packs[3][-1])  # a document twice
    return packs


TRIES = _tries()


def packs_of(packing: str) -> list[list[Document]]:
    """Return the documents of each pack."""
    return TRIES if packing == "shared" else [[DOCUMENTS[i] for i in group] for group in GROUPS[packing]]
