"""The command `verl-ext tokenize`, which samples and tokenizes records into a dataset.

Every record draws a 128-bit number from `seed`, its source's name, its file's index within the source, and its own
index in the file. `sample` keeps the records of a source whose number is below fraction · 2^128, or the n lowest
numbers (a bottom-n sample: without replacement, every set of n records is equally likely). So the sample does not
depend on the number of workers or on the other sources, and a larger sample contains the smaller one.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import chain, count, islice
from pathlib import Path
from socket import gethostname
from typing import Any

from verl_ext.commands.command_line import SourceOptions, command
from verl_ext.commands.report import Report
from verl_ext.data.stream.megatron.masked_index import MaskedIndexes
from verl_ext.environment import differences, versions
from verl_ext.files import OutputFolder
from verl_ext.options import DataError, UsageError, option
from verl_ext.ray_cluster import ray_cluster
from verl_ext.text.arrow_folder import SHARD_BYTES, DatasetWriter
from verl_ext.text.chat.renderer import ChatOptions
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.read.readers import CHUNK, Chunk, ChunkSize, read_chunks
from verl_ext.text.read.sources import SourceFile, find_source_files, total_bytes
from verl_ext.text.records.records import read_columns
from verl_ext.text.records.token_records import COLUMNS, TokenRecordEncoder, has_tokens
from verl_ext.text.tokenizing import write_documents
from verl_ext.text.tokens.documents import Documents, previews_text
from verl_ext.text.tokens.tokenizer import tokenizer_module
from verl_ext.text.workers import available_cpus, ordered_results, ray_results

BITS = 128
RAY_CHUNK = ChunkSize(1024, 1 << 20)  # a task costs the driver a millisecond or two


@dataclass(frozen=True)
class TokenizeOptions(ChatOptions, SourceOptions):
    """Tokenize chats and texts once, with a loss mask and categories.

    The result is in memory-mapped files or Megatron's format. The fields of a record determine its shape
    (verl_ext/text/records/shapes.py lists the shapes). The name of a source is the category of its records. Records
    with input_ids, loss_mask and category_ids are copied.
    """

    backend: str = option(
        "local",
        "local: processes of this machine | ray: tasks of the Ray cluster at $RAY_ADDRESS, or of one started here",
        choices=("local", "ray"),
    )
    sample: Any = option(
        None, "part of each source, or {source: part}; a part is a fraction (1.0: all) or a number of records"
    )
    seed: int = option(42, "seed of the sample")
    format: str = option(
        "arrow",
        "arrow: a folder for data.train_dir | megatron: SOURCE.bin and .idx, SOURCE_mask.bin and .idx",
        choices=("arrow", "megatron"),
    )
    preview: int = option(2, "documents of each source to show at the end, with their targets marked", least=0)

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake visible before opening a source."""
        yield from self.source_problems(self.model)
        yield from super().problems()
        if self.format == "megatron":
            yield from self.file_name_problems()
            for name in self.sources:
                if f"{name}_mask" in self.sources:
                    yield f"sources.{name}_mask must have another name with format=megatron; got that of {name}'s mask"
            if self.category_field:
                got = f"got {self.category_field}; a source is a pair of indices"
                yield f"category_field must be null with format=megatron; {got}"
        parts = {"sample": self.sample}
        if isinstance(self.sample, dict):
            parts = {f"sample.{name}": part for name, part in self.sample.items()}
            for name in self.sample:
                if name not in self.sources:
                    yield f"sample.{name} must be one of sources ({', '.join(self.sources)}); got {name}"
        for key, part in parts.items():
            is_number = isinstance(part, int) and not isinstance(part, bool) and part >= 1
            if part is not None and not is_number and not (isinstance(part, float) and 0 < part <= 1):
                yield f"{key} must be a fraction above 0 and at most 1.0, or a number of records from 1; got {part}"


def tokenize_sources(options: TokenizeOptions) -> str:
    """Tokenize the sources; return the closing tables and previews."""
    return f"{summary(tokenize(options))}\n\nwritten to {options.output_dir}"


def summary(report: Report) -> str:
    """Return the closing tables and previews of a report, for a terminal."""
    from rich.console import Console  # here, so that a command with a mistake does not import it

    parts = [report.table(), previews_text(report.previews, Console())]
    return "\n\n".join(part.strip("\n") for part in parts if part)


def tokenize(options: TokenizeOptions, chunk_size: ChunkSize | None = None, shard_bytes: int = SHARD_BYTES) -> Report:
    """Tokenize the sources into a dataset at `output_dir`; return its report.

    Raises `UsageError` and `DataError` with one line.
    """
    files = find_source_files(options.patterns)
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        report = write_dataset(folder.path, files, options, chunk_size, shard_bytes)
        folder.publish()
    return report


