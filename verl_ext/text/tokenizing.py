"""Tokenize files to disk: one loop of all families and commands.

    files --read_files--> chunks --Encoder, in one or several processes--> Documents --> a writer

A writer appends documents to a folder: `DatasetWriter` as Arrow, `TextIndexes` and `MaskedIndexes` in Megatron's
indexed form. A folder in a cache is named by a digest of all that its documents follow from, code included.
"""

import hashlib
import heapq
import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from socket import gethostname
from typing import Any, Protocol, TypeVar

from verl_ext.cache import cached_folder, fingerprint
from verl_ext.environment import differences, versions
from verl_ext.files import file_state
from verl_ext.launch.ray_cluster import ray_cluster
from verl_ext.options import DataError, must
from verl_ext.progress import Progress
from verl_ext.text.encoder import Encoder
from verl_ext.text.read.readers import CHUNK, Chunk, ChunkSize, read_files
from verl_ext.text.read.sources import SourceFile, is_url, remote_facts, total_bytes
from verl_ext.text.tokens.counts import NO_KEY
from verl_ext.text.tokens.documents import Documents
from verl_ext.text.tokens.tokenizer import tokenizer_module
from verl_ext.text.workers import available_cpus, ordered_results, ray_results, start_server

WORKER_BYTES = 4 << 20  # of the files for each process, which takes a second or two to start
THREADS_BYTES = 32 << 20  # up to which the tokenizer's own threads are as fast as processes
THREADS_CHUNK = ChunkSize(bytes=4 << 20)  # enough work for them

EncoderT = TypeVar("EncoderT", bound=Encoder)
ResultT = TypeVar("ResultT")


class Writer(Protocol):
    """A writer of files, complete after `close()`; `abandon()` is called last."""

    def close(self) -> None:
        """Complete the files."""

    def abandon(self) -> None:
        """Close or remove files that are incomplete."""


def tokenize_files(
    files: Sequence[SourceFile],
    encoder: Encoder,
    add: Callable[[Documents], Documents],
    writer: Writer,
    *,
    num_workers: int | None = None,
    on_ray: bool = False,
    size: ChunkSize | None = None,
    read: Callable[[SourceFile, ChunkSize], Iterator[Chunk]] | None = None,
    is_full: Callable[[int], bool] = lambda source: False,
    description: str = "tokenize",
) -> None:
    """Tokenize files, and pass their documents in order to `add`.

    It writes them and returns what it wrote.

    num_workers: the processes; 1: this one; None: chosen by the files' bytes. on_ray: tasks of a Ray cluster do the
    work. size: of chunks. read: the reader of one file; None: the encoder's. is_full: tells whether more of a source,
    or an error in it, is of no interest.

    Raises `UsageError`, and `DataError` for the first record or file that ends the run.
    """
    num_bytes = total_bytes(files)
    try:
        with Progress(num_bytes, description) as progress:
            # The server of processes imports for seconds, while this process loads the tokenizer.
            preload = [tokenizer_module(), type(encoder).__module__]
            if not on_ray and (num_workers := num_workers or _useful_workers(encoder, num_bytes)) > 1:
                start_server(preload)
            encoder.open()  # here too, so that a tokenizer that does not suit is refused before a worker starts
            size = size or (THREADS_CHUNK if num_workers == 1 and encoder.given_tokenizer is not None else CHUNK)
            chunks = read_files(files, size, read or encoder.read, is_full)
            how: Any = {"name": "tokenize", "preload": preload}
            with closing(_results(encoder, type(encoder).encode, chunks, num_workers, on_ray, **how)) as results:
                for documents in results:
                    written = add(documents)
                    if documents.failure is not None and not is_full(documents.category_id):
                        raise DataError(documents.failure)
                    progress.add(written.num_bytes, written.counts.records, len(written.input_ids))
        writer.close()
    finally:
        writer.abandon()


def record_keys(
    files: Sequence[SourceFile],
    encoder: Encoder,
    *,
    num_workers: int | None,
    on_ray: bool,
    size: ChunkSize,
    read: Callable[[SourceFile, ChunkSize], Iterator[Chunk]],
) -> Iterator[int]:
    """Yield the keys of all records that can be read, for which the files are read once more.

    An unreadable file ends its source here, and is an error when it is tokenized. The arguments are as above.
    """
    num_bytes = total_bytes(files)
    workers = num_workers or (None if on_ray else _useful_workers(encoder, num_bytes))
    chunks = read_files(files, size, read)
    how: Any = {"name": "val_share", "preload": [tokenizer_module(), type(encoder).__module__]}
    found = _results(encoder, _keys_of, chunks, workers, on_ray, **how)
    with Progress(num_bytes, "val_share") as progress, closing(found) as results:
        for keys, read_bytes in results:
            yield from (key for key in keys if key != NO_KEY)
            progress.add(read_bytes, len(keys), 0)


