"""The sources of a stream of documents, and the tokens of each sample.

a/b.bin a/b.idx      PREFIX a/b: an index, source b           a/ with .idx files: a source for each
scenes/*.txt         texts (files, folders, globs) become one index in the cache, source scenes

sampling           tokens of a sample                     its last token is only predicted
random_starts      seq_len                                no: seq_len - 1 targets
document_stream    seq_len + 1                            yes: seq_len targets
in_order           seq_len + 1, a source's last fewer     yes: every token of a source but its first, once

stream      a a a b b b b b c c            seq_len 4
in order    [a a a b b][b b b b c][c c]    starts 4 apart
random      ⌊10/4⌋ = 2 of the starts 0..6, all different, any order
"""

import glob
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.dataset import split_rows
from verl_ext.data.megatron.blend import Order, check_weights, megatron_source_samples, normalised
from verl_ext.data.megatron.index import SUFFIXES, TokenIndex
from verl_ext.data.megatron.samples import Pieces, cached_blend, cached_sample_indices, check_has_sample, count_tokens
from verl_ext.data.megatron.text_index import write_text_indices
from verl_ext.files import REPORT, cached_folder, write_json
from verl_ext.text.plain_text import TextOptions, TextTokenizer
from verl_ext.text.sources import SourceFile, absolute_path, find_source_files, is_url, kind_of, without_compression
from verl_ext.text.tokenized import digest, file_facts, tokenizer_facts
from verl_ext.values import plain

