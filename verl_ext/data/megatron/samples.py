"""Megatron's three indices over a stream of documents, equal to those of megatron-core's GPTDataset for the same seed.

    document_index   the documents of all epochs in one shuffled order: the stream
    sample_index     row k: where token k·seq_len of the stream lies, (place in document_index, offset)
    shuffle_index    the order in which samples are drawn

    document_index   4       1           4    …         seq_len 4: a sample has 5 tokens, its last one is also the
    stream           a b c | d e f g h | a b …          first of the next, so that every token is a target once
    sample_index     (0,0)     (1,1)       (2,0)
    sample 0         a b c   d e
    sample 1                   e f g h   a

Where the last epoch gives less than 80 % of its samples, its documents and samples are shuffled on their own, after
those of all epochs before. The indices, and the order of a blend, are kept as .npy files of a cached folder.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.megatron.blend import BLEND_RULES, Order, check_weights
from verl_ext.data.megatron.index import TokenIndex
from verl_ext.files import cached_folder
from verl_ext.text.tokenized import digest, file_facts

FORMAT = 1  # to be raised when the same input gives other arrays
KEY = "data.cache_dir"
BLOCK = 1 << 18  # documents and rows located at a time
MAX_INT32 = np.iinfo(np.int32).max
MAX_UINT32 = np.iinfo(np.uint32).max

Pieces = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # document, start, stop: int64[P] each
Layout = Mapping[str, tuple[tuple[int, ...], Any]]  # name of an array: (shape, dtype)
Blocks = Mapping[str, Iterable[NDArray[Any]]]  # name of an array: its rows, in blocks


@dataclass(eq=False)
class SampleIndices:
    """Sample k is row shuffle_index[k] of sample_index: seq_len + 1 tokens.

    document_index int32[E·D] (numbers into `lengths`), sample_index int32|int64[n+1, 2], shuffle_index
    uint32|int64[n]; lengths int32|int64: tokens of every document of the corpus.
    """

    document_index: NDArray[np.int32]
    sample_index: NDArray[Any]
    shuffle_index: NDArray[Any]
    lengths: NDArray[Any]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def pieces(self, k: int) -> Pieces:
        """The tokens of sample k as pieces of documents, none of them empty: (document, start, stop) int64[P] each."""
        row = self.shuffle_index.item(k)
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        document = self.document_index[first : last + 1].astype(np.int64)
        stop = self.lengths[document].astype(np.int64)
        start = np.zeros(len(document), np.int64)
        start[0] = begin
        stop[-1] = end + 1
        full = stop > start
        return (document, start, stop) if full.all() else (document[full], start[full], stop[full])

    def piece_counts(self, block: int = BLOCK) -> NDArray[np.int64]:
        """int64[n]: non-empty pieces of each sample."""
        counts = np.empty(len(self), np.int64)
        for row in range(0, len(self), block):
            place = self.sample_index[row : row + block + 1, 0]
            begin, end = int(place[0]), int(place[-1])
            running = np.zeros(end - begin + 2, np.int64)
            for first in range(begin, end + 1, block):
                part = self.document_index[first : min(first + block, end + 1)]
                running[first - begin + 1 : first - begin + 1 + len(part)] = self.lengths[part] > 0
            np.cumsum(running, out=running)
            counts[row : row + len(place) - 1] = running[place[1:] - begin + 1] - running[place[:-1] - begin]
        return counts[self.shuffle_index]


class EpochPlan(NamedTuple):
    """How often the documents are repeated, and how many samples that gives."""

    epochs: int
    samples: int
    samples_before_last: int  # of the epochs shuffled together; samples where the last is one of them

    def layout(self, num_documents: int, longest: int) -> Layout:
        """The arrays of the indices, of documents of up to `longest` tokens."""
        places = self.epochs * num_documents
        return {
            "document_index": ((places,), np.int32),
            "sample_index": ((self.samples + 1, 2), np.int32 if max(places, longest) <= MAX_INT32 else np.int64),
            "shuffle_index": ((self.samples,), np.uint32 if self.samples < MAX_UINT32 - 1 else np.int64),
        }


def check_has_sample(num_tokens: int, needed: int, key: str) -> None:
    """ValueError where a corpus has fewer tokens than one sample needs."""
    if num_tokens < needed:
        raise ValueError(
            f"{key} must have the {needed} tokens that a sample of data.seq_len needs; got {num_tokens} tokens"
        )


def epochs_needed(num_tokens: int, seq_len: int, num_samples: int | None) -> int:
    """Epochs of num_tokens tokens that num_samples samples of seq_len targets need (None: one epoch)."""
    return 1 if num_samples is None else max(1, -(-(num_samples * seq_len + 1) // num_tokens))


def plan_epochs(num_tokens: int, seq_len: int, num_samples: int | None, key: str) -> EpochPlan:
    """The epochs and samples that Megatron takes. There may be more samples than asked for.

    Raises:
        ValueError: fewer tokens than one sample has, seq_len + 1; `key` is named.
    """
    check_has_sample(num_tokens, seq_len + 1, key)
    epochs = epochs_needed(num_tokens, seq_len, num_samples)
    samples = (epochs * num_tokens - 1) // seq_len
    if epochs == 1:
        return EpochPlan(epochs, samples, samples)
    assert num_samples is not None
    before = ((epochs - 1) * num_tokens - 1) // seq_len
    per_epoch = (num_tokens - 1) // seq_len
    separate = num_samples - before < 4 * per_epoch // 5  # Megatron's int(0.80 * per_epoch), for all up to 2^50
    return EpochPlan(epochs, samples, before if separate else samples)


def count_tokens(lengths: NDArray[Any], documents: NDArray[Any] | None = None) -> int:
    """Tokens of `documents` (None: all)."""
    return int((lengths if documents is None else lengths[documents]).sum(dtype=np.int64))


def build_sample_indices(
    lengths: NDArray[Any],
    documents: NDArray[Any] | None,
    seq_len: int,
    num_samples: int | None,
    seed: int,
    key: str = "data.train_dir",
    *,
    block: int = BLOCK,
) -> SampleIndices:
    """The indices of `documents` (numbers into `lengths`; None: all) for at least num_samples samples; None: one epoch.

    Raises:
        ValueError: fewer tokens than one sample has; `key` is named.
    """
    plan = plan_epochs(count_tokens(lengths, documents), seq_len, num_samples, key)
    layout = plan.layout(len(lengths if documents is None else documents), int(lengths.max()))
    document_index, shuffle_index = _shuffles(len(lengths), documents, plan, layout, seed)
    sample_index, row = np.empty(*layout["sample_index"]), 0
    for part in _sample_rows(lengths, document_index, seq_len, layout, block):
        sample_index[row : row + len(part)] = part
        row += len(part)
    return SampleIndices(document_index, sample_index, shuffle_index, lengths)


def _shuffles(
    num_documents: int, documents: NDArray[Any] | None, plan: EpochPlan, layout: Layout, seed: int
) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """(document_index, shuffle_index), in the order in which Megatron draws them."""
    random = np.random.RandomState(seed)
    once = np.arange(num_documents, dtype=np.int32) if documents is None else np.asarray(documents, np.int32)
    separate_last = plan.samples_before_last < plan.samples
    stream, together = np.tile(once, plan.epochs), len(once) * (plan.epochs - separate_last)
    order = np.arange(plan.samples, dtype=layout["shuffle_index"][1])
    for part in (
        stream[:together],
        stream[together:],
        order[: plan.samples_before_last],
        order[plan.samples_before_last :],
    ):
        random.shuffle(part)
    return stream, order


def _sample_rows(
    lengths: NDArray[Any], document_index: NDArray[np.int32], seq_len: int, layout: Layout, block: int = BLOCK
) -> Iterator[NDArray[Any]]:
    """The rows of sample_index, ascending, block by block of documents."""
    (rows, _), dtype = layout["sample_index"]
    yield np.zeros((1, 2), dtype)  # also where the first document is empty
    row, begin = 1, 0
    for first in range(0, len(document_index), block):
        length = lengths[document_index[first : first + block]]
        ends = np.cumsum(length, dtype=np.int64)
        end = begin + int(ends[-1])
        stop = min(rows, -(-end // seq_len))  # rows before it have positions below `end`
        while row < stop:
            position = np.arange(row, min(row + block, stop), dtype=np.int64) * seq_len - begin
            place = np.searchsorted(ends, position, side="right")
            part = np.empty((len(position), 2), dtype)
            part[:, 0] = place + first
            part[:, 1] = position - ends[place] + length[place]
            yield part
            row += len(part)
        begin = end
    assert row == rows, "every sample must begin inside the stream"


class CachedSampleIndices(SampleIndices):
    """The memory-mapped arrays of a cached folder, as which it is pickled."""

    def __init__(self, folder: Path, index: TokenIndex, layout: Layout) -> None:
        super().__init__(**_mapped(folder, layout), lengths=index.lengths)
        self._arguments = folder, index, layout

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedSampleIndices, self._arguments


def cached_sample_indices(
    root: Path,
    index: TokenIndex,
    documents: NDArray[Any] | None,
    seq_len: int,
    num_samples: int | None,
    seed: int,
) -> SampleIndices:
    """`build_sample_indices` of `documents` of `index` (None: all), kept in a folder of `root`.

    Raises:
        ValueError: a corpus shorter than one sample (names index.key); a root that cannot be written, arrays that are
            not what they were (name data.cache_dir).
    """
    num_tokens = index.num_tokens if documents is None else count_tokens(index.lengths, documents)
    plan = plan_epochs(num_tokens, seq_len, num_samples, index.key)
    layout = plan.layout(index.num_documents if documents is None else len(documents), int(index.lengths.max()))
    chosen = None if documents is None else np.ascontiguousarray(documents, np.int32)
    of_documents = None if chosen is None else hashlib.sha256(chosen.data).hexdigest()
    facts = [file_facts(index.files), index.digest, of_documents, seq_len, num_samples, seed]

    def blocks() -> Blocks:
        document_index, shuffle_index = _shuffles(index.num_documents, chosen, plan, layout, seed)
        rows = _sample_rows(index.lengths, document_index, seq_len, layout)
        return {"document_index": [document_index], "sample_index": rows, "shuffle_index": [shuffle_index]}

    return CachedSampleIndices(_cached(root, "samples", facts, layout, blocks), index, layout)


def cached_blend(
    root: Path, weights: Sequence[float], n: int, rule: str = "tijdeman", key: str = "data.blend"
) -> Order:
    """The order of n samples of a blend by one of BLEND_RULES, kept in a folder of `root`.

    Raises:
        ValueError: weights that cannot be used (names `key`); a root that cannot be written, arrays that are not what
            they were (name data.cache_dir).
    """
    check_weights(weights, key)
    layout = {"source": ((n,), np.int16), "sample": ((n,), np.int64)}

    def blocks() -> Blocks:
        source, sample = BLEND_RULES[rule](weights, n, key)
        return {"source": [source], "sample": [sample]}

    facts = [[float(weight) for weight in weights], n, rule]
    arrays = _mapped(_cached(root, "blend", facts, layout, blocks), layout)
    return arrays["source"], arrays["sample"]


def _cached(root: Path, kind: str, facts: list[Any], layout: Layout, blocks: Callable[[], Blocks]) -> Path:
    """The folder of `root` that holds the arrays of `layout`, which follow from `facts` alone."""

    def make(folder: Path) -> None:
        for name, parts in blocks().items():
            shape, dtype = layout[name]
            header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
            # By writes alone: on a full disk they are an OSError with its number, where np.save has none and a memory
            # map ends the process.
            with open(folder / f"{name}.npy", "wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for part in parts:
                    file.write(np.ascontiguousarray(part).data)

    return cached_folder(root, f"{kind}-{digest([FORMAT, *facts])}", make, key=KEY)


def _mapped(folder: Path, layout: Layout) -> dict[str, NDArray[Any]]:
    """The arrays of a folder, read-only, as plain arrays: np.memmap costs more at every access."""
    arrays, must = {}, f"{KEY} must hold the indices that were written there"
    for name, (shape, dtype) in layout.items():
        path = folder / f"{name}.npy"
        try:
            array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError) as error:
            raise ValueError(f"{must}; {path}: {str(error).splitlines()[0]}") from error
        if array.shape != shape or array.dtype != np.dtype(dtype):
            raise ValueError(
                f"{must}, {name} of {np.dtype(dtype).name}{list(shape)}; "
                f"got {array.dtype.name}{list(array.shape)} in {folder}: remove it"
            )
        arrays[name] = array
    return arrays
