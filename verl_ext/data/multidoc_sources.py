"""The sources of a stream of documents: indices that are there, and texts that become one.

a/b.bin a/b.idx      PREFIX a/b                       an index, source b
a/  with .idx files  a folder of indices              a source for each
scenes/*.txt         texts: files, folders, globs     one index in the cache, source scenes

The lowest and the highest token id of indices, read in shares and kept in the cache.
"""

import contextlib
import glob
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_ext.data.dataset import check_train_ratio
from verl_ext.data.megatron import BLEND_RULES, TokenIndex, check_weights
from verl_ext.files import cached_folder, check_cache_dir, damage
from verl_ext.packing import MOST_TOKENS
from verl_ext.text.json_records import ON_BAD_RECORD, SPECIAL_TOKENS_IN_TEXT
from verl_ext.text.sources import absolute_path, find_source_files, is_url, kind_of, without_compression
from verl_ext.text.tokenized import digest, file_facts, tokenizer_facts
from verl_ext.values import check_choice, whole_number

SAMPLINGS = ("random_starts", "document_stream", "in_order")


VAL_SAMPLINGS = ("in_order", "random_starts")


# What packs of whole documents can have, and samples of a stream cannot.
_FIXED = {"strategy": ("none",), "mixture": (None,), "balance": ("none",), "pad_mode": ("no_padding",)}


@dataclass(frozen=True)
class MultiDocOptions:
    """seq_len: tokens of a sample; sampling: one of SAMPLINGS, None for what suits the data;
    attend_across_documents: a sample is one document to attention; num_samples: of a document stream, None for whole
    epochs; blend_rule: in which order its sources follow each other; max_corpus_tokens: where a text is cut;
    train_ratio and seed: of the split by document; val_sampling and val_seed: of the validation set; cache_dir: where
    tokenised texts and indices are kept (None: the cache of `datasets`). conf/data/multidoc.yaml describes them."""

    seq_len: int
    sampling: str | None = None
    attend_across_documents: bool = True
    num_samples: int | None = None
    blend_rule: str = "tijdeman"
    add_eos: bool = True
    text_key: str | tuple[str, ...] = "text"
    max_corpus_tokens: int | None = None
    special_tokens_in_text: str = "encode"
    on_bad_record: str = "error"
    train_ratio: float = 1.0
    seed: int = 42
    val_sampling: str = "in_order"
    val_seed: int | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.seq_len is None:
            raise ValueError("data.seq_len must be given (tokens of a sample); got nothing")
        whole_number("data.seq_len", self.seq_len, least=2, most=MOST_TOKENS)
        whole_number("data.seed", self.seed, least=0, most=2**32 - 1)
        for name, least in (("num_samples", 1), ("max_corpus_tokens", 1), ("val_seed", 0)):
            if getattr(self, name) is not None:
                whole_number(f"data.{name}", getattr(self, name), least=least)
        if self.sampling is not None:
            check_choice("data.sampling", self.sampling, SAMPLINGS)
        check_choice("data.blend_rule", self.blend_rule, tuple(BLEND_RULES))
        check_choice("data.val_sampling", self.val_sampling, VAL_SAMPLINGS)
        check_choice("data.special_tokens_in_text", self.special_tokens_in_text, SPECIAL_TOKENS_IN_TEXT)
        check_choice("data.on_bad_record", self.on_bad_record, ON_BAD_RECORD)
        for name in ("attend_across_documents", "add_eos"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"data.{name} must be true or false; got {getattr(self, name)!r}")
        check_train_ratio(self.train_ratio)
        keys = (self.text_key,) if isinstance(self.text_key, str) else self.text_key
        if not keys or not all(isinstance(name, str) and name for name in keys):
            raise ValueError(f"data.text_key must name a field of a record, or several; got {self.text_key!r}")
        check_cache_dir(self.cache_dir)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], given: Mapping[str, Any]) -> "MultiDocOptions":
        """What is `given` and not None, else the key of `config` (verl's data node or a mapping), else the default."""
        for name, allowed in _FIXED.items():
            if config.get(name) not in (None, *allowed):
                raise ValueError(
                    f"data.{name} must be {allowed[0] or 'null'} for samples of a stream; got {config.get(name)!r}"
                )
        options: dict[str, Any] = {"seq_len": None}
        for name in (entry.name for entry in fields(cls)):
            value = config.get(name) if given.get(name) is None else given[name]
            if value is not None:
                options[name] = tuple(value) if name == "text_key" and not isinstance(value, str) else value
        made = cls(**options)
        budget = config.get("max_tokens")
        if given.get("seq_len") is None and budget is not None and budget != made.seq_len:
            raise ValueError(f"data.max_tokens must be data.seq_len={made.seq_len} for samples of it; got {budget}")
        return made