# By sampling, the tokens that a sample has beside those that a model reads.
LABEL_TOKENS = {"random_starts": 0, "document_stream": 1, "in_order": 1}
FORMAT = 1  # to be raised when the same text is tokenized into something else
_DENSE = 4  # fewer candidates than this for each random start are shuffled as a whole
_RECORDS = "records.json"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Documents of one name.

    weight: its share of a blend, None without one. documents: its part of the split, numbers into the index; None: all.
    Of a text: bad_records, how many records gave no document, by reason; special_tokens, how many hold names of
    special tokens, which are encoded as text.
    """

    name: str
    index: TokenIndex
    weight: float | None = None
    is_text: bool = False
    bad_records: Mapping[str, int] = field(default_factory=dict)
    special_tokens: int = 0
    documents: NDArray[np.int64] | None = None

    @property
    def key(self) -> str:
        """The name in messages."""
        return f"{self.index.key}: {self.name}"

    @cached_property
    def num_tokens(self) -> int:
        return self.index.num_tokens if self.documents is None else count_tokens(self.index.lengths, self.documents)

    def part(self, split: str, train_ratio: float, seed: int) -> "Source":
        """Return the source with its documents of "train" or "val"."""
        try:
            return replace(self, documents=split_rows(self.index.num_documents, split, train_ratio, seed))
        except ValueError as error:
            raise ValueError(f"{self.key}: {error}") from error

    def token_range(self, part: int, parts: int) -> tuple[int, int]:
        """Return (lowest, highest) token id of about one of `parts` equal shares of its index; (0, -1) for none."""
        edges = np.arange(part, part + 2) * self.index.num_tokens // parts * self.index.dtype.itemsize
        return self.index.token_range(*np.searchsorted(self.index.pointers, edges).tolist())


def read_blend(blend: Any) -> list[tuple[float, str]]:
    """Return (weight, path) of each source of [[0.7, path], [0.3, path]].

    Raises:
        ValueError: another form, a weight that is negative or not finite, no weight above 0, a path given twice.
    """
    pairs = plain(blend)
    try:
        shares = [(weight, os.fspath(path)) for weight, path in pairs]
    except (TypeError, ValueError):
        shares = []
    if not shares or not all(type(weight) in (int, float) and path for weight, path in shares):
        raise ValueError(f"data.blend must be pairs of a weight and a path, e.g. [[0.7,a],[0.3,b]]; got {pairs!r}")
    weights, paths = [float(weight) for weight, _ in shares], [path for _, path in shares]
    check_weights(weights)
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise ValueError(f"data.blend must name each path once; got {twice[0]} twice")
    return list(zip(weights, paths, strict=True))


def is_path(path: Any) -> bool:
    """Return whether a value can be a path."""
    return isinstance(path, (str, os.PathLike)) and bool(os.fspath(path))


@dataclass(frozen=True)
class SourceFinder:
    """Opens what `data.train_dir`, `data.val_dir` or `data.blend` names.

    options, max_tokens: how a text becomes documents, and where it is cut; root: the cache of tokenized texts; key: the
    config key that messages name.
    """

    tokenizer: Any
    options: TextOptions
    max_tokens: int | None
    root: Path
    key: str

    def blended(self, blend: Any) -> list[Source]:
        """Return a source for each path of a blend whose weight is above 0."""
        return self._named([([absolute_path(path)], weight) for weight, path in read_blend(blend) if weight])

    def listed(self, paths: Any) -> list[Source]:
        """Return the sources of a path, a list of paths, or {name: path}; texts without a name of their own are one."""
        paths = plain(paths)
        if isinstance(paths, Mapping):
            return [self._one(str(name), self._paths(given)) for name, given in paths.items()]
        groups: list[tuple[list[str], float | None]] = []
        texts = []
        for path in self._paths(paths):
            prefixes = self._prefixes(path)
            groups += [([f"{prefix}.idx"], None) for prefix in prefixes]
            texts += [] if prefixes else [path]
        return self._named([*groups, (texts, None)] if texts else groups)

    def _named(self, groups: Sequence[tuple[list[str], float | None]]) -> list[Source]:
        """Return a source for each (paths, weight), named by their last part, and their folders' if two are alike."""
        paths = [_together(paths) for paths, _ in groups]
        short = [_name(path) for path in paths]
        names = [
            f"{_name(os.path.dirname(path))}_{name}" if short.count(name) > 1 else name
            for path, name in zip(paths, short, strict=True)
        ]
        for path, name in zip(paths, names, strict=True):
            if names.count(name) > 1:
                raise ValueError(f"{self.key} must have sources of different names; got {name} twice: rename {path}")
        return [self._one(name, *group) for name, group in zip(names, groups, strict=True)]

    def _one(self, name: str, paths: list[str], weight: float | None = None) -> Source:
        prefixes = [prefix for path in paths for prefix in self._prefixes(path)]
        if not prefixes:
            return self._text(name, paths, weight)
        if len(prefixes) > 1 or len(paths) > 1:
            raise ValueError(f"{self.key} must name one index, or texts, for a source; got {', '.join(prefixes)}")
        return Source(name, TokenIndex(prefixes[0], self.key), weight)

    def _prefixes(self, path: str) -> list[str]:
        """Return the prefixes of the indices that a path means: itself, or those of a folder; [] if it means texts."""
        if path.endswith(SUFFIXES):
            return [path[:-4]]
        if any(os.path.isfile(path + ending) for ending in SUFFIXES):
            return [path]
        held = sorted(os.listdir(path)) if os.path.isdir(path) else []
        prefixes = [os.path.join(path, name[:-4]) for name in held if name.endswith(".idx")]
        texts = [name for name in held if kind_of(name) and name != REPORT]
        if prefixes and texts:
            raise ValueError(f"{self.key} must name a folder of indices or of texts; {path} holds {texts[0]} as well")
        return prefixes

    def _paths(self, given: Any) -> list[str]:
        paths = [given] if isinstance(given, (str, os.PathLike)) else given
        if not isinstance(paths, Sequence) or not paths or not all(map(is_path, paths)):
            raise ValueError(f"{self.key} must name texts or an index (PREFIX of PREFIX.bin, .idx); got {given!r}")
        return [absolute_path(path) for path in paths]

    def _text(self, name: str, paths: list[str], weight: float | None) -> Source:
        if self.tokenizer is None:
            raise ValueError(f"{self.key} names texts, which need a tokenizer (model.path's); got none for {paths[0]}")
        files = find_source_files({name: paths}, self.key)

        def make(folder: Path) -> None:
            tokenizer, prefixes = TextTokenizer(self.tokenizer, self.options), {self.key: folder / "text"}
            counts = write_text_indices(files, tokenizer, prefixes, max_tokens=self.max_tokens)[self.key]
            records = {"bad_records": counts.bad, "special_tokens": counts.special_tokens["records"]}
            write_json(folder / _RECORDS, records)

        fingerprint = self._fingerprint(files)
        folder = cached_folder(self.root, f"text-{fingerprint}", make)
        if self._fingerprint(files) != fingerprint:
            raise ValueError(f"{self.key} must not change while it is tokenized; one of its {len(files)} files did")
        records = json.loads((folder / _RECORDS).read_text(encoding="utf-8"))
        return Source(name, TokenIndex(folder / "text", self.key), weight, is_text=True, **records)

    def _fingerprint(self, files: Sequence[SourceFile]) -> str:
        """Of everything that the tokens depend on."""
        options = self.options
        return digest(
            [
                FORMAT,
                [[file.kind, file_facts([file.path])] for file in files],
                tokenizer_facts(self.tokenizer),
                self.tokenizer.eos_token_id if options.add_eos else None,
                [options.text_key, self.max_tokens, options.special_tokens_in_text, options.on_bad_record],
            ]
        )


