"""The beginnings that a dataset's documents share, found by their tokens.

Folders that verl-ext tokenized have the hash of each document's first block as a column, so that only documents that
agree in it are read. Of other folders, the first block of every document is read.
"""

import numpy as np
from numpy.typing import NDArray

from verl_ext.cache import Arrays, fingerprint
from verl_ext.data.tokenized.ranks import Ranks, arrays_of_rank0
from verl_ext.data.tokenized.source import DocumentSource
from verl_ext.data.tokenized.units import UnitRows
from verl_ext.files import file_state
from verl_ext.packing import Spans
from verl_ext.packing.plan import Ints
from verl_ext.packing.shared import (
    BLOCK,
    SHORTER,
    ReadTokens,
    SharedBeginnings,
    find_shared,
    repeated_hashes,
    shared_with_before,
)

SHARE_LEAST = 128  # tokens; below, gathering keys costs more than it saves
NOTICED_SHARE = 0.9  # of the tokens would be computed if documents shared their beginnings
FORMAT = 1  # of cached beginnings; raise it when their meaning changes
SAMPLE_TOKENS = 1 << 24  # read for an estimate, in about half a second


def find_beginnings(data: DocumentSource, spans: Spans, least: int) -> SharedBeginnings:
    """Return the spans that begin with the same `least` tokens or more.

    A later piece of a document that was cut is taken to share nothing.
    """
    whole = np.flatnonzero(spans.start == 0)
    read, first_blocks = row_reader(data, spans.row[whole]), _first_blocks(data, spans, whole)
    kin = find_shared(spans.length[whole], least, read, first_blocks)
    return SharedBeginnings(whole[kin.documents], kin.shared)


def beginnings_of_ranks(data: DocumentSource, spans: Spans, least: int, ranks: Ranks | None) -> SharedBeginnings:
    """Return what :func:`find_beginnings` gives rank 0, which caches it; collective, unless `ranks` is None."""

    def name() -> str:
        # Of the same files, these sums tell how many documents are used and how they are cut.
        used = [len(spans), *(int(values.sum(dtype=np.int64)) for values in (spans.row, spans.start, spans.length))]
        return f"shared-{fingerprint([FORMAT, BLOCK, least, _states(data), used])}"

    named = name if data.files else None  # a user's class may read anything
    found = arrays_of_rank0(ranks, named, lambda: find_beginnings(data, spans, least)._asdict())
    return SharedBeginnings(**found)


def unit_beginnings(data: DocumentSource, units: UnitRows, least: int, ranks: Ranks | None) -> Ints:
    """Return int64[N], the tokens that each row has in common with the one before it in its unit, 0 below `least`.

    Rank 0 reads and caches them; collective, unless `ranks` is None.
    """

    def read() -> Arrays:
        shared = np.zeros(len(data.lengths), np.int64)
        rows = np.setdiff1d(np.arange(len(shared)), units.starts[:-1], assume_unique=True)
        shared[rows] = shared_with_before(rows, data.lengths, row_reader(data))
        return {"shared": np.where(shared < least, 0, shared)}

    return arrays_of_rank0(ranks, lambda: f"units-{fingerprint([FORMAT, least, _states(data)])}", read)["shared"]


def _states(data: DocumentSource) -> list[tuple[str, int, int]]:
    return [file_state(file.path) for file in data.files]


def share_computed(data: DocumentSource, spans: Spans, least: int) -> float | None:
    """Estimate the share of tokens computed if documents shared their beginnings.

    Of the documents with a common first block, the first in the data's order with SAMPLE_TOKENS together are read; the
    others are taken to share as much. None without hashes of first blocks, because reading them takes long.
    """
    whole = np.flatnonzero(spans.start == 0)
    first = _first_blocks(data, spans, whole)
    if first is None:
        return None
    candidates = whole[repeated_hashes(first)]
    tokens = np.cumsum(spans.length[candidates], dtype=np.int64)
    sample = candidates[: int(np.searchsorted(tokens, SAMPLE_TOKENS)) + 1]
    if not len(sample):
        return 1.0
    kin = find_shared(spans.length[sample], least, row_reader(data, spans.row[sample]))
    saved = kin.saved_tokens / spans.length[sample].sum(dtype=np.int64) * tokens[-1]
    return 1.0 - float(saved) / int(spans.length.sum(dtype=np.int64))


def _first_blocks(data: DocumentSource, spans: Spans, whole: Ints) -> NDArray[np.uint64] | None:
    """Return first blocks' hashes of spans that begin a document, or None."""
    known = data.first_blocks
    return None if known is None else np.where(spans.length[whole] < BLOCK, SHORTER, known[spans.row[whole]])


def row_reader(data: DocumentSource, rows: Ints | None = None) -> ReadTokens:
    """Return a reader of parts of documents, rows of data or `rows`."""

    def read(documents: Ints, starts: Ints, sizes: Ints) -> Ints:
        tokens = np.empty(int(sizes.sum()), np.int64)
        if len(documents):
            data.gather(documents if rows is None else rows[documents], starts, sizes, {"input_ids": tokens})
        return tokens

    return read
