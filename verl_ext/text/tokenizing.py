"""Tokenize files to disk: the loop of all families and commands, and its cache.

    files --read_batches--> records --Encoder, in one or several processes--> documents --write_documents--> a writer

A writer appends documents to a folder: `DatasetWriter` as Arrow, `TextIndexes` in Megatron's indexed form. `tokenized`
writes the folder once, for all processes that open it:

    CACHE/<fingerprint>/       of the files, the tokenizer and the encoder's options
        data-00000-of-00001.arrow, state.json, dataset_info.json    what `datasets.load_from_disk` opens
        categories.json        {"1": "gsm8k", "2": "code"}
        report.json            the counts of records, by category
"""

import hashlib
import json
import logging
import os
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from verl_ext.cache import cached_folder, fingerprint
from verl_ext.files import CATEGORIES, REPORT, file_state, write_json
from verl_ext.progress import Done, Progress
from verl_ext.redaction import redacted
from verl_ext.text.arrow_folder import DatasetWriter
from verl_ext.text.read.sources import SourceFile, is_url, remote_facts, total_bytes
from verl_ext.text.tokens.documents import Counts, Documents

BATCH_BYTES = 4 << 20  # bytes of text tokenized together, enough work for the tokenizer's threads

_logger = logging.getLogger(__name__)
_reported: set[tuple[Path, str]] = set()


@dataclass(frozen=True)
class Encoder:
    """The base class of encoders, which turn files into documents.

    The documents follow from the files, the tokenizer and the options alone. Options: the class of `options`; texts:
    the names of further columns of the documents; key: the config key of the files, for errors.
    """

    Options: ClassVar[type[Any]]
    texts: ClassVar[tuple[str, ...]] = ()

    tokenizer: Any
    options: Any
    key: str = "data.train_dir"

    @abstractmethod
    def encode(self, files: Sequence[SourceFile], batch_bytes: int) -> Iterator[Documents]:
        """Yield the files' documents, for about `batch_bytes` of text at a time.

        Their counts include records, bad records and special tokens. Raises ValueError if a record ends the run.
        """

    @abstractmethod
    def notices(self, total: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line for each way in which documents differ from the records; total: the counts in the report."""


class Writer(Protocol):
    """A writer of files that are complete after `close()`; `abandon()` is always called last."""

    def close(self) -> None:
        """Complete the files."""

    def abandon(self) -> None:
        """Close or remove files that are incomplete."""


DocumentsT = TypeVar("DocumentsT")


def write_documents(
    documents: Iterator[DocumentsT],
    add: Callable[[DocumentsT], Done],
    writer: Writer,
    num_bytes: int | None,
    description: str = "tokenize",
) -> None:
    """Pass all documents to `add`, which writes them, with a progress bar over the files' `num_bytes`.

    The bar appears with the first tokens, so that it is not shown for files without tokens or with an early mistake.
    """
    begun = time.monotonic()
    try:
        first: list[Done] = []
        for each in documents:
            first.append(done := add(each))
            if done.tokens:
                with Progress(num_bytes, description) as progress:
                    progress.started = begun
                    for later in chain(first, map(add, documents)):
                        progress.add(later)
        writer.close()
    finally:
        writer.abandon()


def cached_tokens(root: Path, name_now: Callable[[], str], make: Callable[[Path], None], key: str) -> Path:
    """Return the folder below `root` for the files' fingerprint, which `make` fills if it is missing.

    Raises ValueError, and keeps no folder, if the files that `key` names change meanwhile.
    """

    def of_same_files(folder: Path) -> None:
        make(folder)
        if name_now() != name:
            raise ValueError(f"the files of {key} must not change while they are tokenized; one did")

    return cached_folder(root, name := name_now(), of_same_files)


def tokenized(
    files: Sequence[SourceFile],
    names: Mapping[int, str],
    encoder: Encoder,
    root: Path,
    *,
    batch_bytes: int = BATCH_BYTES,
) -> Path:
    """Return the folder below `root` with the documents of these files, tokenized if it is missing.

    The notices of cuts and omissions are logged once in a process. Processes may call this at the same time. names:
    category number -> name.

    Raises ValueError if files cannot be used or change meanwhile, or if the cache cannot be written.
    """
    folder = cached_tokens(
        root,
        lambda: _fingerprint(files, names, encoder),
        lambda to: _write(to, files, names, encoder, batch_bytes),
        encoder.key,
    )
    if (folder, encoder.key) not in _reported:
        _reported.add((folder, encoder.key))
        for line in encoder.notices(read_report(folder)["total"]):
            _logger.warning("%s", line)
    return folder


def read_report(folder: str | Path) -> dict[str, Any]:
    """Return report.json of a folder: files, options, categories {name: counts} and total."""
    return json.loads((Path(folder) / REPORT).read_text(encoding="utf-8"))


def number_categories(
    files: Iterable[SourceFile], category_of: Callable[[SourceFile], str]
) -> tuple[list[SourceFile], dict[int, str]]:
    """Return (files with category numbers, number -> name); numbers begin at 1, in the order of their first files."""
    categories = [(file, category_of(file)) for file in files]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for _, name in categories), start=1)}
    numbered = [replace(file, category_id=numbers[name]) for file, name in categories]
    return numbered, {number: name for name, number in numbers.items()}


def file_facts(paths: Iterable[str]) -> list[list[Any]]:
    """Return [real path, size, modification time] of each file, also of the files in a folder.

    The facts of a URL are those of its host. No content is read.
    """
    facts: list[list[Any]] = []
    for path in paths:
        if is_url(path):
            facts.append(remote_facts(path))
        elif os.path.isdir(path):
            facts += file_facts(sorted(entry.path for entry in os.scandir(path) if entry.is_file()))
        else:
            facts.append([*file_state(path)])
    return facts


def tokenizer_facts(tokenizer: Any) -> list[Any]:
    """Return the facts that decide how a tokenizer splits text, without the state that calls leave in it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        serialised = json.loads(backend.to_str())
        for state in ("truncation", "padding"):  # left there by the last call
            serialised.pop(state, None)
        model = json.dumps(serialised)
    else:
        model = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.all_special_tokens])
        file = getattr(tokenizer, "vocab_file", None)
        if file and os.path.isfile(file):
            model += hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return [
        type(tokenizer).__name__,
        hashlib.sha256(model.encode()).hexdigest(),
        bool(getattr(tokenizer, "split_special_tokens", False)),
    ]


