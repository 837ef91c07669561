"""Four ways for a loader's worker to make training data of the same conversations; each reads all of them once.

pack        SFTDataSet[k]: a pack's tensors from the memory-mapped columns
worker      the same and StepCollator, as in our worker: also makes loss coefficients and category counts
seed        the original TokenAwareBatchPack's collate_fn: rows of a shuffled datasets.Dataset, as Python lists
templating  verl's MultiTurnSFTDataset[i]: chat template and tokenizer at every read, without its collator
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from benchmarks.conversations import Corpus
from verl_ext.data import SFTDataSet
from verl_ext.losses import LossSpec
from verl_ext.trainer.batch import StepCollator

NAMES = ("pack", "worker", "seed", "templating")
Documents = list[tuple[list[int], list[int]]]  # each document's tokens, and the places of its targets


@dataclass(frozen=True)
class Reader:
    """``read(item)`` over all ``items`` reads each conversation once; ``documents(output)`` gives its documents."""

    items: Sequence[Any]
    read: Callable[[Any], Any]
    documents: Callable[[Any], Documents]

    def read_all(self, passes: int) -> None:
        """Read all items, dropping each output before the next one is made, as a worker does."""
        for _ in range(passes):
            for item in self.items:
                self.read(item)


class SeedDataset:
    """The original SFTDataSet: next-fit packs over a shuffled dataset, padded to max_tokens in collate_fn."""

    def __init__(self, folder: str, max_tokens: int, padding_value: int) -> None:
        self.rows = datasets.load_from_disk(folder).shuffle(seed=42)
        self.max_tokens, self.padding_value = max_tokens, padding_value
        self.packs: list[list[int]] = []
        room = 0
        for index, length in enumerate(self.rows["length"]):
            if length > room:
                self.packs.append([])
                room = max_tokens
            self.packs[-1].append(index)
            room -= length

    def collate_fn(self, packs: list[list[int]]) -> dict[str, torch.Tensor]:
        """Collate as the original does: rows by index, positions from Python ranges, all padded to max_tokens."""
        rows = [self.rows[index] for index in packs[0]]
        out = {name: np.zeros(self.max_tokens, np.int64) for name in _SEED_COLUMNS}
        out["input_ids"][:] = self.padding_value
        begin = 0
        for row in rows:
            end = begin + row["length"]
            out["input_ids"][begin:end] = row["input_ids"]
            out["position_ids"][begin:end] = [i for i in range(row["length"])]  # noqa: C416
            out["loss_mask"][begin:end] = row["loss_mask"]
            out["category_ids"][begin:end] = row["category_ids"]
            out["attention_mask"][begin:end] = 1
            begin = end
        out["position_ids"][begin:] = [i for i in range(self.max_tokens - begin)]  # noqa: C416
        return {name: torch.from_numpy(values).unsqueeze(0) for name, values in out.items()}


_SEED_COLUMNS = ("input_ids", "position_ids", "loss_mask", "category_ids", "attention_mask")


def build_readers(corpus: Corpus, seed: int) -> tuple[dict[str, Reader], int]:
    """Build the readers by name, and return also the number of tokens that each of them reads."""
    folder, max_tokens = str(corpus.tokenized), corpus.kind.max_tokens
    ours = SFTDataSet(folder, max_tokens)
    collate = StepCollator(LossSpec("token", np.ones(len(ours.categories) + 1), 30), ours.categories)
    theirs = SeedDataset(folder, max_tokens, corpus.tokenizer.pad_token_id)
    options = {"pad_mode": "no_padding", "max_length": max_tokens, "truncation": "error"}
    verls = MultiTurnSFTDataset(str(corpus.parquet), corpus.tokenizer, options)
    packs = np.random.default_rng(seed).permutation(len(ours)).tolist()
    readers = {
        "pack": Reader(packs, ours.__getitem__, _documents_of_row),
        "worker": Reader(packs, lambda pack: collate([ours[pack]]), _documents_of_batch),
        "seed": Reader(theirs.packs, lambda pack: theirs.collate_fn([pack]), _documents_of_seed),
        "templating": Reader(range(len(verls)), verls.__getitem__, _documents_of_row),
    }
    return readers, int(ours.pack_tokens().sum())


def _documents_of_row(row: dict[str, torch.Tensor]) -> Documents:
    return _split(row["input_ids"], row["position_ids"], row["loss_mask"].bool())


def _documents_of_seed(row: dict[str, torch.Tensor]) -> Documents:
    real = row["attention_mask"][0].bool()
    return _documents_of_row({name: values[0][real] for name, values in row.items()})


def _documents_of_batch(batch: Any) -> Documents:
    """Return the documents of a batch; a coefficient stands where its target is predicted, one place before it."""
    targets = torch.roll(batch.coefficients != 0, 1)
    return _split(batch.input_ids, batch.position_ids, targets)


def _split(ids: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> Documents:
    begins = (positions == 0).nonzero().flatten().tolist()
    return [
        (ids[begin:end].tolist(), targets[begin:end].nonzero().flatten().tolist())
        for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True)
    ]
