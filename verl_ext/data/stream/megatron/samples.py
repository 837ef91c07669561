"""Build the three indices of megatron-core's GPTDataset, equal for the same seed.

    document_index   the documents of all epochs in one shuffled order: the stream
    sample_index     row k: the place of token k·seq_len of the stream, (place in document_index, offset)
    shuffle_index    the order in which samples are drawn

    document_index   4       1           4    …         seq_len 4: a sample has 5 tokens, its last one is also the
    stream           a b c | d e f g h | a b …          first of the next, so that every token is a target once
    sample_index     (0,0)     (1,1)       (2,0)
    sample 0         a b c   d e
    sample 1                   e f g h   a

If the last epoch gives less than 80 % of its samples, its documents and samples are shuffled on their own, after those
of all earlier epochs. The indices, and the order of a blend, are kept as .npy files of a cached folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.cache import cached_arrays, fingerprint, stored_arrays
from verl_ext.data.stream.megatron.blend import BLEND_RULES, Order, check_blend_weights
from verl_ext.data.stream.megatron.index import TokenIndex
from verl_ext.files import file_state
from verl_ext.options import must

FORMAT = 2  # raise it when the same input gives other arrays
BLOCK = 1 << 18  # documents located at a time
MAX_INT32, MAX_UINT32 = np.iinfo(np.int32).max, np.iinfo(np.uint32).max

Pieces = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # document, start, stop: int64[P] each


@dataclass(eq=False)
class SampleIndices:
    """The three indices of samples of seq_len + 1 tokens.

    Sample k is row shuffle_index[k] of sample_index. document_index int32[E·D] (numbers into `lengths`), sample_index
    int32|int64[n+1, 2], shuffle_index uint32|int64[n]; lengths int32|int64: tokens of every document of the corpus.
    """

    document_index: NDArray[np.int32]
    sample_index: NDArray[Any]
    shuffle_index: NDArray[Any]
    lengths: NDArray[Any]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def begins_as(self, other: "SampleIndices", first: int) -> bool:
        """Return whether other indices of these documents begin with `first` same samples."""
        if not first:
            return True
        rows = self.shuffle_index[:first]
        if len(rows) < first or not np.array_equal(rows, other.shuffle_index[:first]):
            return False
        last = int(rows.max()) + 2
        places = int(self.sample_index[last - 1, 0]) + 1
        return np.array_equal(self.sample_index[:last], other.sample_index[:last]) and np.array_equal(
            self.document_index[:places], other.document_index[:places]
        )

    def pieces(self, k: int) -> Pieces:
        """Return sample k's non-empty pieces: (document, start, stop) int64[P] each."""
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
        """Return the number of non-empty pieces of each sample, int64[n]."""
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


def check_has_sample(num_tokens: int, needed: int, key: str) -> None:
    """Raise ValueError if a corpus has fewer tokens than one sample needs."""
    if num_tokens < needed:
        raise ValueError(
            must(key, f"have the {needed} tokens that a sample of data.seq_len needs", f"{num_tokens} tokens")
        )


