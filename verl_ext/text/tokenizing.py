"""Tokenize files to disk: one loop and one protocol of encoders for all families and commands, and the cache.

    files --read_files--> chunks --Encoder, in one or several processes--> Documents --> a writer

A writer appends documents to a folder: `DatasetWriter` as Arrow, `TextIndexes` and `MaskedIndexes` in Megatron's
indexed form. `tokenized` writes the folder once, for all processes that open it:

    CACHE/<fingerprint>/       of the files, the tokenizer and the encoder's options
        data-00000-of-00001.arrow, state.json, dataset_info.json    what `datasets.load_from_disk` opens
        categories.json        {"1": "gsm8k", "2": "code"}
        report.json            the counts of records, by category
"""

import hashlib
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from socket import gethostname
from typing import Any, Protocol, TypeVar

from verl_ext.files import CATEGORIES, REPORT, cached_folder, file_state, fingerprint, write_json
from verl_ext.nodes import differences, versions
from verl_ext.options import DataError
from verl_ext.progress import Done, Progress
from verl_ext.ray_cluster import ray_cluster
from verl_ext.redaction import redacted
from verl_ext.text.encoder import Encoder
from verl_ext.text.read.readers import CHUNK, Chunk, ChunkSize, read_files
from verl_ext.text.read.sources import SourceFile, is_url, remote_facts, total_bytes
from verl_ext.text.tokens.counts import Counts
from verl_ext.text.tokens.dataset_folder import DatasetWriter
from verl_ext.text.tokens.documents import Documents
from verl_ext.text.tokens.tokenizer import tokenizer_module
from verl_ext.text.workers import available_cpus, ordered_results, ray_results, start_server

WORKER_BYTES = 4 << 20  # of the files for each process, which takes a second or two to start
THREADS_BYTES = 32 << 20  # up to which the tokenizer's own threads are as fast as processes
THREADS_CHUNK = ChunkSize(bytes=4 << 20)  # enough work for them

EncoderT = TypeVar("EncoderT", bound=Encoder)

_logger = logging.getLogger(__name__)
_reported: set[tuple[Path, str]] = set()


class Writer(Protocol):
    """A writer of files that are complete after `close()`; `abandon()` is always called last."""

    def close(self) -> None:
        """Complete the files."""

    def abandon(self) -> None:
        """Close or remove files that are incomplete."""


def tokenize_files(
    files: Sequence[SourceFile],
    encoder: Encoder,
    add: Callable[[Documents], Done],
    writer: Writer,
    *,
    num_workers: int | None = None,
    on_ray: bool = False,
    size: ChunkSize | None = None,
    read: Callable[[SourceFile, ChunkSize], Iterator[Chunk]] | None = None,
    is_full: Callable[[int], bool] = lambda source: False,
    description: str = "tokenize",
) -> None:
    """Tokenize files, and pass their documents in order to `add`, which writes them and returns what it wrote.

    num_workers: the processes; 1: this one; None: chosen by the files' bytes. on_ray: tasks of a Ray cluster do the
    work. size: of chunks. read: the reader of one file; None: the encoder's. is_full: tells whether more of a source,
    or an error in it, is of no interest.

    Raises `UsageError`, and `DataError` for the first record or file that ends the run.
    """
    begun, num_bytes = time.monotonic(), total_bytes(files)

    def written(results: Iterable[Documents]) -> Iterator[Done]:
        for documents in results:
            done = add(documents)
            if documents.failure is not None and not is_full(documents.category_id):
                raise DataError(documents.failure)
            yield done

    try:
        preload = [tokenizer_module(), type(encoder).__module__]
        if not on_ray and (num_workers := num_workers or _useful_workers(encoder, num_bytes)) > 1:
            start_server(preload)
        encoder.open()  # here too, so that a tokenizer that does not suit is refused before a worker starts
        size = size or (THREADS_CHUNK if num_workers == 1 and encoder.has_threads else CHUNK)
        chunks = read_files(files, size, read or encoder.read, is_full)
        with closing(_results(encoder, chunks, num_workers, on_ray, name="tokenize", preload=preload)) as results:
            # The bar appears with the first tokens, not for files without tokens or with an early mistake.
            first: list[Done] = []
            rest = written(results)
            for done in rest:
                first.append(done)
                if done.tokens:
                    with Progress(num_bytes, description) as progress:
                        progress.started = begun
                        for each in chain(first, rest):
                            progress.add(each)
        writer.close()
    finally:
        writer.abandon()