def read_blend(blend: Any) -> tuple[list[float], list[str]]:
    """(weights, paths) of [[0.7, path], [0.3, path]].

    Raises:
        ValueError: another form, a weight that is negative or not finite, no weight above 0, a path given twice.
    """
    plain: Any = OmegaConf.to_container(blend, resolve=True) if OmegaConf.is_config(blend) else blend
    is_list = isinstance(plain, Sequence) and not isinstance(plain, str) and len(plain) > 0
    if not is_list or not all(_is_pair(pair) for pair in plain):
        raise ValueError(f"data.blend must be pairs of a weight and a path, e.g. [[0.7,a],[0.3,b]]; got {plain!r}")
    weights, paths = [float(weight) for weight, _ in plain], [str(path) for _, path in plain]
    check_weights(weights)
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ValueError(f"data.blend must name each path once; got {twice} twice")
    return weights, paths


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, Sequence)
        and not isinstance(pair, str)
        and len(pair) == 2
        and isinstance(pair[0], (int, float))
        and not isinstance(pair[0], bool)
        and isinstance(pair[1], (str, os.PathLike))
        and bool(os.fspath(pair[1]))
    )


_FILE = "token_range.json"


def range_part(indices: Sequence[TokenIndex], part: int, parts: int) -> tuple[int, int] | None:
    """(lowest, highest) token id of one of `parts` shares of about as many tokens each; None where it has no token."""
    found = []
    for index in indices:
        ends = np.cumsum(index.lengths, dtype=np.int64)
        edges = np.arange(part, part + 2) * index.num_tokens // parts
        first, last = np.searchsorted(ends, edges, side="right").tolist()
        if part == parts - 1:
            last = index.num_documents
        lowest, highest = index.token_range(first, last)
        if lowest <= highest:
            found.append((lowest, highest))
    if not found:
        return None
    lows, highs = zip(*found, strict=True)
    return min(lows), max(highs)


def cached_range(root: Path, indices: Sequence[TokenIndex]) -> tuple[int, int] | None:
    """What `keep_range` kept of exactly these files; None for nothing."""
    folder = root / _name(indices)
    if damage(folder) is not None:
        return None
    try:
        lowest, highest = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        return int(lowest), int(highest)
    except (OSError, ValueError, TypeError):
        return None


def keep_range(root: Path, indices: Sequence[TokenIndex], token_range: tuple[int, int]) -> None:
    """Keep it for the next start, where the cache can be written."""
    with contextlib.suppress(ValueError):
        cached_folder(root, _name(indices), lambda to: _write(to / _FILE, token_range))


def _write(path: Path, token_range: tuple[int, int]) -> None:
    path.write_text(json.dumps(token_range), encoding="utf-8")


def _name(indices: Sequence[TokenIndex]) -> str:
    return f"range-{digest(file_facts(file for index in indices for file in index.files))}"


FORMAT = 1  # to be raised when the same text is tokenised into something else
_INDEX = (".idx", ".bin")
_RECORDS = "records.json"
_REPORT = "report.json"  # of the index command


@dataclass(frozen=True)
class Source:
    """Documents of one name; weight: its share of a blend, None without one. Of a text: bad_records, how many records
    gave no document, by reason; special_tokens, how many hold names of special tokens, which are encoded as text."""

    name: str
    index: TokenIndex
    weight: float | None
    is_text: bool
    bad_records: Mapping[str, int] = field(default_factory=dict)
    special_tokens: int = 0


