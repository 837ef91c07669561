"""Find the sources of a stream of documents.

a/b.bin a/b.idx      PREFIX a/b: an index, source b           a/ with .idx files: a source for each
scenes/*.txt         texts (files, folders, globs) become one index in the cache, source scenes
"""

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.packs.dataset import split_rows
from verl_ext.data.packs.omitted import OmittedDocuments
from verl_ext.data.stream.megatron.blend import check_blend_weights
from verl_ext.data.stream.megatron.index import SUFFIXES, IndexPart, TokenIndex
from verl_ext.data.stream.megatron.samples import count_tokens
from verl_ext.data.stream.megatron.writer import write_text_indexes
from verl_ext.files import REPORT, write_json
from verl_ext.options import must, plain
from verl_ext.text.encoder_texts import TextOptions, TextRecordEncoder
from verl_ext.text.read.sources import (
    absolute_path,
    files_left_out,
    find_source_files,
    is_url,
    kind_of,
    without_compression,
)
from verl_ext.text.tokenizing import cached_tokens, tokens_fingerprint

_RECORDS = "records.json"


@dataclass(frozen=True)
class Source:
    """The documents of one source.

    weight: its share of a blend, None without a blend. documents: the numbers of its part of the split, None for all.
    For texts, bad_records counts the records without a document by reason, and special_tokens the records with names of
    special tokens, which are encoded as text. omitted_tokens: those between the two parts of a single document.
    left_out: files of its folders that are not read, by their suffix.
    """

    name: str
    index: TokenIndex
    weight: float | None = None
    is_text: bool = False
    bad_records: Mapping[str, int] = field(default_factory=dict)
    special_tokens: int = 0
    documents: NDArray[np.int64] | None = None
    omitted_tokens: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The source's name in messages."""
        return f"{self.index.key}: {self.name}"

    @cached_property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return self.index.num_tokens if self.documents is None else count_tokens(self.index.lengths, self.documents)

    def part(self, split: str, train_ratio: float, seed: int, seq_len: int) -> "Source":
        """Return the source with its documents of "train" or "val".

        A single document is cut in two, with `seq_len` tokens between that neither part has.
        """
        try:
            if self.index.num_documents == 1:
                return self._part_of_document(split, train_ratio, seq_len)
            return replace(self, documents=split_rows(self.index.num_documents, split, train_ratio, seed))
        except ValueError as error:
            raise ValueError(f"{self.key}: {error}") from error

    def _part_of_document(self, split: str, train_ratio: float, seq_len: int) -> "Source":
        tokens = self.index.num_tokens
        cut = int(train_ratio * (tokens - seq_len))
        if not 0 < cut < tokens - seq_len:
            parts = f"two parts of the one document and data.seq_len={seq_len} tokens between them"
            raise ValueError(must("data.train_ratio", f"leave {parts}", f"{train_ratio} of {tokens} tokens"))
        first, last = (0, cut) if split == "train" else (cut + seq_len, tokens)
        index = IndexPart(self.index.prefix, self.index.key, first, last)
        return replace(self, index=index, omitted_tokens=seq_len)

    def omitted_documents(self) -> Iterator[OmittedDocuments]:
        """Yield records without a document, special tokens as text, and a cut.

        The cut of a document in two is named with the tokens between the two parts.
        """
        for reason, count in sorted(self.bad_records.items()):
            yield OmittedDocuments(self.name, f"bad record: {reason}", count)
        yield from (OmittedDocuments(self.name, f"file left out: {name}", n) for name, n in self.left_out.items())
        if self.special_tokens:
            yield OmittedDocuments(self.name, "special tokens encoded as text", self.special_tokens)
        if omitted := self.omitted_tokens:
            kept = {"tokens_kept": self.num_tokens, "tokens_removed": omitted}
            yield OmittedDocuments(self.name, "cut into training and validation", 1, self.num_tokens + omitted, **kept)

    def token_range(self, part: int, parts: int) -> tuple[int, int]:
        """Return (lowest, highest) id of a near-equal share; (0, -1) for none."""
        edges = np.arange(part, part + 2) * self.index.num_tokens // parts * self.index.dtype.itemsize
        edges += self.index.pointers[:1].sum()
        return self.index.token_range(*np.searchsorted(self.index.pointers, edges).tolist())


def read_blend(blend: Any) -> list[tuple[float, str]]:
    """Return (weight, path) of each source of [[0.7, path], [0.3, path]].

    Raises ValueError if the form differs, a weight is negative or not finite, none is above 0, or a path is given
    twice.
    """
    pairs = plain(blend)
    try:
        shares = [(weight, os.fspath(path)) for weight, path in pairs]
    except (TypeError, ValueError):
        shares = []
    if not shares or not all(type(weight) in (int, float) and path for weight, path in shares):
        raise ValueError(must("data.blend", "be pairs of a weight and a path, e.g. [[0.7,a],[0.3,b]]", pairs))
    weights, paths = [float(weight) for weight, _ in shares], [path for _, path in shares]
    check_blend_weights(weights)
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise ValueError(must("data.blend", "name each path once", f"{twice[0]} twice"))
    return list(zip(weights, paths, strict=True))


