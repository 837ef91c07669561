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
those of all epochs before. All arithmetic is in Python's integers and int64.

Sample and blend indices kept as .npy files: built by one process, once, and memory-mapped by all.

    ROOT/samples-<fingerprint>/    document_index.npy, sample_index.npy, shuffle_index.npy
    ROOT/blend-<fingerprint>/      source.npy, sample.npy

A fingerprint is of everything that the arrays follow from; `cached_folder` keeps the folders whole.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.megatron.blend import Order, blend_order, check_weights, megatron_blend_order
from verl_ext.data.megatron.index import TokenIndex
from verl_ext.data.megatron.windows import Pieces, check_has_sample
from verl_ext.files import cached_folder
from verl_ext.text.tokenized import digest, file_facts

BLOCK = 1 << 18  # documents and rows located at a time
MAX_INT32 = np.iinfo(np.int32).max
MAX_UINT32 = np.iinfo(np.uint32).max

# shape, dtype, blocks of rows in order -> the array of them
Store = Callable[[tuple[int, int], Any, Iterator[NDArray[Any]]], NDArray[Any]]


class SampleIndices:
    """Sample k is row shuffle_index[k] of sample_index: seq_len + 1 tokens.

    document_index int32[E·D] (numbers into `lengths`), sample_index int32|int64[n+1, 2], shuffle_index
    uint32|int64[n]; lengths int32|int64: tokens of every document of the corpus.
    """

    def __init__(
        self,
        document_index: NDArray[np.int32],
        sample_index: NDArray[Any],
        shuffle_index: NDArray[Any],
        lengths: NDArray[Any],
    ) -> None:
        self.document_index, self.sample_index, self.shuffle_index = document_index, sample_index, shuffle_index
        self.lengths = lengths

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

    def piece_counts(self) -> NDArray[np.int64]:
        """int64[n]: non-empty pieces of each sample."""
        counts = np.empty(len(self), np.int64)
        for row in range(0, len(self), BLOCK):
            place = self.sample_index[row : row + BLOCK + 1, 0]
            begin, end = int(place[0]), int(place[-1])
            running = np.zeros(end - begin + 2, np.int64)
            for first in range(begin, end + 1, BLOCK):
                part = self.document_index[first : min(first + BLOCK, end + 1)]
                running[first - begin + 1 : first - begin + 1 + len(part)] = self.lengths[part] > 0
            np.cumsum(running, out=running)
            counts[row : row + len(place) - 1] = running[place[1:] - begin + 1] - running[place[:-1] - begin]
        return counts[self.shuffle_index]


class EpochPlan(NamedTuple):
    """How often the documents are repeated, and how many samples that gives."""

    epochs: int
    samples: int
    samples_before_last: int  # of the epochs shuffled together; samples where the last is one of them

    @property
    def separate_last(self) -> bool:
        return self.samples_before_last < self.samples


