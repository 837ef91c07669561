"""Small tokenized folders for tests, which follow the data contract without the tokenize command.

documents = random_documents(rng, lengths=[5, 9], vocab=100, categories=2)
write_tokenized(tmp_path / "data", documents, categories={1: "gsm8k", 2: "code"})
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value

Document = dict[str, Any]

FEATURES = {
    "input_ids": List(Value("int32")),
    "loss_mask": List(Value("int8")),
    "category_ids": List(Value("int32")),
    "length": Value("int32"),
}


def random_documents(rng: np.random.Generator, lengths: Iterable[int], vocab: int, categories: int) -> list[Document]:
    """Make a document for each length: token ids are 1..vocab-1; about half of its tokens (never the first, always the
    last) are targets of one random category 1..categories; weights are 0.5..2, for writers that use them."""
    documents = []
    for length in lengths:
        mask = (rng.random(length) < 0.5).astype(np.int8)
        mask[-1:] = 1
        mask[:1] = 0
        documents.append(
            {
                "input_ids": rng.integers(1, vocab, length).astype(np.int32),
                "loss_mask": mask,
                "category_ids": (mask * rng.integers(1, categories + 1)).astype(np.int32),
                "loss_weight": rng.uniform(0.5, 2.0, length).astype(np.float32),
            }
        )
    return documents


def write_tokenized(
    path: str | Path,
    documents: Sequence[Document],
    categories: Mapping[int, str] | None = None,
    loss_weight: bool = False,
    **save: Any,
) -> str:
    """Write `documents` (input_ids, loss_mask, category_ids, optional length and loss_weight) as a tokenized folder.

    `categories`, id -> name, becomes categories.json, if given. `loss_weight` adds that column. A missing length
    defaults to len(input_ids), a missing loss_weight to 1. `save` is passed to save_to_disk (num_shards=…). Returns the
    folder as a string.
    """
    features = dict(FEATURES)
    columns: dict[str, list[Any]] = {
        name: [document[name] for document in documents] for name in ("input_ids", "loss_mask", "category_ids")
    }
    columns["length"] = [document.get("length", len(document["input_ids"])) for document in documents]
    if loss_weight:
        features["loss_weight"] = List(Value("float32"))
        columns["loss_weight"] = [
            document.get("loss_weight", np.ones(len(document["input_ids"]), np.float32)) for document in documents
        ]
    Dataset.from_dict(columns, features=Features(features)).save_to_disk(str(path), **save)
    if categories is not None:
        text = json.dumps({str(number): name for number, name in categories.items()})
        (Path(path) / "categories.json").write_text(text, encoding="utf-8")
    return str(path)


def random_units(rng: np.random.Generator, sizes: Iterable[int], vocab: int = 128) -> list[Document]:
    """Make units of so many documents after one prompt, the first preferred; of one: a document that is no answer.

    The documents have the columns unit, answer and pair_weight; prompts have 3 to 12 tokens, answers 1 to 9.
    """
    documents: list[Document] = []
    for size in sizes:
        prompt, weight = rng.integers(4, vocab, rng.integers(3, 12)), float(rng.choice([0.5, 1.0, 2.0]))
        category = int(rng.integers(1, 3))
        for number in range(size):
            answer = rng.integers(4, vocab, rng.integers(1, 9))
            mask = np.array([0] * len(prompt) + [1] * len(answer), np.int8)
            documents.append(
                {
                    "input_ids": np.concatenate([prompt, answer, [number]]).astype(np.int32),  # so that none is equal
                    "loss_mask": np.append(mask, 1).astype(np.int8),
                    "category_ids": (np.append(mask, 1) * category).astype(np.int32),
                    "unit": 0 if number else size,
                    "answer": (-1 if number else 1) * (size > 1),
                    "pair_weight": weight,
                }
            )
    return documents


def write_units(path: str | Path, documents: Sequence[Document], categories: Mapping[int, str] | None = None) -> str:
    """Write the documents of units as a tokenized folder; return it as a string."""
    kinds = {"unit": "int32", "answer": "int8", "pair_weight": "float32"}
    columns = {name: [document[name] for document in documents] for name in (*FEATURES, *kinds) if name != "length"}
    columns["length"] = [len(document["input_ids"]) for document in documents]
    features = Features(FEATURES | {name: Value(kind) for name, kind in kinds.items()})
    Dataset.from_dict(columns, features=features).save_to_disk(str(path))
    if categories is not None:
        text = json.dumps({str(number): name for number, name in categories.items()})
        (Path(path) / "categories.json").write_text(text, encoding="utf-8")
    return str(path)