def write_dataset(
    folder: Path,
    files: Sequence[SourceFile],
    options: TokenizeOptions,
    chunk_size: ChunkSize | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Report:
    """Write the files' dataset, categories and report into an empty folder.

    Returns its report. Raises `UsageError` and `DataError` with one line.
    """
    if chunk_size is None:
        chunk_size = RAY_CHUNK if options.backend == "ray" else CHUNK
    num_bytes, options = total_bytes(files), options.dated()
    report = Report(options, list(options.sources), options.preview)
    chunks = _sampled_chunks(files, options, report.read, chunk_size)
    encoder: Any = TokenRecordEncoder if has_tokens(files) else ChatEncoder
    # Megatron's pairs of indices have no place for a category of each token.
    if encoder is TokenRecordEncoder and options.format == "megatron":
        raise UsageError("format must be arrow for tokenized records, whose category_ids it stores; got megatron")
    make_encoder = partial(encoder, options, list(options.sources), options.preview)
    if options.backend == "ray":
        results = _on_ray(options, encoder, make_encoder, chunks)
    else:
        num_workers = options.num_workers or available_cpus()
        # A small input takes few workers, because each needs seconds to start.
        if num_bytes is not None:
            num_workers = min(num_workers, max(math.ceil(num_bytes / chunk_size.bytes), 1))
        preload = [tokenizer_module()]
        results = ordered_results(make_encoder, encoder.encode, chunks, num_workers, name="tokenize", preload=preload)
    writer: DatasetWriter | MaskedIndexes
    if options.format == "megatron":
        writer = MaskedIndexes({f"sources.{name}": folder / name for name in options.sources})
    else:
        writer = DatasetWriter(folder, shard_bytes)

    # The report numbers the categories, and the writer then stores these numbers.
    def add(documents: Documents) -> Documents:
        report.add(documents)
        writer.add(documents)
        return documents

    write_documents(results, add, writer, num_bytes)
    report.check(options.sources)
    report.write(folder)
    return report


def _on_ray(
    options: TokenizeOptions,
    encoder: type[ChatEncoder | TokenRecordEncoder],
    make: Callable[[], Any],
    chunks: Iterator[Chunk],
) -> Iterator[Documents]:
    """Yield the chunks' documents in order, encoded by Ray tasks."""
    make_same = partial(_same_encoder, make, make().fingerprint(), versions(), gethostname())
    with ray_cluster(options.num_workers or available_cpus()):
        yield from ray_results(
            make_same,
            encoder.encode,
            chunks,
            options.num_workers,
            name="tokenize",
            preload=[tokenizer_module()],
        )


def _same_encoder(make: Callable[[], Any], fingerprint: str, driver_versions: Mapping[str, str], driver: str) -> Any:
    """Return a Ray worker's encoder; raise `DataError` if the driver's differs."""
    if lines := differences({driver: driver_versions, f"{gethostname()}, a worker": versions()}):
        raise DataError("; ".join(lines))
    encoder = make()
    if encoder.fingerprint() != fingerprint:
        model = encoder.options.model
        got = f"got {model.tokenizer}, which is another on {gethostname()} than on {driver}"
        raise DataError(f"{model.tokenizer_key} must be the same tokenizer and template on every node; {got}")
    return encoder


def _sampled_chunks(
    files: Sequence[SourceFile], options: TokenizeOptions, read: Counter[str], size: ChunkSize
) -> Iterator[Chunk]:
    """Yield chunks of the drawn records; count all by source in `read`."""
    columns = {*read_columns(options.columns, options.category_field), *COLUMNS}
    for number, name in enumerate(options.sources, start=1):
        own = [file for file in files if file.category_id == number]
        limit = _sample_limit(options, name, own)
        for place, file in enumerate(own):
            numbers = _numbers(options.seed, name, place)
            for chunk in read_chunks(file, size, columns):
                read[name] += len(chunk.records)
                if limit is not None:
                    chunk = replace(chunk, records=[record for record in chunk.records if next(numbers) < limit])
                yield chunk


def _sample_limit(options: TokenizeOptions, name: str, files: Sequence[SourceFile]) -> int | None:
    """Return the bound of a drawn record's number; None draws all.

    If `sample` is a number of records, this reads the files to count their records.
    """
    part = options.sample.get(name) if isinstance(options.sample, Mapping) else options.sample
    if part is None:
        return None
    if isinstance(part, float):
        return round(part * (1 << BITS))
    in_files = (sum(len(chunk.records) for chunk in read_chunks(file, columns=())) for file in files)
    drawn = (islice(_numbers(options.seed, name, place), records) for place, records in enumerate(in_files))
    lowest = heapq.nsmallest(part, chain.from_iterable(drawn))
    return lowest[-1] + 1 if lowest else 0


def _numbers(seed: int, name: str, place: int) -> Iterator[int]:
    """Yield the numbers of a file's records in order."""
    start = blake2b(f"{seed}\0{name}\0{place}".encode(errors="surrogateescape"), digest_size=BITS // 8)
    for record in count():
        drawn = start.copy()
        drawn.update(record.to_bytes(8, "little"))
        yield int.from_bytes(drawn.digest(), "little")


main = command(
    "tokenize",
    TokenizeOptions,
    tokenize_sources,
    example="'sources={gsm8k:train.jsonl,code:code.json}' output_dir=DIR model.path=MODEL_OR_TOKENIZER",
)
