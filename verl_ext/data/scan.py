"""DocumentScan: what one pass over the tokens tells: targets of every document, token ids, categories that occur.

The pass reads the memory-mapped buffers in blocks of a few million tokens, so that its private memory does not grow
with the dataset. The target tokens of a span are a difference of the running count, its first token left out:

    loss_mask      1 1 0 1 | 0 1 1        spans [0,4) [4,7)
    is_target      0 1 0 1 | 0 1 1
    running      0 0 1 1 2   2 3 4        targets 2-0, 4-2
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from verl_ext.data.over_length_counts import OverLengthCount
from verl_ext.data.tokenised_data import TokenisedData
from verl_ext.packing import Spans

BLOCK_TOKENS = 1 << 22


@dataclass(frozen=True)
class DocumentScan:
    """targets int32[S]: target tokens of each span, its first token never one; the extreme token ids; the category
    ids (> 0, ascending) that occur on targets; what over-length handling did, by category."""

    targets: NDArray[np.int32]
    min_token_id: int
    max_token_id: int
    category_ids: tuple[int, ...]
    over_length: tuple[OverLengthCount, ...] = ()


def scan_documents(
    data: TokenisedData, spans: Spans, block_tokens: int = BLOCK_TOKENS, progress: bool = True
) -> DocumentScan:
    """One pass over the tokens of `spans` (at least one), over_length left empty; with `progress`, a bar when it takes
    more than 3 s.

    Raises:
        ValueError: a loss_mask other than 0 and 1, a negative category id, a loss_weight negative or not finite; the
            row is named.
    """
    targets = np.zeros(len(spans), np.int32)
    categories: set[int] = set()
    lowest, highest = [], []
    first, last = int(spans.row[0]), int(spans.row[-1]) + 1
    total = int(spans.length.sum(dtype=np.int64))
    off = None if progress else True  # None: where nobody looks
    with tqdm(total=total, desc="reading tokens", unit="tok", unit_scale=True, delay=3, disable=off) as bar:
        for begin, end in data.blocks(first, last, block_tokens):
            low, high = np.searchsorted(spans.row, [begin, end])
            if low == high:
                continue
            block = _Block(data, spans, begin, end, int(low), int(high))
            targets[low:high] = block.targets()
            categories |= block.target_categories()
            block.check_weights()
            lowest.append(block.input_ids.min())
            highest.append(block.input_ids.max())
            bar.update(len(block.input_ids))
    return DocumentScan(targets, int(min(lowest)), int(max(highest)), tuple(sorted(categories - {0})))


def check_has_targets(scan: DocumentScan, key: str) -> None:
    """ValueError when no document has a target."""
    if not scan.targets.any():
        raise ValueError(
            f"{key} must have target tokens; loss_mask is 0 everywhere after the first token of each of its "
            f"{len(scan.targets)} documents"
        )


def check_vocabulary(token_range: tuple[int, int], vocab_size: int, key: str = "data.train_dir") -> None:
    """ValueError when a token id of lowest..highest lies outside 0..vocab_size-1."""
    lowest, highest = token_range
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"{key} must hold token ids of the model's vocabulary (0..{vocab_size - 1}); got ids from "
            f"{lowest} to {highest}: was it tokenised with another tokenizer?"
        )


class _Block:
    """The tokens of spans low..high-1, which are those of rows begin..end-1, without the tokens of no span."""

    def __init__(self, data: TokenisedData, spans: Spans, begin: int, end: int, low: int, high: int) -> None:
        self.key = data.key
        offsets, _ = data.columns["input_ids"].block(begin, end)
        values = {name: column.block(begin, end)[1] for name, column in data.columns.items()}
        length = spans.length[low:high].astype(np.int64)
        if length.sum() == offsets[-1]:  # spans never overlap: every token is in one, in order
            self._take = lambda flat: flat
        else:
            at = offsets[spans.row[low:high] - begin] + spans.start[low:high]
            wanted = np.repeat(at - (np.cumsum(length) - length), length) + np.arange(length.sum())
            self._take = lambda flat: flat[wanted]
        self.row, self.end = spans.row[low:high], np.cumsum(length)
        self.start = self.end - length
        self.input_ids = self._take(values["input_ids"])
        self.category_ids = self._take(values["category_ids"])
        self.loss_weight = self._take(values["loss_weight"]) if "loss_weight" in values else None
        self.is_target = self._checked_mask(self._take(values["loss_mask"]))
        self.is_target[self.start] = False

    def targets(self) -> NDArray[np.int64]:
        running = np.zeros(len(self.is_target) + 1, np.int32)
        np.cumsum(self.is_target, out=running[1:])
        return running[self.end] - running[self.start]

    def target_categories(self) -> set[int]:
        if self.category_ids.min() < 0:
            raise self._error("category_ids at least 0", self.category_ids, self.category_ids < 0)
        on_targets = self.category_ids[self.is_target].astype(np.int64, copy=False)
        if len(on_targets) == 0:
            return set()
        if on_targets.max() < 1 << 20:  # counting is many times faster than sorting
            return set(np.flatnonzero(np.bincount(on_targets)).tolist())
        return set(np.unique(on_targets).tolist())

    def check_weights(self) -> None:
        weight = self.loss_weight
        if weight is not None and not (weight.min() >= 0 and weight.max() < np.inf):  # false for nan too
            raise self._error("loss_weight finite and at least 0", weight, ~((weight >= 0) & (weight < np.inf)))

    def _checked_mask(self, mask: NDArray[Any]) -> NDArray[np.bool_]:
        if mask.dtype != bool and (mask.min() < 0 or mask.max() > 1):
            raise self._error("loss_mask 0 or 1", mask, (mask != 0) & (mask != 1))
        return mask.astype(bool)

    def _error(self, requirement: str, values: NDArray[Any], wrong: NDArray[np.bool_]) -> ValueError:
        at = int(wrong.argmax())
        row = self.row[np.searchsorted(self.end, at, side="right")]
        return ValueError(f"{self.key} must have {requirement}; got {values[at]} in row {row}")
