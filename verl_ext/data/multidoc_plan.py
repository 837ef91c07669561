"""Which sample of which source each sample of a dataset is, by how the streams of documents are sampled.

    sampling           tokens of a sample                     its last token is only predicted
    random_starts      seq_len                                no: seq_len - 1 targets
    document_stream    seq_len + 1                            yes: seq_len targets
    in_order           seq_len + 1, a source's last fewer     yes: every token of a source but its first, once

Targets are counted as where attention crosses documents; inside them, the first token of each piece is none either.
Windows (random_starts, in_order) are those of one source after the other; a document stream of several sources mixes
them, sample by sample, in proportion to their weights, or to their samples where they have none.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.megatron import (
    Pieces,
    TokenStream,
    Windows,
    cached_blend,
    cached_sample_indices,
    count_tokens,
    in_order_starts,
    megatron_source_samples,
    normalised,
    random_starts,
)
from verl_ext.data.megatron.windows import check_has_sample
from verl_ext.data.multidoc_sources import Source

# Tokens that a sample has beside those that a model reads.
LABEL_TOKENS = {"random_starts": 0, "document_stream": 1, "in_order": 1}

_logger = logging.getLogger(__name__)

Documents = Sequence[NDArray[np.int64] | None]  # of each source, None for all


class SamplePlan(Protocol):
    """P samples. epochs: how often they hold the tokens together."""

    epochs: float

    def __len__(self) -> int: ...

    def pieces(self, number: int) -> tuple[int, Pieces]:
        """(source, its pieces of documents: document, start, stop) of a sample."""

    def token_counts(self) -> NDArray[np.int64]:
        """int64[P]: tokens of each sample, one that is only predicted included."""

    def piece_counts(self) -> NDArray[np.int64]:
        """int64[P]: pieces of each sample."""

    def source_counts(self, first: int) -> NDArray[np.int64]:
        """int64[S]: samples of each source among the first so many."""


class StreamPlan:
    """Megatron's indices of every source, and the order of the sources where there are several.

    num_samples: P; None: the samples of `epochs` epochs of each source.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        documents: Documents,
        seq_len: int,
        seed: int,
        num_samples: int | None,
        epochs: int,
        root: Path,
        blend_rule: str,
    ) -> None:
        tokens = np.array(source_tokens(sources, documents))
        for source, count in zip(sources, tokens.tolist(), strict=True):
            check_has_sample(count, seq_len + 1, f"{source.index.key}: {source.name}")
        whole = (epochs * tokens - 1) // seq_len
        self._num, self._seq_len = int(num_samples or whole.sum()), seq_len
        self.epochs = self._num * seq_len / int(tokens.sum())
        self._order: tuple[NDArray[np.int16], NDArray[np.int64]] | None = None  # (source, its sample)
        counts = np.array([self._num])
        weights = [source.weight for source in sources if source.weight is not None]
        _tell_joined_sequences(sources, blend_rule if weights or len(sources) > 1 else None)
        as_builder = bool(weights) and blend_rule == "megatron"
        if as_builder:  # megatron-core's normalises the weights for its BlendedDataset, which normalises them again
            weights = normalised(weights).tolist()
        if len(sources) > 1:
            self._order = cached_blend(root, weights or whole.tolist(), self._num, blend_rule)
            counts = np.bincount(self._order[0], minlength=len(sources))
        if as_builder:
            counts = np.maximum(counts, megatron_source_samples(weights, self._num))
        self._samples = [
            cached_sample_indices(root, source.index, part, seq_len, count, seed) if count else None
            for source, part, count in zip(sources, documents, counts.tolist(), strict=True)
        ]

    def __len__(self) -> int:
        return self._num

    def pieces(self, number: int) -> tuple[int, Pieces]:
        source, sample = 0, number
        if self._order is not None:
            source, sample = self._order[0].item(number), self._order[1].item(number)
        samples = self._samples[source]
        assert samples is not None, "a source that is drawn has samples"
        return source, samples.pieces(sample)

    def token_counts(self) -> NDArray[np.int64]:
        return np.broadcast_to(np.int64(self._seq_len + 1), self._num)  # in the memory of one

    def piece_counts(self) -> NDArray[np.int64]:
        counts = [np.empty(0, np.int64) if part is None else part.piece_counts() for part in self._samples]
        if self._order is None:
            return counts[0][: self._num]
        source, sample = self._order
        values = np.empty(self._num, np.int64)
        for number, of_source in enumerate(counts):
            at = source == number
            values[at] = of_source[sample[at]]
        return values

    def source_counts(self, first: int) -> NDArray[np.int64]:
        if self._order is None:
            return np.array([first])
        return np.bincount(self._order[0][:first], minlength=len(self._samples))


