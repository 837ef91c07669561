"""Plan the samples of a document stream: which tokens each sample holds.

sampling           tokens of a sample                     whether its last token is only predicted
random_starts      seq_len                                no: seq_len - 1 targets
document_stream    seq_len + 1                            yes: seq_len targets
in_order           seq_len + 1, a source's last fewer     yes: every token of a source but its first, once

stream      a a a b b b b b c c            seq_len 4
in order    [a a a b b][b b b b c][c c]    starts 4 apart
random      ⌊10/4⌋ = 2 of the starts 0..6, all different, any order
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.stream.megatron.blend import Order, megatron_source_samples, normalised
from verl_ext.data.stream.megatron.samples import Pieces, cached_blend, cached_sample_indices, check_has_sample
from verl_ext.data.stream.sources import Source
from verl_ext.options import must

# The tokens that a sample has besides those that a model reads, by sampling.
LABEL_TOKENS = {"random_starts": 0, "document_stream": 1, "in_order": 1}
_DENSE = 4  # with fewer candidates than this for each random start, all are shuffled

_logger = logging.getLogger(__name__)


class TokenStream:
    """A stream of the tokens of `documents`, numbers into `lengths` (None: all).

    documents   7        2              5         3 has no token and is left out
    lengths     3        5              2
    ends            3             8       10      int64 cumulative sum
    """

    def __init__(self, lengths: NDArray[Any], documents: NDArray[Any] | None = None) -> None:
        length = np.asarray(lengths) if documents is None else np.asarray(lengths)[documents]
        kept = np.flatnonzero(length)
        self.documents = (kept if documents is None else np.asarray(documents)[kept]).astype(np.int32)
        self.ends = np.cumsum(length[kept], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def pieces(self, start: int, stop: int) -> Pieces:
        """Return the stream's tokens start..stop-1, at least one, as documents' pieces."""
        first, last = np.searchsorted(self.ends, (start, stop - 1), side="right").tolist()
        document = self.documents[first : last + 1].astype(np.int64)
        piece_stop = self.ends[first : last + 1].copy()
        piece_start = np.zeros(len(document), np.int64)
        begin = self.ends.item(first - 1) if first else 0
        piece_stop[1:] -= self.ends[first:last]
        piece_stop[0] -= begin
        piece_start[0] = start - begin
        piece_stop[-1] = stop - (self.ends.item(last - 1) if last else 0)
        return document, piece_start, piece_stop

    def piece_counts(self, start: NDArray[Any], stop: NDArray[Any]) -> NDArray[np.int64]:
        """Return the number of pieces in tokens start..stop-1, for every pair."""
        first = np.searchsorted(self.ends, start, side="right")
        return np.searchsorted(self.ends, stop - 1, side="right") - first + 1


def random_starts(num_tokens: int, seq_len: int, seed: int, key: str = "data.train_dir") -> NDArray[np.int64]:
    """Return int64[⌊num_tokens/seq_len⌋] distinct starts of 0..num_tokens-seq_len, uniform in choice and order.

    Memory grows with the number of starts, not with the number of tokens. Drawing with replacement until there are
    enough distinct starts gives each set of them the same chance, because the candidates are interchangeable.

    Raises ValueError if there are fewer tokens than one sample has; it names `key`.
    """
    check_has_sample(num_tokens, seq_len, key)
    rng = np.random.default_rng(seed)
    wanted, candidates = num_tokens // seq_len, num_tokens - seq_len + 1
    if candidates < _DENSE * wanted:
        return rng.permutation(candidates)[:wanted].copy()
    starts = np.empty(0, np.int64)
    while len(starts) < wanted:
        more = rng.integers(candidates, size=wanted - len(starts), dtype=np.int64)
        starts = np.sort(np.concatenate([starts, more]))  # np.unique hashes, which costs many times as much
        starts = starts[np.diff(starts, prepend=-1) > 0]
    rng.shuffle(starts)
    return starts


class WindowPlan:
    """A plan of windows of every source, one source after the other.

    max_samples: the number of samples of all sources, the first ones of each in proportion; if not above 0, all.
    """

    epochs = 1.0  # how often the samples contain the tokens

    def __init__(self, sampling: str, sources: Sequence[Source], seq_len: int, seed: int, max_samples: int = 0) -> None:
        self._label_tokens = LABEL_TOKENS[sampling]
        self._streams = [TokenStream(source.index.lengths, source.documents) for source in sources]
        starts = []
        for source, stream in zip(sources, self._streams, strict=True):
            if sampling == "random_starts":
                starts.append(random_starts(stream.num_tokens, seq_len, seed, source.key))
            else:
                check_has_sample(stream.num_tokens, 2, source.key)
                starts.append(np.arange(0, stream.num_tokens - 1, seq_len))
        self._ends = np.cumsum([len(own) for own in starts])  # of the sources' samples
        if 0 < max_samples < self._ends[-1]:
            self._ends = self._ends * max_samples // self._ends[-1]
        counts = np.diff(self._ends, prepend=0)
        self._starts = np.concatenate([own[:count] for own, count in zip(starts, counts.tolist(), strict=True)])
        ends = np.repeat([stream.num_tokens for stream in self._streams], counts)
        self._stops = np.minimum(self._starts + seq_len + self._label_tokens, ends)

    def __len__(self) -> int:
        return len(self._starts)

    def pieces(self, number: int) -> tuple[int, Pieces]:
        """Return a sample's source and its pieces of documents."""
        source = int(np.searchsorted(self._ends, number, side="right"))
        return source, self._streams[source].pieces(self._starts.item(number), self._stops.item(number))

    def token_counts(self) -> NDArray[np.int64]:
        """Return the tokens that a model reads of each sample, int64[P]."""
        return self._stops - self._starts - self._label_tokens

    def piece_counts(self) -> NDArray[np.int64]:
        """Return the number of pieces of each sample, int64[P]."""
        edges = pairwise([0, *self._ends.tolist()])
        parts = [
            stream.piece_counts(self._starts[first:end], self._stops[first:end])
            for stream, (first, end) in zip(self._streams, edges, strict=True)
        ]
        return np.concatenate(parts)

    def source_counts(self, first: int) -> NDArray[np.int64]:
        """Return each source's number of the first `first` samples, int64[S]."""
        return np.diff(np.minimum(self._ends, first), prepend=0)


