"""The scan of a dataset over all ranks: each reads a share of the tokens, and the next start none.

    spans of the dataset   | 0 … 40 | 41 … 97 | 98 … 120 |     about as many tokens in each share
    read by rank               0         1          2

Documents longer than a pack are shared once more in the same way, as what is cut off them lies in no span. A sum over
the ranks puts the shares together; what is gathered does not grow with their number.
"""

from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from verl_ext.data import DocumentScan, SFTDataSet
from verl_ext.data.over_length_counts import OverLengthCount, add_counts
from verl_ext.data.scan_memo import ScanMemo
from verl_ext.trainer.process_group import errors_told_once


def share_scan(dataset: SFTDataSet) -> None:
    """Give `dataset` its scan, on every rank: from the memo beside the data, or by reading each token of a
    span once, and the masks and categories of over-length documents.

    All ranks call it together; a mistake in the data is told once and ends all of them.
    """
    memo: ScanMemo | None = None
    remembered: DocumentScan | None = None
    with errors_told_once():
        if dist.get_rank() == 0:
            memo = ScanMemo(dataset.folders, dataset.spans, dataset.over_length)
            remembered = memo.read()
    scan = _from_first_rank(remembered) or _read_together(dataset)
    with errors_told_once():
        dataset.scan = scan  # refuses data without a target
    if memo is not None and remembered is None:
        memo.write(scan)


def shares(lengths: NDArray[np.integer], ranks: int) -> NDArray[np.int64]:
    """int64[ranks+1]: rank r reads documents shares[r]..shares[r+1]-1 of these lengths (at least one), about as many
    tokens as any other."""
    begins = np.cumsum(lengths, dtype=np.int64)
    total = int(begins[-1])
    begins -= lengths
    return np.searchsorted(begins, np.arange(ranks + 1) * (total / ranks))


def _from_first_rank(scan: DocumentScan | None) -> DocumentScan | None:
    box = [scan]
    dist.broadcast_object_list(box)
    return box[0]


def _read_together(dataset: SFTDataSet) -> DocumentScan:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first, last = shares(dataset.spans.length, ranks)[rank : rank + 2].tolist()
    part: DocumentScan | None = None
    over_length: tuple[OverLengthCount, ...] = ()
    with errors_told_once():
        if first < last:  # a rank has no share where there are fewer documents than ranks
            part = dataset.scan_part(first, last, progress=rank == 0)
        if len(dataset.over_length):
            begin, end = shares(dataset.over_length.lengths, ranks)[rank : rank + 2].tolist()
            over_length = dataset.over_length_part(begin, end, progress=rank == 0)
    targets = np.zeros(len(dataset.spans), np.int32)
    if part is not None:
        targets[first:last] = part.targets
    dist.all_reduce(torch.from_numpy(targets))  # every span is of one share: the sum puts the shares together
    values: list[Any] = [None] * ranks
    dist.all_gather_object(values, (part and (part.min_token_id, part.max_token_id, part.category_ids), over_length))
    parts, counts = zip(*values, strict=True)
    lowest, highest, categories = zip(*filter(None, parts), strict=True)
    ids = tuple(sorted(set().union(*categories)))
    return DocumentScan(targets, min(lowest), max(highest), ids, add_counts(chain.from_iterable(counts)))
