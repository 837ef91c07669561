"""Lengths of documents, and tokenized folders of random tokens with these lengths.

A step's documents are LongAlign's mixture (https://arxiv.org/abs/2401.18058), scaled to the budget of a pack: 90 % are
short (lognormal), 10 % long (uniform from an eighth of the budget to all of it). At 65,536 tokens that is a median of
1,024 and a tail of 8k to 64k.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from numpy.typing import NDArray

LONG_SHARE = 0.1
MEDIAN_SHARE = 1 / 64  # median of a short document, as a share of the budget
SIGMA = 0.8  # standard deviation of the logarithm of a short document's length
SHORTEST_LONG_SHARE = 1 / 8
TARGET_SHARE = 1 / 4  # the share of a document's last tokens that are targets
SHORTEST = 4
CATEGORIES = {"1": "short", "2": "long"}

Document = dict[str, np.ndarray]  # input_ids, loss_mask, category_ids: int64[length]


class Distribution(NamedTuple):
    """A distribution of lengths: draw(count, rng) -> int64[count], each within 1..max_tokens."""

    text: str
    max_tokens: int
    draw: Callable[[int, np.random.Generator], NDArray[np.int64]]


def _chat_and_long(count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    long = rng.random(count) < LONG_SHARE
    lengths = np.where(long, rng.uniform(8192, 65_536, count), rng.lognormal(np.log(1024), SIGMA, count))
    return lengths.astype(np.int64).clip(1, 65_536)


DISTRIBUTIONS = {
    "A": Distribution("90 % lognormal (median 1,024, σ 0.8), 10 % uniform 8k–64k", 65_536, _chat_and_long),
    "B": Distribution("uniform 1k–32k", 32_768, lambda count, rng: rng.integers(1024, 32_768, count, endpoint=True)),
}


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


_KINDS = {"input_ids": "int32", "loss_mask": "int8", "category_ids": "int32"}
_FEATURES = Features({**{name: List(Value(kind)) for name, kind in _KINDS.items()}, "length": Value("int32")})


def write_documents(documents: list[Document], folder: Path) -> None:
    """Write a tokenized folder of one row a document, in the given order."""
    columns: dict[str, list] = {name: [document[name] for document in documents] for name in _KINDS}
    columns["length"] = [len(document["input_ids"]) for document in documents]
    Dataset.from_dict(columns, features=_FEATURES).save_to_disk(str(folder))
    (folder / "categories.json").write_text(json.dumps(CATEGORIES))


_BATCH, _SPREAD, _MOST_CATEGORIES = 1 << 15, 0.6, 4  # documents of a record batch; standard deviation of log(length)


def write_many_documents(folder: Path, documents: int, mean_tokens: int, vocabulary: int, seed: int) -> None:
    """Write a tokenized folder of millions of documents, without Python per token or document.

    Lengths are lognormal around a mean; a document's last quarter is its target, in one of four categories.
    """
    schema, rng = _FEATURES.arrow_schema, np.random.default_rng(seed)
    Dataset(schema.empty_table()).save_to_disk(str(folder))  # writes the two JSON files, but no shard for no rows
    for stray in folder.glob("*.arrow"):
        stray.unlink()
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for first in range(0, documents, _BATCH):
            count = min(_BATCH, documents - first)
            lengths = rng.lognormal(np.log(mean_tokens) - _SPREAD**2 / 2, _SPREAD, count).astype(np.int32).clip(2)
            ends = np.cumsum(lengths, dtype=np.int32)
            # A target begins at +1 and ends before −1; the next document's begins later.
            steps = np.zeros(ends[-1] + 1, np.int8)
            steps[ends - np.maximum(lengths // 4, 1)] += 1
            steps[ends] -= 1
            mask = np.cumsum(steps[:-1], dtype=np.int8)
            category = np.repeat(rng.integers(1, _MOST_CATEGORIES + 1, count, dtype=np.int32), lengths) * mask
            offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends]))
            flat = rng.integers(0, vocabulary, ends[-1], dtype=np.int32), mask, category
            rows = [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in flat]
            stream.write_batch(pa.RecordBatch.from_arrays([*rows, pa.array(lengths)], schema=schema))
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "_data_files": [{"filename": "data.arrow"}]}))
