"""The sources of a stream of documents: indices that are there, and texts that become one.

a/b.bin a/b.idx      PREFIX a/b                       an index, source b
a/  with .idx files  a folder of indices              a source for each
scenes/*.txt         texts: files, folders, globs     one index in the cache, source scenes
"""

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

FORMAT = 1  # to be raised when the same text is tokenised into something else
_INDEX = (".idx", ".bin")
_BAD_RECORDS = "bad_records.json"


@dataclass(frozen=True)
class Source:
    """Documents of one name; weight: its share of a blend, None without one; bad_records: of a text, how many records
    gave no document, by reason."""

    name: str
    index: TokenIndex
    weight: float | None
    is_text: bool
    bad_records: Mapping[str, int] = field(default_factory=dict)


class SourceFinder:
    """Opens what `data.train_dir`, `data.val_dir` or `data.blend` names. key: the one that messages name; root: the
    cache of tokenised texts."""

    def __init__(self, tokenizer: Any, options: MultiDocOptions, root: Path, key: str) -> None:
        self._tokenizer, self._options, self._root, self._key = tokenizer, options, root, key

    def blended(self, blend: Any) -> list[Source]:
        """A source for each path of a blend."""
        weights, paths = read_blend(blend)
        found = [self._one(None, path, weight) for weight, path in zip(weights, paths, strict=True)]
        return self._distinct(found)

    def listed(self, paths: Any) -> list[Source]:
        """The sources of a path, of a list of paths, or of {name: path}; texts that have no name of their own are one
        source."""
        plain = OmegaConf.to_container(paths, resolve=True) if OmegaConf.is_config(paths) else paths
        if isinstance(plain, Mapping):
            return self._distinct([self._one(str(name), given) for name, given in plain.items()])
        found: list[Source] = []
        texts: list[str] = []
        for path in self._paths(plain):
            prefixes = _prefixes(path)
            found += [Source(_name(prefix), TokenIndex(prefix, self._key), None, False) for prefix in prefixes]
            texts += [] if prefixes else [path]
        if texts:
            found.append(self._text(_text_name(texts), texts, None))
        return self._distinct(found)

    def _one(self, name: str | None, given: Any, weight: float | None = None) -> Source:
        """The one source of a path, or of a list of texts."""
        paths = self._paths(given)
        prefixes = [prefix for path in paths for prefix in _prefixes(path)]
        if not prefixes:
            return self._text(name or _text_name(paths), paths, weight)
        if len(prefixes) > 1 or len(paths) > 1:
            raise ValueError(f"{self._key} must name one index, or texts, for a source; got {', '.join(prefixes)}")
        return Source(name or _name(prefixes[0]), TokenIndex(prefixes[0], self._key), weight, False)

    def _paths(self, given: Any) -> list[str]:
        paths = [given] if isinstance(given, (str, os.PathLike)) else given
        is_list = isinstance(paths, Sequence) and len(paths) > 0
        if not is_list or not all(isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in paths):
            raise ValueError(f"{self._key} must name texts or an index (PREFIX of PREFIX.bin, .idx); got {given!r}")
        return [os.path.abspath(os.path.expanduser(path)) for path in paths]

    def _distinct(self, sources: list[Source]) -> list[Source]:
        names = [source.name for source in sources]
        for name in names:
            if names.count(name) > 1:
                hint = "write {NAME: PATH, …} in data.train_dir, or rename a file"
                raise ValueError(f"{self._key} must have sources of different names; got {name} twice: {hint}")
        return sources

    def _text(self, name: str, paths: Sequence[str], weight: float | None) -> Source:
        from verl_ext.commands.errors import UsageError
        from verl_ext.tokenize.source_files import find_source_files

        if self._tokenizer is None:
            raise ValueError(f"{self._key} names texts, which need a tokenizer (model.path's); got none for {paths[0]}")
        try:
            files = find_source_files({name: list(paths)})
        except UsageError as error:
            raise ValueError(str(error).replace(f"sources.{name}", self._key, 1)) from error
        made_of = self._fingerprint(files)
        folder = cached_folder(self._root, f"text-{made_of}", lambda to: self._write(files, to))
        if self._fingerprint(files) != made_of:
            raise ValueError(f"{self._key} must not change while it is tokenised; one of its {len(files)} files did")
        bad_records = json.loads((folder / _BAD_RECORDS).read_text(encoding="utf-8"))
        return Source(name, TokenIndex(folder / "text", self._key), weight, True, bad_records)

    def _write(self, files: Sequence[Any], folder: Path) -> None:
        # Here, because the index command's modules import config and the tokenise command's.
        from verl_ext.data.index.text_documents import TextOptions
        from verl_ext.data.index.text_index import write_text_index

        given = self._options
        options = TextOptions(given.text_key, given.add_eos, False, given.on_bad_record, "data.")
        tally = write_text_index(files, self._tokenizer, folder / "text", options, max_tokens=given.max_corpus_tokens)
        (folder / _BAD_RECORDS).write_text(json.dumps(tally.bad), encoding="utf-8")

    def _fingerprint(self, files: Sequence[Any]) -> str:
        """Of what the tokens follow from."""
        options = self._options
        return digest(
            [
                FORMAT,
                [[file.kind, file_facts([file.path])] for file in files],
                tokenizer_facts(self._tokenizer),
                self._tokenizer.eos_token_id if options.add_eos else None,
                [options.text_key, options.max_corpus_tokens, options.on_bad_record],
            ]
        )


def _prefixes(path: str) -> list[str]:
    """The prefixes of the indices that a path means: itself, or those of a folder; [] where it means texts."""
    if path.endswith(_INDEX):
        return [path[:-4]]
    if any(os.path.isfile(path + ending) for ending in _INDEX):
        return [path]
    if os.path.isdir(path):
        return sorted(os.path.join(path, name[:-4]) for name in os.listdir(path) if name.endswith(".idx"))
    return []


def _name(prefix: str) -> str:
    return os.path.basename(prefix)


def _text_name(paths: Sequence[str]) -> str:
    """The name of texts without one: of the only file or folder, else of the folder that holds them all."""
    if len(paths) == 1 and os.path.exists(paths[0]):
        return Path(paths[0]).name.split(".")[0] or "text"
    folders = [path if os.path.isdir(path) else os.path.dirname(path) for path in paths]
    return os.path.basename(os.path.commonpath(folders)) or "text"