class SourceFinder:
    """Opens what `data.train_dir`, `data.val_dir` or `data.blend` names. key: the one that messages name; root: the
    cache of tokenised texts."""

    def __init__(self, tokenizer: Any, options: MultiDocOptions, root: Path, key: str) -> None:
        self._tokenizer, self._options, self._root, self._key = tokenizer, options, root, key

    def blended(self, blend: Any) -> list[Source]:
        """A source for each path of a blend whose weight is above 0."""
        pairs = [(weight, self._paths(path)[0]) for weight, path in zip(*read_blend(blend), strict=True) if weight]
        names = self._names([path for _, path in pairs])
        return [self._one(name, [path], weight) for name, (weight, path) in zip(names, pairs, strict=True)]

    def listed(self, paths: Any) -> list[Source]:
        """The sources of a path, of a list of paths, or of {name: path}; texts that have no name of their own are one
        source."""
        plain = OmegaConf.to_container(paths, resolve=True) if OmegaConf.is_config(paths) else paths
        if isinstance(plain, Mapping):
            return [self._one(str(name), self._paths(given), None) for name, given in plain.items()]
        found = [(path, self._prefixes(path)) for path in self._paths(plain)]
        prefixes = [prefix for _, held in found for prefix in held]
        texts = [path for path, held in found if not held]
        names = self._names([*prefixes, *([_together(texts)] if texts else [])])
        sources = [self._index(name, prefix, None) for name, prefix in zip(names, prefixes, strict=False)]
        return [*sources, self._text(names[-1], texts, None)] if texts else sources

    def _one(self, name: str, paths: list[str], weight: float | None) -> Source:
        """The one source of a path, or of a list of texts."""
        prefixes = [prefix for path in paths for prefix in self._prefixes(path)]
        if not prefixes:
            return self._text(name, paths, weight)
        if len(prefixes) > 1 or len(paths) > 1:
            raise ValueError(f"{self._key} must name one index, or texts, for a source; got {', '.join(prefixes)}")
        return self._index(name, prefixes[0], weight)

    def _index(self, name: str, prefix: str, weight: float | None) -> Source:
        return Source(name, TokenIndex(prefix, self._key), weight, False)

    def _names(self, paths: Sequence[str]) -> list[str]:
        """A name for each path: its last part, and with it its folder's where two would be alike."""
        names = [_name_multidoc_sources(path) for path in paths]
        names = [
            f"{_name_multidoc_sources(os.path.dirname(path))}_{name}" if names.count(name) > 1 else name
            for path, name in zip(paths, names, strict=True)
        ]
        for path, name in zip(paths, names, strict=True):
            if names.count(name) > 1:
                raise ValueError(f"{self._key} must have sources of different names; got {name} twice: rename {path}")
        return names

    def _prefixes(self, path: str) -> list[str]:
        """The prefixes of the indices that a path means: itself, or those of a folder; [] where it means texts."""
        if path.endswith(_INDEX):
            return [path[:-4]]
        if any(os.path.isfile(path + ending) for ending in _INDEX):
            return [path]
        held = sorted(os.listdir(path)) if os.path.isdir(path) else []
        prefixes = [os.path.join(path, name[:-4]) for name in held if name.endswith(".idx")]
        texts = [name for name in held if kind_of(name) and name != _REPORT]
        if prefixes and texts:
            raise ValueError(f"{self._key} must name a folder of indices or of texts; {path} holds {texts[0]} as well")
        return prefixes

    def _paths(self, given: Any) -> list[str]:
        paths = [given] if isinstance(given, (str, os.PathLike)) else given
        is_list = isinstance(paths, Sequence) and len(paths) > 0
        if not is_list or not all(isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in paths):
            raise ValueError(f"{self._key} must name texts or an index (PREFIX of PREFIX.bin, .idx); got {given!r}")
        return [absolute_path(path) for path in paths]

    def _text(self, name: str, paths: Sequence[str], weight: float | None) -> Source:
        if self._tokenizer is None:
            raise ValueError(f"{self._key} names texts, which need a tokenizer (model.path's); got none for {paths[0]}")
        files = find_source_files({name: list(paths)}, self._key)
        made_of = self._fingerprint(files)
        folder = cached_folder(self._root, f"text-{made_of}", lambda to: self._write(files, to))
        if self._fingerprint(files) != made_of:
            raise ValueError(f"{self._key} must not change while it is tokenised; one of its {len(files)} files did")
        records = json.loads((folder / _RECORDS).read_text(encoding="utf-8"))
        return Source(name, TokenIndex(folder / "text", self._key), weight, True, **records)

    def _write(self, files: Sequence[Any], folder: Path) -> None:
        # Here, because the index command's modules import config and the tokenise command's.
        from verl_ext.data.megatron.text_index import write_text_index
        from verl_ext.text.plain_text import TextOptions

        given = self._options
        options = TextOptions(
            given.text_key, given.add_eos, False, given.on_bad_record, given.special_tokens_in_text, "data."
        )
        limit = given.max_corpus_tokens
        tally = write_text_index(files, self._tokenizer, folder / "text", options, max_tokens=limit, key=self._key)
        records = {"bad_records": tally.bad, "special_tokens": tally.special_tokens["records"]}
        (folder / _RECORDS).write_text(json.dumps(records), encoding="utf-8")

    def _fingerprint(self, files: Sequence[Any]) -> str:
        """Of what the tokens follow from."""
        options = self._options
        return digest(
            [
                FORMAT,
                [[file.kind, file_facts([file.path])] for file in files],
                tokenizer_facts(self._tokenizer),
                self._tokenizer.eos_token_id if options.add_eos else None,
                [options.text_key, options.max_corpus_tokens, options.special_tokens_in_text, options.on_bad_record],
            ]
        )


def _name_multidoc_sources(path: str) -> str:
    """The last part of a path, or of the folder that a glob begins in, without the endings of its formats."""
    parts = Path(path).parts
    plain = next((at for at, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    name = parts[plain - 1]
    if kind_of(name):
        return Path(without_compression(name)).stem
    for ending in _INDEX:
        name = name.removesuffix(ending)
    return name


def _together(paths: Sequence[str]) -> str:
    """What texts are named by: the only path, else the folder that holds them all."""
    if len(paths) == 1 or any(map(is_url, paths)):
        return paths[0]
    return os.path.commonpath([path if os.path.isdir(path) else os.path.dirname(path) for path in paths])