def epochs_needed(num_tokens: int, seq_len: int, num_samples: int | None) -> int:
    """Epochs of num_tokens tokens that num_samples samples of seq_len targets need (None: one epoch)."""
    return 1 if num_samples is None else max(1, -(-(num_samples * seq_len + 1) // num_tokens))


def plan_epochs(num_tokens: int, seq_len: int, num_samples: int | None, key: str = "data.train_dir") -> EpochPlan:
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


def _in_memory(shape: tuple[int, int], dtype: Any, blocks: Iterator[NDArray[Any]]) -> NDArray[Any]:
    array, row = np.empty(shape, dtype), 0
    for block in blocks:
        array[row : row + len(block)] = block
        row += len(block)
    return array


def build_sample_indices(
    lengths: NDArray[Any],
    documents: NDArray[Any] | None,
    seq_len: int,
    num_samples: int | None,
    seed: int,
    key: str = "data.train_dir",
    store: Store = _in_memory,
) -> SampleIndices:
    """The indices of `documents` (numbers into `lengths`; None: all) for at least num_samples samples.

    `num_samples=None`: one epoch. `store` makes the array of sample_index from its rows, which need not all be in
    memory.

    Raises:
        ValueError: fewer tokens than one sample has; `key` is named.
    """
    if documents is None:
        documents = np.arange(len(lengths), dtype=np.int32)
    plan = plan_epochs(count_tokens(lengths, documents), seq_len, num_samples, key)
    random = np.random.RandomState(seed)
    document_index = _document_index(np.asarray(documents, np.int32), plan, random)
    widest = max(len(document_index), int(lengths.max()))
    shape, dtype = (plan.samples + 1, 2), sample_dtype(widest)
    rows = _sample_rows(lengths, document_index, seq_len, plan.samples + 1, dtype)
    sample_index = store(shape, dtype, rows)
    return SampleIndices(document_index, sample_index, _shuffle_index(plan, random), lengths)


def count_tokens(lengths: NDArray[Any], documents: NDArray[Any] | None = None) -> int:
    """Tokens of `documents` (None: all), counted in blocks."""
    num_documents = len(lengths) if documents is None else len(documents)
    total = 0
    for first in range(0, num_documents, BLOCK):
        part = slice(first, first + BLOCK)
        total += int(lengths[part if documents is None else documents[part]].sum(dtype=np.int64))
    return total


def sample_dtype(widest: int) -> type[np.generic]:
    """Of sample_index, whose greatest value may be `widest`."""
    return np.int32 if widest <= MAX_INT32 else np.int64


def shuffle_dtype(samples: int) -> type[np.generic]:
    """Of shuffle_index."""
    return np.uint32 if samples < MAX_UINT32 - 1 else np.int64


def _document_index(documents: NDArray[np.int32], plan: EpochPlan, random: np.random.RandomState) -> NDArray[np.int32]:
    if not plan.separate_last:
        index = np.tile(documents, plan.epochs)
        random.shuffle(index)
        return index
    index = np.tile(documents, plan.epochs)
    together = len(documents) * (plan.epochs - 1)
    random.shuffle(index[:together])
    random.shuffle(index[together:])
    return index


def _shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> NDArray[Any]:
    index = np.arange(plan.samples, dtype=shuffle_dtype(plan.samples))
    random.shuffle(index[: plan.samples_before_last])
    if plan.separate_last:
        random.shuffle(index[plan.samples_before_last :])
    return index


def _sample_rows(
    lengths: NDArray[Any], document_index: NDArray[np.int32], seq_len: int, rows: int, dtype: Any
) -> Iterator[NDArray[Any]]:
    """The rows of sample_index, block by block of documents; those are its rows' positions as well, ascending."""
    yield np.zeros((1, 2), dtype)  # also where the first document is empty
    row, begin = 1, 0
    for first in range(0, len(document_index), BLOCK):
        length = lengths[document_index[first : first + BLOCK]]
        ends = np.cumsum(length, dtype=np.int64)
        end = begin + int(ends[-1])
        stop = min(rows, -(-end // seq_len))  # rows before it have positions below `end`
        while row < stop:
            position = np.arange(row, min(row + BLOCK, stop), dtype=np.int64) * seq_len - begin
            place = np.searchsorted(ends, position, side="right")
            block = np.empty((len(position), 2), dtype)
            block[:, 0] = place + first
            block[:, 1] = position - ends[place] + length[place]
            yield block
            row += len(block)
        begin = end
    assert row == rows, "every sample must begin inside the stream"


FORMAT = 1  # to be raised when the same input gives other arrays
BLEND_RULES = {"tijdeman": blend_order, "megatron": megatron_blend_order}
SAMPLE_ARRAYS = ("document_index", "sample_index", "shuffle_index")
BLEND_ARRAYS = ("source", "sample")
KEY = "data.cache_dir"


class CachedSampleIndices(SampleIndices):
    """SampleIndices of a folder's memory-mapped arrays, which it pickles as."""

    def __init__(self, folder: Path, index: TokenIndex) -> None:
        document_index, sample_index, shuffle_index = (_mapped(folder, name) for name in SAMPLE_ARRAYS)
        super().__init__(document_index, sample_index, shuffle_index, index.lengths)
        self._folder, self._index = folder, index

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedSampleIndices, (self._folder, self._index)


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
    num_documents = index.num_documents if documents is None else len(documents)
    num_tokens = index.num_tokens if documents is None else count_tokens(index.lengths, documents)
    plan = plan_epochs(num_tokens, seq_len, num_samples, index.key)
    facts = [file_facts(index.files), index.digest, _digest(documents), seq_len, num_samples, seed]

    def make(folder: Path) -> None:
        def on_disk(shape: tuple[int, ...], dtype: Any, blocks: Iterable[NDArray[Any]]) -> NDArray[Any]:
            _save(folder, "sample_index", shape, dtype, blocks)
            return _mapped(folder, "sample_index")

        built = build_sample_indices(index.lengths, documents, seq_len, num_samples, seed, index.key, on_disk)
        for name in ("document_index", "shuffle_index"):
            array = getattr(built, name)
            _save(folder, name, array.shape, array.dtype, [array])

    folder = cached_folder(root, f"samples-{_fingerprint(facts)}", make, key=KEY)
    indices = CachedSampleIndices(folder, index)
    widest = max(plan.epochs * num_documents, int(index.lengths.max()))
    _check(folder, "document_index", indices.document_index, (plan.epochs * num_documents,), np.int32)
    _check(folder, "sample_index", indices.sample_index, (plan.samples + 1, 2), sample_dtype(widest))
    _check(folder, "shuffle_index", indices.shuffle_index, (plan.samples,), shuffle_dtype(plan.samples))
    return indices


def cached_blend(
    root: Path, weights: Sequence[float], n: int, rule: str = "tijdeman", key: str = "data.blend"
) -> Order:
    """`blend_order` (rule `tijdeman`) or `megatron_blend_order` (`megatron`) of n samples, kept in a folder of `root`.

    Raises:
        ValueError: weights that cannot be used (names `key`); a root that cannot be written, arrays that are not what
            they were (name data.cache_dir).
    """
    check_weights(weights, key)

    def make(folder: Path) -> None:
        arrays: tuple[NDArray[Any], ...] = BLEND_RULES[rule](weights, n, key)
        for name, array in zip(BLEND_ARRAYS, arrays, strict=True):
            _save(folder, name, array.shape, array.dtype, [array])

    facts = [[float(weight) for weight in weights], n, rule]
    folder = cached_folder(root, f"blend-{_fingerprint(facts)}", make, key=KEY)
    source, sample = (_mapped(folder, name) for name in BLEND_ARRAYS)
    _check(folder, "source", source, (n,), np.int16)
    _check(folder, "sample", sample, (n,), np.int64)
    return source, sample


def _fingerprint(facts: list[Any]) -> str:
    return digest([FORMAT, *facts])


def _digest(documents: NDArray[Any] | None) -> str | None:
    if documents is None:
        return None
    return hashlib.sha256(np.ascontiguousarray(documents, np.int32).data).hexdigest()


def _save(folder: Path, name: str, shape: tuple[int, ...], dtype: Any, blocks: Iterable[NDArray[Any]]) -> None:
    """Write the .npy of an array that is given in blocks of rows. By writes alone: on a full disk they are an OSError
    with its number, where np.save has none and a memory map ends the process."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    with open(folder / f"{name}.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block).data)


def _mapped(folder: Path, name: str) -> NDArray[Any]:
    """An array of a folder, read-only, as a plain array: np.memmap costs more at every access."""
    path = folder / f"{name}.npy"
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{KEY} must hold the indices that were written there; {path}: {reason}") from error


def _check(folder: Path, name: str, array: NDArray[Any], shape: tuple[int, ...], dtype: Any) -> None:
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise ValueError(
            f"{KEY} must hold the indices that were written there, {name} of {np.dtype(dtype).name}{list(shape)}; "
            f"got {array.dtype.name}{list(array.shape)} in {folder}: remove it"
        )
