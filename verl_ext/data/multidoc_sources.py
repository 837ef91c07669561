"""The sources of a stream of documents: indices that are there, and texts that become one.

a/b.bin a/b.idx      PREFIX a/b                       an index, source b
a/  with .idx files  a folder of indices              a source for each
scenes/*.txt         texts: files, folders, globs     one index in the cache, source scenes
"""

import glob
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.data.cached_folder import cached_folder
from verl_ext.data.fingerprint import digest, file_facts, tokenizer_facts
from verl_ext.data.megatron import TokenIndex
from verl_ext.data.multidoc_options import MultiDocOptions, read_blend
from verl_ext.tokenize.remote_files import absolute_path, is_url
from verl_ext.tokenize.source_files import find_source_files, kind_of, without_compression

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
        names = [_name(path) for path in paths]
        names = [
            f"{_name(os.path.dirname(path))}_{name}" if names.count(name) > 1 else name
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
        from verl_ext.data.index.text_documents import TextOptions
        from verl_ext.data.index.text_index import write_text_index

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


def _name(path: str) -> str:
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
