"""Lengths of documents, and tokenized folders of random tokens with these lengths.

A step's documents are LongAlign's mixture (https://arxiv.org/abs/2401.18058), scaled to the budget of a pack: 90 % are
short (lognormal), 10 % long (uniform from an eighth of the budget to all of it). At 65,536 tokens that is a median of
1,024 and a tail of 8k to 64k. The last quarter of a document is its target.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.text.arrow_folder import DatasetWriter
from verl_ext.text.tokens.documents import Documents

LONG_SHARE = 0.1
MEDIAN_SHARE = 1 / 64  # median of a short document, as a share of the budget
SIGMA = 0.8  # standard deviation of the logarithm of a short document's length
SHORTEST_LONG_SHARE = 1 / 8
SHORTEST = 4
_BATCH, _SPREAD, _MOST_CATEGORIES = 1 << 15, 0.6, 4  # documents of a record batch; standard deviation of log(length)

Document = dict[str, np.ndarray]  # input_ids, loss_mask, category_ids: int64[length]


class Distribution(NamedTuple):
    max_tokens: int
    draw: Callable[[int, np.random.Generator], NDArray[np.int64]]  # of a number of lengths, each 1..max_tokens


def _chat_and_long(count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    long = rng.random(count) < LONG_SHARE
    lengths = np.where(long, rng.uniform(8192, 65_536, count), rng.lognormal(np.log(1024), SIGMA, count))
    return lengths.astype(np.int64).clip(1, 65_536)


DISTRIBUTIONS = {
    "A": Distribution(65_536, _chat_and_long),  # LongAlign's mixture
    "B": Distribution(32_768, lambda count, rng: rng.integers(1024, 32_768, count, endpoint=True)),
}


def long_tailed_lengths(count: int, budget: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw (lengths int64[count], is_long bool[count]), exactly a tenth of them long."""
    long = rng.permutation(np.arange(count) < round(count * LONG_SHARE))
    short_lengths = rng.lognormal(np.log(budget * MEDIAN_SHARE), SIGMA, count)
    long_lengths = rng.uniform(budget * SHORTEST_LONG_SHARE, budget, count)
    lengths = np.where(long, long_lengths, short_lengths).astype(np.int64)
    return lengths.clip(SHORTEST, budget), long


def document_of(ids: Any, prompt: int, category: int = 1) -> Document:
    """Return a document whose targets are the tokens after the first `prompt` ones."""
    targets = np.arange(len(ids)) >= prompt
    columns = {"loss_mask": targets.astype(np.int64), "category_ids": targets * np.int64(category)}
    return {"input_ids": np.asarray(ids), **columns}


def random_document(length: int, vocabulary: int, rng: np.random.Generator, category: int = 1) -> Document:
    return document_of(rng.integers(0, vocabulary, length), length - max(length // 4, 1), category)


def make_documents(count: int, budget: int, vocabulary: int, rng: np.random.Generator) -> list[Document]:
    """Draw the documents of a step, in the categories short and long."""
    drawn = zip(*long_tailed_lengths(count, budget, rng), strict=True)
    return [random_document(length, vocabulary, rng, 1 + long) for length, long in drawn]


def document_lengths(position_ids: Any) -> np.ndarray:
    """Return the lengths int64[D] of documents whose positions lie side by side."""
    positions = position_ids.flatten().cpu().numpy()
    return np.diff(np.append(np.flatnonzero(positions == 0), len(positions)))


def write_documents(documents: Sequence[Document], folder: Path, units: Any = None) -> None:
    """Write a tokenized folder of one row a document, in their order.

    units: {column of preferences: a value for each document}.
    """
    lengths = np.array([len(document["input_ids"]) for document in documents])
    columns = (np.concatenate([of_one[name] for of_one in documents]) for name in documents[0])
    _write_folder(folder, [(lengths, *columns)], units)
    (folder / "categories.json").write_text(json.dumps({"1": "short", "2": "long"}))


def write_many_documents(folder: Path, documents: int, mean_tokens: int, vocabulary: int, seed: int) -> None:
    """Write a tokenized folder of millions of documents, without Python for each.

    Lengths are lognormal around a mean; a document's last quarter is its target, in one of four categories.
    """
    rng = np.random.default_rng(seed)

    def batch(count: int) -> tuple[np.ndarray, ...]:
        lengths = rng.lognormal(np.log(mean_tokens) - _SPREAD**2 / 2, _SPREAD, count).astype(np.int64).clip(2)
        to_end = np.repeat(np.cumsum(lengths), lengths) - np.arange(lengths.sum())  # of each token, 1 at the last
        mask = to_end <= np.repeat(np.maximum(lengths // 4, 1), lengths)
        category = np.repeat(rng.integers(1, _MOST_CATEGORIES + 1, count), lengths) * mask
        return lengths, rng.integers(0, vocabulary, len(mask)), mask, category

    _write_folder(folder, (batch(min(_BATCH, documents - first)) for first in range(0, documents, _BATCH)))


def _write_folder(folder: Path, batches: Iterable[tuple[np.ndarray, ...]], units: Any = None) -> None:
    """Write batches of documents: lengths, then their tokens' ids, mask and categories.

    Because tokens have categories of their own, the folder has no facts of documents: a start scans its tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = DatasetWriter(folder)
    for lengths, ids, mask, categories in batches:
        tokens = ids.astype(np.int32), mask.astype(np.int8), lengths, None, lengths, np.zeros_like(lengths)
        writer.add(Documents(1, 0, *tokens, categories.astype(np.int32), units=units))
    writer.close()