def epochs_needed(num_tokens: int, seq_len: int, num_samples: int | None) -> int:
    """Return epochs of num_tokens for num_samples (None: one epoch) of seq_len targets."""
    return 1 if num_samples is None else max(1, -(-(num_samples * seq_len + 1) // num_tokens))


def count_tokens(lengths: NDArray[Any], documents: NDArray[Any] | None = None) -> int:
    """Return the number of tokens of `documents` (None: all)."""
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
    """Index `documents` (None: all) for num_samples or more (None: an epoch).

    Raises ValueError if there are fewer tokens than one sample has; it names `key`.
    """
    num_tokens = count_tokens(lengths, documents)
    check_has_sample(num_tokens, seq_len + 1, key)
    # Megatron's epochs, with at least the samples that are requested, and the samples of those shuffled together.
    epochs = epochs_needed(num_tokens, seq_len, num_samples)
    samples = (epochs * num_tokens - 1) // seq_len
    before_last = ((epochs - 1) * num_tokens - 1) // seq_len
    enough = 4 * ((num_tokens - 1) // seq_len) // 5  # Megatron's int(0.80 * samples), for all numbers up to 2^50
    if num_samples is None or epochs == 1 or num_samples - before_last >= enough:
        before_last = samples
    once = np.arange(len(lengths), dtype=np.int32) if documents is None else np.asarray(documents, np.int32)
    document_index = np.tile(once, epochs)
    shuffle_index = np.arange(samples, dtype=np.uint32 if samples < MAX_UINT32 - 1 else np.int64)
    together = len(once) * (epochs - (before_last < samples))
    random = np.random.RandomState(seed)
    for array, edge in ((document_index, together), (shuffle_index, before_last)):  # in Megatron's order
        random.shuffle(array[:edge])
        random.shuffle(array[edge:])
    is_narrow = max(len(document_index), int(lengths.max())) <= MAX_INT32
    sample_index = np.zeros((samples + 1, 2), np.int32 if is_narrow else np.int64)
    row, begin = 1, 0  # row 0 is (0, 0), even if the first document is empty
    for first in range(0, len(document_index), block):
        length = lengths[document_index[first : first + block]]
        ends = np.cumsum(length, dtype=np.int64)
        end = begin + int(ends[-1])
        stop = min(samples + 1, -(-end // seq_len))  # rows before it have positions below `end`
        position = np.arange(row, stop, dtype=np.int64) * seq_len - begin
        place = np.searchsorted(ends, position, side="right")
        sample_index[row:stop, 0] = place + first
        sample_index[row:stop, 1] = position - ends[place] + length[place]
        row, begin = max(row, stop), end
    return SampleIndices(document_index, sample_index, shuffle_index, lengths)


class CachedSampleIndices(SampleIndices):
    """The memory-mapped arrays of a cached folder; it pickles as the folder."""

    def __init__(self, folder: Path, index: TokenIndex) -> None:
        super().__init__(**stored_arrays(folder), lengths=index.lengths)
        self._arguments = folder, index

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedSampleIndices, self._arguments


def cached_sample_indices(
    root: Path, index: TokenIndex, documents: NDArray[Any] | None, seq_len: int, num_samples: int | None, seed: int
) -> SampleIndices:
    """Return `build_sample_indices` of the index's `documents` (None: all), cached below `root`.

    Raises ValueError if the corpus is shorter than one sample (it names index.key), or if the root cannot be written or
    the arrays have changed (it names data.cache_dir).
    """
    chosen = None if documents is None else np.ascontiguousarray(documents, np.int32)
    check_has_sample(count_tokens(index.lengths, chosen), seq_len + 1, index.key)

    def build() -> dict[str, NDArray[Any]]:
        built = build_sample_indices(index.lengths, chosen, seq_len, num_samples, seed, index.key)
        return {name: getattr(built, name) for name in ("document_index", "sample_index", "shuffle_index")}

    of_documents = None if chosen is None else fingerprint(chosen, digits=64)
    facts = [[file_state(path) for path in index.files], index.digest, of_documents, seq_len, num_samples, seed]
    name = f"samples-{fingerprint([FORMAT, *facts])}"
    cached_arrays(root, name, build)
    return CachedSampleIndices(root / name, index)


def cached_blend(
    root: Path, weights: Sequence[float], n: int, rule: str = "tijdeman", key: str = "data.blend"
) -> Order:
    """Return n samples' order by a rule of BLEND_RULES, cached below `root`.

    Raises ValueError if the weights cannot be used (it names `key`), or if the root cannot be written or the arrays
    have changed (it names data.cache_dir).
    """
    check_blend_weights(weights, key)
    name = f"blend-{fingerprint([FORMAT, [float(weight) for weight in weights], n, rule])}"
    arrays = cached_arrays(
        root, name, lambda: dict(zip(("source", "sample"), BLEND_RULES[rule](weights, n), strict=True))
    )
    return arrays["source"], arrays["sample"]
