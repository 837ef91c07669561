"""Make a step's documents: long-tailed lengths scaled to the budget, random tokens, one dataset folder on disk.

Of all documents 90 % are short (lognormal) and 10 % long (uniform from an eighth of the budget to all of it). At a
budget of 65,536 tokens that is a median of 1,024 and a tail of 8k to 64k, LongAlign's mixture of chat and long
documents (https://arxiv.org/abs/2401.18058); a smaller budget scales every length by the same factor.
"""

import json
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, List, Value

LONG_SHARE = 0.1
MEDIAN_SHARE = 1 / 64  # median of a short document, as a share of the budget
SIGMA = 0.8  # standard deviation of the logarithm of a short document's length
SHORTEST_LONG_SHARE = 1 / 8
TARGET_SHARE = 1 / 4  # the share of a document's last tokens that are targets
SHORTEST = 4
CATEGORIES = {"1": "short", "2": "long"}

Document = dict[str, np.ndarray]  # input_ids, loss_mask, category_ids: int64[length]


def long_tailed_lengths(count: int, budget: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw (lengths int64[count], is_long bool[count]) in shuffled order; the number of long documents is exact."""
    long = rng.permutation(np.arange(count) < round(count * LONG_SHARE))
    short_lengths = rng.lognormal(np.log(budget * MEDIAN_SHARE), SIGMA, count)
    long_lengths = rng.uniform(budget * SHORTEST_LONG_SHARE, budget, count)
    lengths = np.where(long, long_lengths, short_lengths).astype(np.int64)
    return lengths.clip(SHORTEST, budget), long


def make_documents(count: int, budget: int, vocabulary: int, rng: np.random.Generator) -> list[Document]:
    """Make documents whose last quarter is the target."""
    documents = []
    for length, long in zip(*long_tailed_lengths(count, budget, rng), strict=True):
        targets = np.arange(length) >= length - max(int(length * TARGET_SHARE), 1)
        documents.append(
            {
                "input_ids": rng.integers(0, vocabulary, length),
                "loss_mask": targets.astype(np.int64),
                "category_ids": targets * np.int64(2 if long else 1),
            }
        )
    return documents


def write_dataset(documents: list[Document], folder: Path) -> None:
    """Write a tokenized dataset of one row a document, in the given order."""
    kinds = {"input_ids": "int32", "loss_mask": "int8", "category_ids": "int32"}
    features = Features({**{name: List(Value(kind)) for name, kind in kinds.items()}, "length": Value("int32")})
    columns: dict[str, list] = {name: [document[name] for document in documents] for name in kinds}
    columns["length"] = [len(document["input_ids"]) for document in documents]
    Dataset.from_dict(columns, features=features).save_to_disk(str(folder))
    (folder / "categories.json").write_text(json.dumps(CATEGORIES))