def _useful_workers(encoder: Encoder, num_bytes: int | None) -> int:
    """Return the number of processes that tokenize this many bytes fastest."""
    if encoder.has_threads:  # the process of a training, with its own tokenizer, which may not be fit to be sent
        is_small = num_bytes is not None and num_bytes < THREADS_BYTES
        is_own_code = not type(encoder.tokenizer).__module__.startswith("transformers.")
        if is_small or is_own_code or multiprocessing.current_process().daemon:  # which may have no children
            return 1
    return available_cpus() if num_bytes is None else min(available_cpus(), 1 + num_bytes // WORKER_BYTES)


def _results(
    encoder: Encoder, chunks: Iterator[Chunk], num_workers: int | None, on_ray: bool, **how: Any
) -> Iterator[Documents]:
    """Yield the chunks' documents in order, encoded by processes or Ray tasks."""
    encode = type(encoder).encode
    if not on_ray:
        yield from ordered_results(partial(_opened, encoder), encode, chunks, num_workers or 1, **how)
        return
    make = partial(_same_encoder, encoder, encoder.fingerprint(), versions(), gethostname())
    with ray_cluster(num_workers or available_cpus()):
        yield from ray_results(make, encode, chunks, num_workers, **how)


def _opened(encoder: EncoderT) -> EncoderT:
    encoder.open()
    return encoder


def _same_encoder(encoder: EncoderT, fingerprint: str, driver_versions: Mapping[str, str], driver: str) -> EncoderT:
    """Return a Ray worker's encoder; raise `DataError` if the driver's differs."""
    if lines := differences({driver: driver_versions, f"{gethostname()}, a worker": versions()}):
        raise DataError("; ".join(lines))
    if encoder.fingerprint() != fingerprint:
        model = encoder.options.model
        got = f"got {model.tokenizer}, which is another on {gethostname()} than on {driver}"
        raise DataError(f"{model.tokenizer_key} must be the same tokenizer and template on every node; {got}")
    return _opened(encoder)


def cached_tokens(root: Path, name_now: Callable[[], str], make: Callable[[Path], None], key: str) -> Path:
    """Return the folder below `root` for the files' fingerprint, which `make` fills if it is missing.

    Raises ValueError, and keeps no folder, if the files that `key` names change meanwhile.
    """

    def of_same_files(folder: Path) -> None:
        make(folder)
        if name_now() != name:
            raise ValueError(f"the files of {key} must not change while they are tokenized; one did")

    return cached_folder(root, name := name_now(), of_same_files)


def tokenized(files: Sequence[SourceFile], names: Mapping[int, str], encoder: Encoder, root: Path) -> Path:
    """Return the folder below `root` with the documents of these files, tokenized if it is missing.

    The notices of cuts and omissions are logged once in a process. Processes may call this at the same time. names:
    category number -> name.

    Raises ValueError if files cannot be used or change meanwhile, or if the cache cannot be written.
    """
    folder = cached_tokens(
        root,
        lambda: tokens_fingerprint(files, encoder, [names[file.category_id] for file in files]),
        lambda to: _write(to, files, names, encoder),
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


def tokens_fingerprint(files: Sequence[SourceFile], encoder: Encoder, *others: Any) -> str:
    """Return a digest of all that documents follow from: code, encoder, files, and `others` of JSON's types."""
    read = [[file.category_id, file.kind] for file in files]
    code = code_digest(type(encoder).__module__)
    return fingerprint([code, encoder.fingerprint(), read, file_facts(file.path for file in files), *others])


@cache
def code_digest(module: str | None = None) -> str:
    """Return a digest of the code that makes documents, so that no cache outlives a change of it.

    That is this package, and the module of a family's encoder.
    """
    files = sorted(Path(__file__).parent.rglob("*.py"))
    if module is not None and (own := sys.modules[module].__file__):
        files.append(Path(own))
    return fingerprint([[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files])


def _write(folder: Path, files: Sequence[SourceFile], names: Mapping[int, str], encoder: Encoder) -> None:
    """Write the dataset with its categories and its report into an empty folder."""
    counts = {number: Counts() for number in names}
    writer = DatasetWriter(folder, texts=encoder.texts)

    def add(documents: Documents) -> Documents:
        for each in (documents.counts, documents.counted()):
            counts[documents.category_id].add(each)
        writer.add(documents)
        return documents

    tokenize_files(files, encoder, add, writer)
    total = Counts.total(counts.values())
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
