"""What over-length handling does to the tokens and targets of the documents that are longer than a pack.

The documents are read in blocks of whole ones, so that ranks may share them and a memo may keep the counts:

    loss_mask      1 1 0 1 1 1 | 0 0 0 0 1       documents of 6 and 5 tokens, cut after 4
    targets        4             1               the first token of a document is never one
    truncate       2 left        0 left
    split          3 left        0 left          nor is the first token of a piece

DocumentScan: what one pass over the tokens tells: targets of every document, token ids, categories that occur.

The pass reads the memory-mapped buffers in blocks of a few million tokens, so that its private memory does not grow
with the dataset. The target tokens of a span are a difference of the running count, its first token left out:

    loss_mask      1 1 0 1 | 0 1 1        spans [0,4) [4,7)
    is_target      0 1 0 1 | 0 1 1
    running      0 0 1 1 2   2 3 4        targets 2-0, 4-2

ScanMemo: the scan of a dataset kept beside its data, so that the next start reads no token.

    FOLDER/.verl_ext_scan.npz    key           what was scanned, as a digest: data files and documents
                                 targets       int32[S]
                                 token_ids     int64[2], lowest and highest
                                 category_ids  int64[C]
                                 over_length   int64[K,7], a row for each OverLengthCount

A memo is never needed: one that is missing, broken or of other data is ignored, and one that cannot be written is not.
"""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from verl_ext.data.arrow import TokenisedData
from verl_ext.data.categories import FILE_NAME as CATEGORIES
from verl_ext.packing import Spans

BLOCK_TOKENS = 1 << 22


class OverLengthCount(NamedTuple):
    """The over-length documents of one category; the numbers are those of OverLengthRow."""

    category: int
    documents: int
    tokens: int
    tokens_kept: int
    targets_removed: int
    lost_last_target: int
    without_target: int


@dataclass(frozen=True)
class OverLengthDocuments:
    """rows int64[M] ascending, their lengths int64[M] > max_tokens; policy: drop, truncate or split."""

    rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    max_tokens: int
    policy: str

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, lengths: NDArray[np.int64], max_tokens: int, policy: str) -> "OverLengthDocuments":
        """Those of rows 0..N-1 with these lengths, int64[N]."""
        rows = np.flatnonzero(lengths > max_tokens)
        return cls(rows, lengths[rows], max_tokens, policy)

    def part(self, first: int, last: int) -> "OverLengthDocuments":
        """Documents first..last-1 of these."""
        return OverLengthDocuments(self.rows[first:last], self.lengths[first:last], self.max_tokens, self.policy)


def count_over_length(
    data: TokenisedData, documents: OverLengthDocuments, block_tokens: int = BLOCK_TOKENS, progress: bool = True
) -> tuple[OverLengthCount, ...]:
    """By category, ascending; reads each document once. A document's category is its most frequent one but 0, of
    equals the smallest. With `progress`, a bar when it takes more than 3 s."""
    if len(documents) == 0:
        return ()
    counts: list[OverLengthCount] = []
    off = None if progress else True  # None: where nobody looks
    with tqdm(total=len(documents), desc="counting over-length documents", unit="doc", delay=3, disable=off) as bar:
        for begin, end in data.blocks(int(documents.rows[0]), int(documents.rows[-1]) + 1, block_tokens):
            low, high = np.searchsorted(documents.rows, [begin, end])
            if low < high:
                counts += _count_block(data, begin, end, documents.part(int(low), int(high)))
                bar.update(int(high - low))
    return add_counts(counts)


def add_counts(counts: Iterable[OverLengthCount]) -> tuple[OverLengthCount, ...]:
    """One for each category, ascending."""
    sums: dict[int, NDArray[np.int64]] = {}
    for category, *numbers in counts:
        sums[category] = sums.get(category, np.zeros(len(numbers), np.int64)) + np.asarray(numbers)
    return tuple(OverLengthCount(category, *sums[category].tolist()) for category in sorted(sums))


def _count_block(data: TokenisedData, begin: int, end: int, documents: OverLengthDocuments) -> list[OverLengthCount]:
    offsets, loss_mask = data.columns["loss_mask"].block(begin, end)
    category_ids = data.columns["category_ids"].block(begin, end)[1]
    length = documents.lengths
    ends = np.cumsum(length)
    starts = ends - length
    if ends[-1] < offsets[-1]:  # documents that fit lie between
        wanted = np.repeat(offsets[documents.rows - begin] - starts, length) + np.arange(ends[-1])
        loss_mask, category_ids = loss_mask[wanted], category_ids[wanted]
    categories = _main_categories(category_ids, starts)
    per_document = np.stack(
        [np.ones_like(length), length, _tokens_kept(documents), *_targets_lost(loss_mask != 0, starts, documents)]
    )
    found, of_document = np.unique(categories, return_inverse=True)
    sums = np.zeros((len(found), len(per_document)), np.int64)
    np.add.at(sums, of_document, per_document.T)
    return [OverLengthCount(category, *row) for category, row in zip(found.tolist(), sums.tolist(), strict=True)]


def _tokens_kept(documents: OverLengthDocuments) -> NDArray[np.int64]:
    if documents.policy == "split":
        return documents.lengths
    return np.full_like(documents.lengths, documents.max_tokens if documents.policy == "truncate" else 0)