class WindowPlan:
    """The windows of every source, one source after the other; the first of each, in proportion, where there may be
    no more than max_samples together (0: all)."""

    epochs = 1.0

    def __init__(
        self,
        sampling: str,
        sources: Sequence[Source],
        documents: Documents,
        seq_len: int,
        seed: int,
        max_samples: int = 0,
    ) -> None:
        windows = [
            _windows(
                sampling,
                TokenStream(source.index.lengths, part),
                seq_len,
                seed,
                f"{source.index.key}: {source.name}",
            )
            for source, part in zip(sources, documents, strict=True)
        ]
        ends = np.cumsum([len(of_source) for of_source in windows])
        if 0 < max_samples < ends[-1]:
            counts = np.diff(ends * max_samples // ends[-1], prepend=0).tolist()
            windows = [
                Windows(part.stream, part.starts[:count], part.seq_len)
                for part, count in zip(windows, counts, strict=True)
            ]
        self._windows = windows
        self._ends = np.cumsum([len(of_source) for of_source in windows])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def pieces(self, number: int) -> tuple[int, Pieces]:
        source = int(np.searchsorted(self._ends, number, side="right"))
        windows = self._windows[source]
        return source, windows.pieces(number - int(self._ends[source]) + len(windows))

    def token_counts(self) -> NDArray[np.int64]:
        return np.concatenate([windows.token_counts() for windows in self._windows])

    def piece_counts(self) -> NDArray[np.int64]:
        return np.concatenate([windows.piece_counts() for windows in self._windows])

    def source_counts(self, first: int) -> NDArray[np.int64]:
        return np.diff(np.minimum(self._ends, first), prepend=0)


def source_tokens(sources: Sequence[Source], documents: Documents) -> list[int]:
    """Tokens of each source's documents."""
    return [
        source.index.num_tokens if part is None else count_tokens(source.index.lengths, part)
        for source, part in zip(sources, documents, strict=True)
    ]


def source_table(
    sources: Sequence[Source], documents: Documents, samples: NDArray[np.int64], seq_len: int
) -> list[dict[str, Any]]:
    """Documents, tokens, samples and epochs of each source, and its weight in a blend."""
    tokens = source_tokens(sources, documents)
    return [
        {
            "source": source.name,
            "documents": source.index.num_documents if part is None else len(part),
            "tokens": total,
            "samples": count,
            "epochs": round(count * seq_len / max(total, 1), 3),
            **({} if source.weight is None else {"weight": source.weight}),
        }
        for source, part, total, count in zip(sources, documents, tokens, samples.tolist(), strict=True)
    ]


def _tell_joined_sequences(sources: Sequence[Source], blend_rule: str | None) -> None:
    """Say which sources are not sampled as megatron-core would; ValueError where that was asked for by `blend_rule`."""
    for source in sources:
        index = source.index
        if index.num_sequences <= index.num_documents:
            continue
        counts = f"{source.name} has {index.num_documents:,} documents of {index.num_sequences:,} sequences"
        if blend_rule == "megatron":
            raise ValueError(
                "data.blend_rule must be tijdeman for documents of several sequences, which megatron-core shuffles "
                f"sequence by sequence; got megatron, and {counts}"
            )
        _logger.warning("%s: it is shuffled by document, where megatron-core's GPTDataset shuffles sequences", counts)


def _windows(sampling: str, stream: TokenStream, seq_len: int, seed: int, key: str) -> Windows:
    if sampling == "random_starts":
        return Windows(stream, random_starts(stream.num_tokens, seq_len, seed, key), seq_len)
    check_has_sample(stream.num_tokens, 2, key)
    return Windows(stream, in_order_starts(stream.num_tokens - 1, seq_len), seq_len + 1)