class StreamPlan:
    """A plan by Megatron's indices of every source, with WindowPlan's methods.

    Several sources are mixed sample by sample in proportion to their weights, or to their samples if they have no
    weights. num_samples: the samples of all sources together; None: those of `epochs` epochs of each source.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        seq_len: int,
        seed: int,
        num_samples: int | None,
        epochs: int,
        root: Path,
        blend_rule: str,
    ) -> None:
        for source in sources:
            check_has_sample(source.num_tokens, seq_len + 1, source.key)
        tokens = np.array([source.num_tokens for source in sources])
        whole = (epochs * tokens - 1) // seq_len
        self._num, self._seq_len = int(num_samples or whole.sum()), seq_len
        self.epochs = self._num * seq_len / int(tokens.sum())
        # Several sources are blended sample by sample, so each gives as many samples as its turns.
        weights = [source.weight for source in sources if source.weight is not None]
        _check_joined_sequences(sources, blend_rule if weights or len(sources) > 1 else None)
        as_builder = bool(weights) and blend_rule == "megatron"
        if as_builder:  # megatron-core's builder normalises the weights, and its BlendedDataset normalises them again
            weights = normalised(weights).tolist()
        self._order: Order | None = None
        counts = np.array([self._num])
        if len(sources) > 1:
            self._order = cached_blend(root, weights or whole.tolist(), self._num, blend_rule)
            counts = np.bincount(self._order[0], minlength=len(sources))
        if as_builder:
            counts = np.maximum(counts, megatron_source_samples(weights, self._num))
        self._samples = [
            cached_sample_indices(root, source.index, source.documents, seq_len, count, seed) if count else None
            for source, count in zip(sources, counts.tolist(), strict=True)
        ]

    def __len__(self) -> int:
        return self._num

    def begins_as(self, other: "StreamPlan", first: int) -> bool:
        """Return whether another plan of these sources begins with `first` same samples."""
        used = [first]
        if self._order is not None and other._order is not None:
            own, its = self._order, other._order
            if not all(np.array_equal(own[part][:first], its[part][:first]) for part in (0, 1)):
                return False
            used = np.bincount(self._order[0][:first], minlength=len(self._samples)).tolist()
        return all(
            not count or (samples is not None and others is not None and samples.begins_as(others, count))
            for samples, others, count in zip(self._samples, other._samples, used, strict=True)
        )

    def pieces(self, number: int) -> tuple[int, Pieces]:
        """Return a sample's source and its pieces of documents."""
        source, sample = 0, number
        if self._order is not None:
            source, sample = self._order[0].item(number), self._order[1].item(number)
        samples = self._samples[source]
        assert samples is not None, "a source that is drawn has samples"
        return source, samples.pieces(sample)

    def token_counts(self) -> NDArray[np.int64]:
        """Return the tokens that a model reads of each sample, int64[P]."""
        return np.broadcast_to(np.int64(self._seq_len), self._num)  # one stored value

    def piece_counts(self) -> NDArray[np.int64]:
        """Return the number of pieces of each sample, int64[P]."""
        values = np.empty(self._num, np.int64)
        for number, samples in enumerate(self._samples):
            if samples is None:
                continue
            counts = samples.piece_counts()
            if self._order is None:
                return counts[: self._num]
            source, sample = self._order
            at = source == number
            values[at] = counts[sample[at]]
        return values

    def source_counts(self, first: int) -> NDArray[np.int64]:
        """Return each source's number of the first `first` samples, int64[S]."""
        if self._order is None:
            return np.array([first])
        return np.bincount(self._order[0][:first], minlength=len(self._samples))


def _check_joined_sequences(sources: Sequence[Source], blend_rule: str | None) -> None:
    """Warn, or raise ValueError with megatron-core's `blend_rule`, if it samples otherwise."""
    for source in sources:
        index = source.index
        if index.num_sequences <= index.num_documents:
            continue
        counts = f"{source.name} has {index.num_documents:,} documents of {index.num_sequences:,} sequences"
        if blend_rule == "megatron":
            why = "which megatron-core shuffles sequence by sequence"
            needed = f"be tijdeman for documents of several sequences, {why}"
            raise ValueError(must("data.blend_rule", needed, f"megatron, and {counts}"))
        _logger.warning("%s: it is shuffled by document, where megatron-core's GPTDataset shuffles sequences", counts)