def is_path(path: Any) -> bool:
    """Return whether a value can be a path."""
    return isinstance(path, (str, os.PathLike)) and bool(os.fspath(path))


@dataclass(frozen=True)
class SourceFinder:
    """A finder of the sources that `data.train_dir`, `data.val_dir` or `data.blend` names.

    options, max_corpus_tokens: how a text becomes documents, and the tokens after which it is cut; root: the cache of
    tokenized texts; key: the config key that messages name.
    """

    tokenizer: Any
    options: TextOptions
    max_corpus_tokens: int | None
    root: Path
    key: str

    def blended(self, blend: Any) -> list[Source]:
        """Return a source for each of a blend's paths weighted above 0."""
        return self._named([([absolute_path(path)], weight) for weight, path in read_blend(blend) if weight])

    def listed(self, paths: Any) -> list[Source]:
        """Return sources of path, paths or {name: path}; unnamed texts form one."""
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
        """Return sources, named by paths' last part, with its folder's if ambiguous."""
        paths = []  # each group's only path, or else the folder that holds its texts
        for group, _ in groups:
            is_alone = len(group) == 1 or any(map(is_url, group))
            held = (path if os.path.isdir(path) else os.path.dirname(path) for path in group)
            paths.append(group[0] if is_alone else os.path.commonpath(list(held)))
        short = [_name(path) for path in paths]
        names = [
            f"{_name(os.path.dirname(path))}_{name}" if short.count(name) > 1 else name
            for path, name in zip(paths, short, strict=True)
        ]
        for path, name in zip(paths, names, strict=True):
            if names.count(name) > 1:
                raise ValueError(must(self.key, "have sources of different names", f"{name} twice: rename {path}"))
        return [self._one(name, *group) for name, group in zip(names, groups, strict=True)]

    def _one(self, name: str, paths: list[str], weight: float | None = None) -> Source:
        prefixes = [prefix for path in paths for prefix in self._prefixes(path)]
        if not prefixes:
            return self._text(name, paths, weight)
        if len(prefixes) > 1 or len(paths) > 1:
            raise ValueError(must(self.key, "name one index, or texts, for a source", ", ".join(prefixes)))
        return Source(name, TokenIndex(prefixes[0], self.key), weight)

    def _prefixes(self, path: str) -> list[str]:
        """Return the prefixes of indices at or in a path; texts: none."""
        if path.endswith(SUFFIXES):
            return [path[:-4]]
        if any(os.path.isfile(path + ending) for ending in SUFFIXES):
            return [path]
        held = sorted(os.listdir(path)) if os.path.isdir(path) else []
        prefixes = [os.path.join(path, name[:-4]) for name in held if name.endswith(".idx")]
        texts = [name for name in held if kind_of(name) and name != REPORT]
        if prefixes and texts:
            raise ValueError(f"{self.key} must name a folder of indices or of texts; {path} holds {texts[0]} as well")
        if masks := [prefix for prefix in prefixes if prefix.removesuffix("_mask") in {*prefixes} - {prefix}]:
            needed = "must name indices of texts, because loss masks are not read"
            raise ValueError(f"{self.key} {needed}; {path} holds {os.path.basename(masks[0])} of `verl-ext tokenize`")
        return prefixes

    def _paths(self, given: Any) -> list[str]:
        paths = [given] if isinstance(given, (str, os.PathLike)) else given
        if not isinstance(paths, Sequence) or not paths or not all(map(is_path, paths)):
            raise ValueError(must(self.key, "name texts or an index (PREFIX of PREFIX.bin, .idx)", given))
        return [absolute_path(path) for path in paths]

    def _text(self, name: str, paths: list[str], weight: float | None) -> Source:
        if self.tokenizer is None:
            raise ValueError(f"{self.key} names texts, which need a tokenizer (model.path's); got none for {paths[0]}")
        files = find_source_files({name: paths}, self.key)
        encoder = TextRecordEncoder(self.options, self.tokenizer)

        def make(folder: Path) -> None:
            prefixes = {self.key: folder / "text"}
            (counts,) = write_text_indexes(files, encoder, prefixes, max_corpus_tokens=self.max_corpus_tokens).values()
            records = {"bad_records": counts.bad, "special_tokens": counts.special_tokens["records"]}
            write_json(folder / _RECORDS, records)

        of_texts = files, encoder, self.max_corpus_tokens
        folder = cached_tokens(self.root, lambda: f"text-{tokens_fingerprint(*of_texts)}", make, self.key)
        records = json.loads((folder / _RECORDS).read_text(encoding="utf-8"))
        records["left_out"] = files_left_out(files)
        return Source(name, TokenIndex(folder / "text", self.key), weight, is_text=True, **records)


def _name(path: str) -> str:
    parts = Path(path).parts
    fixed = next((at for at, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    name = parts[fixed - 1]
    return Path(without_compression(name)).stem if kind_of(name) else name.removesuffix(".idx").removesuffix(".bin")