def _fingerprint(files: Sequence[SourceFile], names: Mapping[int, str], encoder: Encoder) -> str:
    """Return a digest of everything that the documents and the report depend on."""
    tokenizer, categories = encoder.tokenizer, [[file.kind, names[file.category_id]] for file in files]
    ends = [getattr(tokenizer, f"{end}_token_id", None) for end in ("bos", "eos")]
    made_by = [tokenizer_facts(tokenizer), ends, type(encoder).__name__, vars(encoder.options)]
    return fingerprint(
        [code_digest(type(encoder).__module__), file_facts(file.path for file in files), categories, *made_by]
    )


@cache
def code_digest(module: str | None = None) -> str:
    """Return a digest of the code that makes documents, so that no cache outlives a change of it.

    That is this package, and the module of a family's encoder.
    """
    files = sorted(Path(__file__).parent.rglob("*.py"))
    if module is not None and (own := sys.modules[module].__file__):
        files.append(Path(own))
    return fingerprint([[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files])


def _write(
    folder: Path, files: Sequence[SourceFile], names: Mapping[int, str], encoder: Encoder, batch_bytes: int
) -> None:
    """Write the dataset with its categories and its report into an empty folder."""
    counts = {number: Counts() for number in names}
    writer = DatasetWriter(folder, texts=encoder.texts)

    def add(documents: Documents) -> Documents:
        own, lengths = documents.counts, documents.lengths
        own.add_documents(lengths.tolist(), int(documents.loss_mask.sum(dtype=np.int64)))
        if documents.full_lengths is not None and (cut := documents.full_lengths - lengths).any():
            cut_off = int(cut.sum(dtype=np.int64))
            own.over_length.update(truncated_documents=int((cut > 0).sum()), truncated_tokens=cut_off)
        counts[documents.category_id].add(own)
        writer.add(documents)
        return documents

    write_documents(encoder.encode(files, batch_bytes), add, writer, total_bytes(files))
    total = Counts()
    for of_category in counts.values():
        total.add(of_category)
    if not total.documents:
        example = next(chain.from_iterable(total.examples.values()), "")
        raise ValueError(
            f"{encoder.key} must hold at least one record with a text; got none in {files[0].path} and "
            f"{len(files) - 1} files more, of {total.records} records{example and f', such as {example}'}"
        )
    write_json(folder / CATEGORIES, {str(number): name for number, name in names.items()})
    report = {
        "files": redacted([file.path for file in files]),
        "options": vars(encoder.options),
        "categories": {names[number]: of_category.as_dict() for number, of_category in counts.items()},
        "total": total.as_dict(),
    }
    write_json(folder / REPORT, report)
