"""DocumentScan: what only the tokens show of the documents to pack: targets, token ids, categories, what was cut off.

Folders that verl-ext has tokenized have these numbers as columns. Of other folders, and of documents longer than a
pack, the tokens are read once, in blocks of a few million, each rank its share; the result is kept for the next start.

    loss_mask      1 1 0 1 1 1 | 0 1 1        documents of 6 and 3 tokens; no first token is ever a target
    running      0 1 2 2 3 4 5   5 6 7        targets: 5-1, 7-5
    truncate at 4                             span [0,4): 3-1 targets, the last one is gone
    split at 4                                spans [0,4) [4,6): 3-1, 5-4: nor is the first token of a piece
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from verl_ext.data.arrow import TokenizedData
from verl_ext.data.dataset import ONE_RANK, Ranks
from verl_ext.data.left_out import OverLengthCount
from verl_ext.files import CATEGORIES, default_root, whole_file
from verl_ext.packing import Spans
from verl_ext.packing.plan import offsets_of
from verl_ext.text.arrow_folder import read_state

BLOCK_TOKENS = 1 << 22
FILE_NAME = ".verl_ext_scan.npz"
FORMAT = 3  # of a kept scan; to be raised when it means something else


@dataclass(frozen=True)
class OverLengthDocuments:
    """rows int64[M] ascending, their lengths integer[M] > max_tokens; policy: drop, truncate or split."""

    rows: NDArray[np.int64]
    lengths: NDArray[np.integer]
    max_tokens: int
    policy: str

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(
        cls, lengths: NDArray[np.integer], max_tokens: int, policy: str, rows: NDArray[np.int64] | None = None
    ) -> "OverLengthDocuments":
        """Those of documents of these lengths, int64[N]; rows int64[N]: where they lie, None: 0..N-1."""
        over = np.flatnonzero(lengths > max_tokens)
        return cls(over if rows is None else rows[over], lengths[over], max_tokens, policy)


@dataclass(frozen=True)
class DocumentScan:
    """targets int32[S]: target tokens of each span, its first token never one; the extreme token ids; the category
    ids (> 0, ascending) that occur on targets; what over-length handling did, by category. tokens_read: by this rank.
    """

    targets: NDArray[np.int32]
    min_token_id: int
    max_token_id: int
    category_ids: tuple[int, ...]
    over_length: tuple[OverLengthCount, ...] = ()
    tokens_read: int = 0


def scan_documents(
    data: TokenizedData,
    spans: Spans,
    over_length: OverLengthDocuments | None = None,
    ranks: Ranks = ONE_RANK,
    *,
    keep: bool = False,
    block_tokens: int = BLOCK_TOKENS,
) -> DocumentScan:
    """The scan of `spans` (at least one). All ranks call it together, each reads about as many tokens as any other.

    keep: a scan that was kept is taken, and a new one kept: beside the data, or in the cache of `datasets` where that
    cannot be written. A kept scan is never needed: one that is missing, broken or of other data is ignored.

    Raises:
        ValueError: a loss_mask other than 0 and 1, a negative category id, a loss_weight negative or not finite (the
            row is named); no target at all.
    """
    over = over_length or OverLengthDocuments.of(np.zeros(0, np.int64), 0, "drop")
    columns = data.document_columns
    is_read = np.zeros(len(data), bool)
    is_read[over.rows] = True
    is_read[spans.row if columns is None else spans.row[columns.num_targets[spans.row] < 0]] = True
    keep = keep and bool(is_read.any())
    kept, name = None, ""
    if keep:
        with ranks.guard():
            if ranks.rank == 0:
                name = _digest(data.folders, spans, over)
                kept = _read_kept(data.folders, name, len(spans))
        kept = ranks.broadcast(kept)
    scan = kept or _scan(data, spans, over, is_read, ranks, block_tokens)
    with ranks.guard():
        if not scan.targets.any():
            where = f"after the first token of each of its {len(spans)} documents"
            raise ValueError(f"{data.key} must have target tokens; loss_mask is 0 everywhere {where}")
    if keep and kept is None and ranks.rank == 0:
        _keep(data.folders, name, scan)
    return scan


def check_vocabulary(token_range: tuple[int, int], vocab_size: int, key: str = "data.train_dir") -> None:
    """ValueError when a token id of lowest..highest lies outside 0..vocab_size-1."""
    lowest, highest = token_range
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"{key} must hold token ids of the model's vocabulary (0..{vocab_size - 1}); got ids from "
            f"{lowest} to {highest}: was it tokenized with another tokenizer?"
        )


def shares(lengths: NDArray[np.integer], ranks: int) -> NDArray[np.int64]:
    """int64[ranks+1]: rank r reads documents shares[r]..shares[r+1]-1 of these lengths (at least one), about as many
    tokens as any other."""
    begins = np.cumsum(lengths, dtype=np.int64)
    total = int(begins[-1])
    begins -= lengths
    return np.searchsorted(begins, np.arange(ranks + 1) * (total / ranks))


def _scan(
    data: TokenizedData,
    spans: Spans,
    over: OverLengthDocuments,
    is_read: NDArray[np.bool_],
    ranks: Ranks,
    block_tokens: int,
) -> DocumentScan:
    """The documents of is_read bool[N] from their tokens, the others from their columns."""
    columns = data.document_columns
    of_tokens: Any = slice(None) if columns is None else is_read[spans.row]  # a slice copies nothing
    part = _Part(data, Spans(spans.row[of_tokens], spans.start[of_tokens], spans.length[of_tokens]), over)
    if is_read.any():
        with ranks.guard():
            rows = np.flatnonzero(is_read)
            first, last = shares(data.lengths[rows], ranks.size)[ranks.rank : ranks.rank + 2].tolist()
            part.read(rows[first:last], block_tokens, has_bar=ranks.rank == 0)
        ranks.all_reduce(part.targets)  # every span is of one share: the sum puts the shares together
    targets = np.empty(len(spans), np.int32)
    targets[of_tokens] = part.targets
    found = ranks.gather((part.token_ids, part.categories, part.counts))
    token_ids, categories, counts = (list(values) for values in zip(*found, strict=True))
    if columns is not None and not of_tokens.all():
        row = spans.row[~of_tokens]
        targets[~of_tokens] = columns.num_targets[row]
        token_ids.append([int(columns.lowest_token_id[row].min()), int(columns.highest_token_id[row].max())])
        categories.append(set(np.unique(columns.category[row[columns.num_targets[row] > 0]]).tolist()))
    ids = list(chain.from_iterable(token_ids))
    return DocumentScan(
        targets,
        min(ids),
        max(ids),
        tuple(sorted(set().union(*categories) - {0})),
        add_counts(chain.from_iterable(counts)),
        part.tokens_read,
    )


def add_counts(counts: Iterable[OverLengthCount]) -> tuple[OverLengthCount, ...]:
    """One for each category, ascending."""
    sums: dict[int, NDArray[np.int64]] = {}
    for category, *numbers in counts:
        sums[category] = sums.get(category, 0) + np.array(numbers)
    return tuple(OverLengthCount(category, *sums[category].tolist()) for category in sorted(sums))


class _Part:
    """What one rank finds in its share: targets int32[S] of `spans` (0 of other shares), the extreme token ids of each
    block, categories of targets, and counts of the documents longer than a pack."""

    def __init__(self, data: TokenizedData, spans: Spans, over: OverLengthDocuments) -> None:
        self.data, self.spans, self.over = data, spans, over
        self.targets = np.zeros(len(spans), np.int32)
        self.token_ids: list[int] = []
        self.categories: set[int] = set()
        self.counts: list[OverLengthCount] = []
        self.tokens_read = 0

    def read(self, rows: NDArray[np.int64], block_tokens: int, has_bar: bool) -> None:
        """Read documents `rows`, ascending, with a bar that shows after 3 s."""
        if not len(rows):  # fewer documents than ranks
            return
        total = int(self.data.lengths[rows].sum(dtype=np.int64))
        hidden = None if has_bar else True  # None: unless stderr is a terminal
        with tqdm(total=total, desc="reading tokens", unit="tok", unit_scale=True, delay=3, disable=hidden) as bar:
            for begin, end in self.data.blocks(int(rows[0]), int(rows[-1]) + 1, block_tokens):
                low, high = np.searchsorted(rows, [begin, end])
                if low < high:
                    tokens = self._read_block(begin, end, rows[low:high])
                    self.tokens_read += tokens
                    bar.update(tokens)

    def _read_block(self, begin: int, end: int, rows: NDArray[np.int64]) -> int:
        """Documents `rows` of the dataset's rows begin..end-1; how many tokens they have."""
        offsets, values = offsets_of(self.data.lengths[begin:end]), self.data.block(begin, end)
        length = np.diff(offsets) if len(rows) == end - begin else np.diff(offsets)[rows - begin]
        ends = np.cumsum(length)
        starts, tokens = ends - length, int(ends[-1])
        if tokens < offsets[-1]:  # documents that are not read lie between
            wanted = np.repeat(offsets[rows - begin] - starts, length) + np.arange(tokens)
            values = {name: flat[wanted] for name, flat in values.items()}
        part = slice(*np.searchsorted(self.spans.row, [begin, end]).tolist())
        of_row = starts  # where each span's document begins
        if part.stop - part.start != len(rows):
            of_row = starts[np.searchsorted(rows, self.spans.row[part])]
        first = of_row + self.spans.start[part]
        after = first + self.spans.length[part]

        is_target = values["loss_mask"] != 0
        running = np.zeros(tokens + 1, np.int32)
        np.cumsum(is_target, out=running[1:])
        targets = self.targets[part] = running[after] - running[first + 1]
        over = slice(*np.searchsorted(self.over.rows, [begin, end]).tolist())
        if over.start < over.stop:
            self._count_over_length(over, part, rows, starts, is_target, running, values["category_ids"])
        if not len(targets):
            return tokens
        is_target[first] = False
        if (after - first).sum() < tokens:  # what is cut off or dropped is no token of the packs
            steps = np.zeros(tokens + 1, np.int8)
            steps[first] += 1
            steps[after] -= 1
            inside = np.flatnonzero(np.cumsum(steps[:-1], dtype=np.int8))
            values, is_target = {name: flat[inside] for name, flat in values.items()}, is_target[inside]
            ends = np.searchsorted(inside, ends)
        self._check(values, rows, ends)
        ids = values["input_ids"]
        self.token_ids += [int(ids.min()), int(ids.max())]
        self.categories |= _distinct(values["category_ids"][is_target])
        return tokens

    def _check(self, values: dict[str, NDArray[Any]], rows: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """ValueError for values out of range; ends: where the tokens of `rows` end."""

        def refuse(requirement: str, found: NDArray[Any], wrong: NDArray[np.bool_]) -> None:
            at = int(wrong.argmax())
            row = rows[np.searchsorted(ends, at, side="right")]
            raise ValueError(f"{self.data.key} must have {requirement}; got {found[at]} in row {row}")

        mask, categories, weight = values["loss_mask"], values["category_ids"], values.get("loss_weight")
        if mask.dtype != bool and (mask.min() < 0 or mask.max() > 1):
            refuse("loss_mask 0 or 1", mask, (mask != 0) & (mask != 1))
        if categories.min() < 0:
            refuse("category_ids at least 0", categories, categories < 0)
        if weight is not None and not (weight.min() >= 0 and weight.max() < np.inf):  # false for nan too
            refuse("loss_weight finite and at least 0", weight, ~((weight >= 0) & (weight < np.inf)))

    def _count_over_length(
        self,
        over: slice,
        part: slice,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        is_target: NDArray[np.bool_],
        running: NDArray[np.int32],
        category_ids: NDArray[Any],
    ) -> None:
        """Counts the documents `over` of self.over, of spans `part`; rows, starts: the block's documents; running:
        targets before each of its tokens."""
        policy, size = self.over.policy, self.over.max_tokens
        row, length = self.over.rows[over], self.over.lengths[over]
        at = np.searchsorted(rows, row)
        start, end = starts[at], starts[at] + length
        targets = running[end] - running[start + 1]
        kept = np.concatenate([[0], np.cumsum(self.targets[part])])
        of_span = self.spans.row[part]
        removed = targets - (kept[np.searchsorted(of_span, row, "right")] - kept[np.searchsorted(of_span, row)])
        has_target = targets > 0
        last = np.zeros_like(length)  # the place of the last target
        last[has_target] = np.flatnonzero(is_target)[running[end[has_target]] - 1] - start[has_target]
        is_lost = {"split": last % size == 0, "truncate": last >= size, "drop": np.ones_like(has_target)}[policy]
        tokens_kept = {"split": length, "truncate": np.full_like(length, size), "drop": np.zeros_like(length)}[policy]
        losses = removed, has_target & is_lost, has_target & (removed == targets)
        per_document = np.stack([np.ones_like(length), length, tokens_kept, *losses]).T
        category = _main_categories(category_ids, starts)[at]
        for number in np.unique(category).tolist():
            self.counts.append(OverLengthCount(number, *per_document[category == number].sum(0).tolist()))


def _distinct(categories: NDArray[Any]) -> set[int]:
    """The categories that occur, at least 0 each."""
    categories = categories.astype(np.int64, copy=False)
    if len(categories) and categories.max() < 1 << 20:  # counting is many times faster than sorting
        return set(np.flatnonzero(np.bincount(categories)).tolist())
    return set(np.unique(categories).tolist())


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


def _places(folders: Sequence[str], name: str) -> tuple[Path, Path]:
    """Where a scan may be kept: beside the data, or in the cache."""
    return Path(folders[0]) / FILE_NAME, default_root("verl_ext_scan", None) / f"{name[:32]}.npz"


def _read_kept(folders: Sequence[str], name: str, documents: int) -> DocumentScan | None:
    """The kept scan of this name, None where there is none."""
    for path in _places(folders, name):
        try:
            with np.load(path, allow_pickle=False) as arrays:
                if arrays["key"].item() != name:
                    continue
                over_length = tuple(OverLengthCount(*numbers) for numbers in arrays["over_length"].tolist())
                (lowest, highest), categories = arrays["token_ids"].tolist(), tuple(arrays["category_ids"].tolist())
                scan = DocumentScan(arrays["targets"], lowest, highest, categories, over_length)
        except Exception:  # whatever is wrong with the file, the data can be read instead
            continue
        if scan.targets.dtype == np.int32 and scan.targets.shape == (documents,):
            return scan
    return None


def _keep(folders: Sequence[str], name: str, scan: DocumentScan) -> None:
    """Keep `scan` in the first place where a file can be written."""
    beside, cached = _places(folders, name)
    for path in (beside, cached):
        with contextlib.suppress(OSError):
            if path == cached:
                path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as partial, open(partial, "xb") as file:
                np.savez(
                    file,
                    key=np.array(name),
                    targets=scan.targets,
                    token_ids=np.array([scan.min_token_id, scan.max_token_id], np.int64),
                    category_ids=np.array(scan.category_ids, np.int64),
                    over_length=np.array(scan.over_length, np.int64).reshape(-1, len(OverLengthCount._fields)),
                )
            return


def _digest(folders: Sequence[str], spans: Spans, over: OverLengthDocuments) -> str:
    """Of the data files (name, size, time of change), the datasets' fingerprints and categories, the spans and the
    over-length documents."""
    facts: list[Any] = [FORMAT, len(spans), len(over), [over.max_tokens, over.policy] if len(over) else None]
    for folder in map(Path, folders):
        state = read_state(folder)
        names = folder / CATEGORIES
        facts += [state.fingerprint, names.read_text(encoding="utf-8") if names.exists() else None]
        for shard in state.shards:
            status = (folder / shard.name).stat()
            facts += [shard.name, status.st_size, status.st_mtime_ns]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for array in (spans.row, spans.start, spans.length, over.rows, over.lengths):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