def _targets_lost(
    is_target: NDArray[np.bool_], starts: NDArray[np.int64], documents: OverLengthDocuments
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """(targets removed, whether the last one was, whether there were targets and none is left), of each document;
    is_target of their tokens is overwritten."""
    size, policy = documents.max_tokens, documents.policy
    is_target[starts] = False
    ends = starts + documents.lengths
    running = np.zeros(len(is_target) + 1, np.int64)
    np.cumsum(is_target, out=running[1:])
    before = running[ends] - running[starts]
    if policy == "split":
        cuts = (documents.lengths - 1) // size
        nth = np.arange(cuts.sum()) - np.repeat(np.cumsum(cuts) - cuts, cuts) + 1
        at_cuts = is_target[np.repeat(starts, cuts) + nth * size]
        removed = np.add.reduceat(at_cuts, np.cumsum(cuts) - cuts, dtype=np.int64)
    else:
        removed = running[ends] - running[starts + (size if policy == "truncate" else 0)]
    had = before > 0
    last = np.zeros_like(before)
    last[had] = np.flatnonzero(is_target)[running[ends[had]] - 1] - starts[had]
    gone = {"split": last % size == 0, "truncate": last >= size, "drop": np.ones_like(had)}[policy]
    return removed, had & gone, had & (removed == before)


def _main_categories(category_ids: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[documents]: the most frequent category of each but 0, of equals the smallest; 0 where there is no other."""
    changes = np.ones(len(category_ids), bool)
    np.not_equal(category_ids[1:], category_ids[:-1], out=changes[1:])
    changes[starts] = True
    runs = np.flatnonzero(changes)  # categories change rarely: a few runs a document instead of its tokens
    ids, of_run = np.unique(category_ids[runs], return_inverse=True)
    document = np.searchsorted(starts, runs, side="right") - 1
    pairs, of_pair = np.unique(document * len(ids) + of_run, return_inverse=True)
    tokens = np.bincount(of_pair, np.diff(runs, append=len(category_ids)))
    document, category = pairs // len(ids), ids[pairs % len(ids)].astype(np.int64)
    named = category != 0
    document, category, tokens = document[named], category[named], tokens[named]
    best_last = np.lexsort((-category, tokens, document))
    main = np.zeros(len(starts), np.int64)
    main[document[best_last]] = category[best_last]  # of one document, the last assignment holds
    return main


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


FILE_NAME = ".verl_ext_scan.npz"
FORMAT = 2  # to be raised when a scan means something else


class ScanMemo:
    """The memo of the scan of `spans` and `over_length` documents of `folders`; it lies in the first of them."""

    def __init__(self, folders: Sequence[str], spans: Spans, over_length: OverLengthDocuments) -> None:
        self.path = Path(folders[0]) / FILE_NAME
        self._documents = len(spans)
        self._key = _digest(folders, spans, over_length)

    def read(self) -> DocumentScan | None:
        """The scan, or None when there is none of exactly this data."""
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                if arrays["key"].item() != self._key:
                    return None
                targets, (lowest, highest) = arrays["targets"], arrays["token_ids"].tolist()
                categories = tuple(arrays["category_ids"].tolist())
                over_length = tuple(OverLengthCount(*numbers) for numbers in arrays["over_length"].tolist())
        except Exception:  # whatever is wrong with the file, the data can be read instead
            return None
        if targets.dtype != np.int32 or targets.shape != (self._documents,):
            return None
        return DocumentScan(targets, lowest, highest, categories, over_length)

    def write(self, scan: DocumentScan) -> None:
        """Keep `scan`, unless the folder cannot be written to. Readers see the old memo or the new one, whole."""
        unfinished = self.path.with_name(f"{FILE_NAME}.{uuid.uuid4().hex}")
        try:
            with open(unfinished, "xb") as file:
                np.savez(
                    file,
                    key=np.array(self._key),
                    targets=scan.targets,
                    token_ids=np.array([scan.min_token_id, scan.max_token_id], np.int64),
                    category_ids=np.array(scan.category_ids, np.int64),
                    over_length=np.array(scan.over_length, np.int64).reshape(-1, len(OverLengthCount._fields)),
                )
            os.replace(unfinished, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()


def _digest(folders: Sequence[str], spans: Spans, over_length: OverLengthDocuments) -> str:
    """Of the data files (name, size, time of change), the datasets' fingerprints and categories, the spans and the
    over-length documents."""
    files = [_folder_facts(Path(folder)) for folder in folders]
    handling = [over_length.max_tokens, over_length.policy] if len(over_length) else None
    digest = hashlib.sha256(json.dumps([FORMAT, files, len(spans), len(over_length), handling]).encode())
    for array in (spans.row, spans.start, spans.length, over_length.rows, over_length.lengths):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _folder_facts(folder: Path) -> list[Any]:
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    names = folder / CATEGORIES
    facts: list[Any] = [state.get("_fingerprint"), names.read_text(encoding="utf-8") if names.exists() else None]
    for file in state["_data_files"]:
        status = (folder / file["filename"]).stat()
        facts.append([file["filename"], status.st_size, status.st_mtime_ns])
    return facts