def _name(path: str) -> str:
    """Return the last part of a path, or of the folder that a glob begins in, without the endings of its formats."""
    parts = Path(path).parts
    fixed = next((at for at, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    name = parts[fixed - 1]
    return Path(without_compression(name)).stem if kind_of(name) else name.removesuffix(".idx").removesuffix(".bin")


def _together(paths: Sequence[str]) -> str:
    """Return the path that texts are named by: the only one, else the folder that holds them all."""
    if len(paths) == 1 or any(map(is_url, paths)):
        return paths[0]
    return os.path.commonpath([path if os.path.isdir(path) else os.path.dirname(path) for path in paths])


class TokenStream:
    """The tokens of `documents` (numbers into `lengths`, in the order given; None: all of them), one after the other.

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
        return int(self.ends[-1]) if len(self.ends) else 0

    def pieces(self, start: int, stop: int) -> Pieces:
        """Return tokens start..stop-1 of the stream, at least one, as pieces of documents."""
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
        """Return how many pieces tokens start..stop-1 are, for every pair."""
        first = np.searchsorted(self.ends, start, side="right")
        return np.searchsorted(self.ends, stop - 1, side="right") - first + 1


def random_starts(num_tokens: int, seq_len: int, seed: int, key: str = "data.train_dir") -> NDArray[np.int64]:
    """Return int64[⌊num_tokens/seq_len⌋]: different starts of 0..num_tokens-seq_len, every choice and order as likely.

    Memory grows with the number of starts, not with the number of tokens. Drawing with replacement until enough
    different starts are there gives each set of them the same chance, since the candidates are interchangeable.

    Raises:
        ValueError: fewer tokens than one sample has; `key` is named.
    """
    check_has_sample(num_tokens, seq_len, key)
    rng = np.random.default_rng(seed)
    wanted, candidates = num_tokens // seq_len, num_tokens - seq_len + 1
    if candidates < _DENSE * wanted:
        return rng.permutation(candidates)[:wanted].copy()
    starts = np.empty(0, np.int64)
    while len(starts) < wanted:
        more = rng.integers(candidates, size=wanted - len(starts), dtype=np.int64)
        starts = np.sort(np.concatenate([starts, more]))  # np.unique hashes, at many times the cost
        starts = starts[np.diff(starts, prepend=-1) > 0]
    rng.shuffle(starts)
    return starts


class WindowPlan:
    """The windows of every source, one source after the other.

    max_samples: of all sources together, the first of each in proportion; not above 0: all.
    """

    epochs = 1.0  # how often the samples hold the tokens

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
        """Return (source, its pieces of documents) of a sample."""
        source = int(np.searchsorted(self._ends, number, side="right"))
        return source, self._streams[source].pieces(self._starts.item(number), self._stops.item(number))

    def token_counts(self) -> NDArray[np.int64]:
        """Return int64[P]: tokens of each sample that a model reads."""
        return self._stops - self._starts - self._label_tokens

    def piece_counts(self) -> NDArray[np.int64]:
        """Return int64[P]: pieces of each sample."""
        edges = pairwise([0, *self._ends.tolist()])
        parts = [
            stream.piece_counts(self._starts[first:end], self._stops[first:end])
            for stream, (first, end) in zip(self._streams, edges, strict=True)
        ]
        return np.concatenate(parts)

    def source_counts(self, first: int) -> NDArray[np.int64]:
        """Return int64[S]: samples of each source among the first so many."""
        return np.diff(np.minimum(self._ends, first), prepend=0)


class StreamPlan:
    """Megatron's indices of every source; the methods are those of WindowPlan.

    Several sources are mixed sample by sample in proportion to their weights, or to their samples if they have none.
    num_samples: of all sources together; None: those of `epochs` epochs of each.
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
        weights = [source.weight for source in sources if source.weight is not None]
        _check_joined_sequences(sources, blend_rule if weights or len(sources) > 1 else None)
        as_builder = bool(weights) and blend_rule == "megatron"
        if as_builder:  # megatron-core's normalises the weights for its BlendedDataset, which normalises them again
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
        """Return whether the first so many samples are those of another plan of the same sources."""
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
        source, sample = 0, number
        if self._order is not None:
            source, sample = self._order[0].item(number), self._order[1].item(number)
        samples = self._samples[source]
        assert samples is not None, "a source that is drawn has samples"
        return source, samples.pieces(sample)

    def token_counts(self) -> NDArray[np.int64]:
        return np.broadcast_to(np.int64(self._seq_len), self._num)  # in the memory of one

    def piece_counts(self) -> NDArray[np.int64]:
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
        if self._order is None:
            return np.array([first])
        return np.bincount(self._order[0][:first], minlength=len(self._samples))


def _check_joined_sequences(sources: Sequence[Source], blend_rule: str | None) -> None:
    """Warn of sources that are not sampled as by megatron-core; ValueError if `blend_rule` asks for that."""
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