def _keys_of(encoder: Encoder, chunk: Chunk) -> tuple[list[int], int]:
    return encoder.record_keys(chunk), chunk.num_bytes


def bound_of_lowest(numbers: Iterable[int], count: int) -> int:
    """Return the bound below which the `count` lowest different numbers lie; 0 without any."""
    heap: list[int] = []  # the lowest ones so far, negative, so that the highest of them comes first
    lowest: set[int] = set()
    for number in numbers:
        if number in lowest or (len(heap) == count and number > -heap[0]):
            continue
        lowest.add(number)
        if len(heap) < count:
            heapq.heappush(heap, -number)
        else:
            lowest.remove(-heapq.heapreplace(heap, -number))
    return 1 - heap[0] if heap else 0


def _useful_workers(encoder: Encoder, num_bytes: int | None) -> int:
    """Return the number of processes that tokenize this many bytes fastest."""
    if encoder.given_tokenizer is not None:  # in the process of a training, whose tokenizer may be unfit to be sent
        is_small = num_bytes is not None and num_bytes < THREADS_BYTES
        is_own_code = not type(encoder.tokenizer).__module__.startswith("transformers.")
        if is_small or is_own_code or multiprocessing.current_process().daemon:  # which may have no children
            return 1
    return available_cpus() if num_bytes is None else min(available_cpus(), 1 + num_bytes // WORKER_BYTES)


def _results(
    encoder: EncoderT,
    work: Callable[[EncoderT, Chunk], ResultT],
    chunks: Iterator[Chunk],
    num_workers: int | None,
    on_ray: bool,
    **how: Any,
) -> Generator[ResultT, None, None]:
    """Yield `work(encoder, chunk)` in order, done by processes or Ray tasks."""
    if not on_ray:
        key = "num_workers" if hasattr(encoder.options, "num_workers") else None  # a dataset has no such option
        yield from ordered_results(partial(_opened, encoder), work, chunks, num_workers or 1, key=key, **how)
        return
    make = partial(_same_encoder, encoder, encoder.fingerprint(), versions(), gethostname())
    with ray_cluster(num_workers or available_cpus()):
        yield from ray_results(make, work, chunks, num_workers, **how)


def _opened(encoder: EncoderT) -> EncoderT:
    encoder.open()
    return encoder


def _same_encoder(encoder: EncoderT, fingerprint: str, driver_versions: Mapping[str, str], driver: str) -> EncoderT:
    """Return a Ray worker's encoder; raise `DataError` if the driver's differs."""
    if lines := differences({driver: driver_versions, f"{gethostname()}, a worker": versions()}):
        raise DataError("; ".join(lines))
    if encoder.fingerprint() != fingerprint:
        model = encoder.options.model
        got = f"{model.tokenizer}, which is another on {gethostname()} than on {driver}"
        raise DataError(must(model.tokenizer_key, "be the same tokenizer and template on every node", got))
    return _opened(encoder)


def cached_tokens(root: Path, name_now: Callable[[], str], make: Callable[[Path], None], key: str) -> Path:
    """Return the fingerprint's folder below `root`, which `make` fills if missing.

    Raises ValueError, and keeps no folder, if the files that `key` names change meanwhile.
    """

    def of_same_files(folder: Path) -> None:
        make(folder)
        if name_now() != name:
            raise ValueError(f"the files of {key} must not change while they are tokenized; one did")

    return cached_folder(root, name := name_now(), of_same_files)


def file_facts(paths: Iterable[str]) -> list[list[Any]]:
    """Return [real path, size, modification time] of files, also in folders.

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
    """Return a digest of code, encoder, files, and `others` of JSON's types."""
    read = [[file.category_id, file.kind] for file in files]
    code = code_digest(type(encoder).__module__)
    return fingerprint([code, encoder.fingerprint(), read, file_facts(file.path for file in files), *others])


@cache
def code_digest(module: str) -> str:
    """Return a digest of this package's and another module's code, for caches."""
    files = [*sorted(Path(__file__).parent.rglob("*.py")), Path(str(sys.modules[module].__file__))]
    return fingerprint([[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files])
