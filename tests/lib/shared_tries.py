"""Random documents with common beginnings, in random folders and packs."""

from typing import Any

import numpy as np


def random_tries(seed: int, number: int = 40, longest: int = 30) -> list[dict[str, Any]]:
    """Documents that go on from a part of another, with masks and categories of their own; some twice."""
    rng = np.random.default_rng(seed)
    texts: list[list[int]] = []
    for _ in range(number):
        parent = texts[rng.integers(len(texts))] if texts and rng.random() < 0.7 else []
        kept = parent[: rng.integers(len(parent) + 1)]
        texts.append([*kept, *rng.integers(3, 60, rng.integers(not kept, longest - len(kept) + 1)).tolist()])
    documents = []
    for ids in [*texts, texts[0]]:
        mask = [0, *rng.integers(0, 2, len(ids) - 1).tolist()]
        mask[-1] = int(len(ids) > 1)
        documents.append({"input_ids": ids, "loss_mask": mask, "category_ids": (rng.choice([1, 2], len(ids)) * mask)})
    return documents
