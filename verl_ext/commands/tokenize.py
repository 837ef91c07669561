"""The command `verl-ext tokenize`, which samples and tokenizes records into a dataset.

Every record draws a 128-bit number from `seed`, its source's name, its file's index within the source, and its own
index in the file. `sample` keeps the records of a source whose number is below fraction · 2^128, or the n lowest
numbers (a bottom-n sample: without replacement, every set of n records is equally likely). So the sample does not
depend on the number of workers or on the other sources, and a larger sample contains the smaller one.

With `val_share`, two folders are written, `output_dir`/train and `output_dir`/val (verl_ext/text/held_out.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import blake2b
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, ClassVar

from verl_ext.commands.command_line import SourceOptions, command
from verl_ext.commands.preview import Decode, previews_text
from verl_ext.commands.report import Report
from verl_ext.data.stream.megatron.masked_index import MaskedIndexes
from verl_ext.files import CATEGORIES, REPORT, OutputFolder, write_json
from verl_ext.options import DataError, UsageError, must, option
from verl_ext.packing import OVER_LENGTH_POLICIES
from verl_ext.text.arrow_folder import SHARD_BYTES, DatasetWriter
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.encoder import Encoder
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.encoder_tokens import TokenRecordEncoder, has_tokens
from verl_ext.text.held_out import KEYS, RecordChoice
from verl_ext.text.read.readers import CHUNK, Chunk, ChunkSize, read_chunks
from verl_ext.text.read.sources import SourceFile, files_left_out, find_source_files
from verl_ext.text.tokenizing import bound_of_lowest, record_keys, tokenize_files
from verl_ext.text.tokens.documents import Documents, numbered
from verl_ext.text.tokens.new_tokens import tokens_of

BITS = 128
PARTS = ("train", "val")  # the folders of a tokenization with val_share
_CUTS = "tokenizing cuts no document, a run does, by its data.max_tokens and data.over_length"
RAY_CHUNK = ChunkSize(1024, 1 << 20)  # a task costs the driver a millisecond or two


@dataclass(frozen=True)
class TokenizeOptions(ChatOptions, SourceOptions):
    """Tokenize chats and texts once, with a loss mask and categories.

    The result is in memory-mapped files or Megatron's format. The fields of a record determine its shape
    (verl_ext/text/records/shapes.py lists the shapes). The name of a source is the category of its records. Records
    with input_ids, loss_mask and category_ids are copied.
    """

    marker: ClassVar[str] = CATEGORIES  # an index has a report.json, too
    gone: ClassVar[Mapping[str, str]] = {
        **ChatOptions.gone,
        "max_tokens": f"{_CUTS}, and max_document_tokens with format=megatron",
    }

    backend: str = option(
        "local",
        "local: processes of this machine | ray: tasks of the Ray cluster at $RAY_ADDRESS, or of one started here",
        choices=("local", "ray"),
    )
    sample: Any = option(
        None, "part of each source, or {source: part}; a part is a fraction (1.0: all) or a number of records"
    )
    seed: int = option(42, "seed of the sample")
    val_share: Any = option(
        None,
        "validation data: a share of the records, above 0 and below 1, or a number of them, chosen by a hash of each "
        "one's words; output_dir gets the folders train and val; null: none",
    )
    deduplicate: bool = option(
        False, "true: a record is left out, and counted, if an earlier one of any source has the same tokens"
    )
    format: str = option(
        "arrow",
        "arrow: a folder for data.train_dir | megatron: SOURCE.bin and .idx, SOURCE_mask.bin and .idx",
        choices=("arrow", "megatron"),
    )
    max_document_tokens: int | None = option(
        None, "format=megatron: maximum number of tokens of a document; null: any length", least=2
    )
    over_length: str = option("error", "format=megatron: treatment of longer documents", choices=OVER_LENGTH_POLICIES)
    preview: int = option(2, "documents of each source to show at the end, with their targets marked", least=0)

    def problems(self) -> Iterable[str | None]:
        """Yield a line for each mistake visible before opening a source."""
        yield from self.source_problems(self.model)
        yield from super().problems()
        if self.format == "megatron":
            yield from self.file_name_problems()
            for name in self.sources:
                if f"{name}_mask" in self.sources:
                    needed = "have another name with format=megatron"
                    yield must(f"sources.{name}_mask", needed, f"that of {name}'s mask")
            if self.category_field:
                got = f"{self.category_field}; a source is a pair of indices"
                yield must("category_field", "be null with format=megatron", got)
        else:
            for name in self.changed().keys() & {"max_document_tokens", "over_length"}:
                yield must(name, f"be left out with format=arrow: {_CUTS}", getattr(self, name))
        if isinstance(self.system, Mapping) and not self.category_field:
            for name in (name for name in self.system if name not in self.sources):
                yield must(f"system.{name}", f"be one of sources ({', '.join(self.sources)})", name)
        # Shares and numbers of records.
        share = self.val_share
        is_number = isinstance(share, int) and not isinstance(share, bool) and share >= 1
        if share is not None and not is_number and not (isinstance(share, float) and 0 < share < 1):
            yield must("val_share", "be a share above 0 and below 1, or a whole number of records from 1", share)
        parts = {"sample": self.sample}
        if isinstance(self.sample, dict):
            parts = {f"sample.{name}": part for name, part in self.sample.items()}
            for name in self.sample:
                if name not in self.sources:
                    yield must(f"sample.{name}", f"be one of sources ({', '.join(self.sources)})", name)
        for key, part in parts.items():
            is_number = isinstance(part, int) and not isinstance(part, bool) and part >= 1
            if part is not None and not is_number and not (isinstance(part, float) and 0 < part <= 1):
                yield must(key, "be a fraction above 0 and at most 1.0, or a number of records from 1", part)


def tokenize_sources(options: TokenizeOptions) -> str:
    """Tokenize the sources; return the closing tables and previews."""
    written = [options.output_dir]
    if options.val_share is not None:
        written = [f"{options.output_dir}/{part}" for part in PARTS]
    return f"{summary(tokenize(options))}\n\nwritten to {' and '.join(written)}"


def summary(report: Report) -> str:
    """Return the closing tables and previews of a report, for a terminal."""
    from rich.console import Console  # here, so that a command with a mistake does not import it

    parts = [report.table(), previews_text(report.previews, Console())]
    if report.held_out is not None:
        parts.insert(1, f"held out for validation:\n{report.held_out.short_table()}")
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

    With `val_share`, the folder gets two of them, PARTS. Returns the report, for training with that of validation.
    Raises `UsageError` and `DataError` with one line.
    """
    options, sources = options.dated(), list(options.sources)
    encoder: Encoder = ChatEncoder(options, sources)
    # Records name their categories, or else sources do; the numbers of tokenized records have no names.
    categories = {} if options.category_field else {name: number for number, name in enumerate(sources, start=1)}
    if has_tokens(files):
        encoder, categories = TokenRecordEncoder(options), {}
        # Megatron's pairs of indices have no place for a category of each token.
        if options.format == "megatron":
            raise UsageError(must("format", "be arrow for tokenized records, whose category_ids it stores", "megatron"))
    on_ray = options.backend == "ray"
    how: Any = {"num_workers": options.num_workers, "on_ray": on_ray}
    how["size"] = chunk_size or (RAY_CHUNK if on_ray else CHUNK)

    limits = cache(partial(_sample_limit, options, files))

    # The records are divided here and not by the workers, which know of no others.
    choice = None
    if options.val_share is not None or options.deduplicate:
        encoder.by_record = True
        share = options.val_share or 0.0
        if isinstance(share, float):
            first_not_held_out = round(share * KEYS)
        else:  # a number of records needs the keys of all
            keys = record_keys(files, encoder, read=_sampled(options, limits, encoder), **how)
            first_not_held_out = bound_of_lowest(keys, share)
        choice = RecordChoice(first_not_held_out, options.deduplicate)
    folders = [folder] if options.val_share is None else [folder / part for part in PARTS]
    parts = _Parts([_Part(each, options, encoder.decode, shard_bytes) for each in folders])
    report = parts.parts[0].report
    for number, name in enumerate(sources, start=1):
        report.files_left_out[name] = files_left_out(file for file in files if file.category_id == number)

    def add(documents: Documents) -> Documents:
        documents = numbered(documents, categories)
        return parts.add([documents] if choice is None else choice.split(documents))

    tokenize_files(files, encoder, add, parts, read=_sampled(options, limits, encoder, report), **how)
    if len(folders) > 1:
        report.held_out = parts.parts[1].report
        report.held_out.read = report.read
    report.check(options.sources)
    if report.held_out is not None:
        train, held_out = report.total, report.held_out.total
        if not (train.documents and held_out.documents):
            what = "leave a document for training" if held_out.documents else "hold out a document"
            got = f"which holds out {held_out.records:,} of {train.records + held_out.records:,} records"
            raise DataError(must("val_share", what, f"{options.val_share}, {got}"))
        write_json(folder / REPORT, report.division())
        write_json(folder / "dataset_dict.json", {"splits": list(PARTS)})  # what `datasets.load_from_disk` reads
    for part in parts.parts:
        part.report.new_tokens = tokens_of(encoder.tokenizer, options.model)
        write_json(part.folder / REPORT, part.report.as_dict())
        write_json(part.folder / CATEGORIES, {str(number): name for name, number in categories.items()})
    return report


class _Part:
    """A folder of documents, and its report."""

    def __init__(self, folder: Path, options: TokenizeOptions, decode: Decode, shard_bytes: int) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.report = folder, Report(options, list(options.sources), options.preview, decode)
        self.writer: DatasetWriter | MaskedIndexes = DatasetWriter(folder, shard_bytes, first_blocks=True)
        if options.format == "megatron":
            prefixes = {f"sources.{name}": folder / name for name in options.sources}
            self.writer = MaskedIndexes(prefixes, options.max_document_tokens, options.over_length)

    def add(self, documents: Documents) -> Documents:
        """Write and count documents; return what was written."""
        if isinstance(self.writer, MaskedIndexes):
            documents = self.writer.fitting(documents)
        self.writer.add(documents)
        self.report.add(documents)
        return documents


class _Parts:
    """The folders that are written together: one, or those of PARTS."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.parts = parts

    def add(self, divided: Sequence[Documents]) -> Documents:
        """Write the documents of each part; return the first one's."""
        written = [part.add(documents) for part, documents in zip(self.parts, divided, strict=False)]
        return written[0]

    def close(self) -> None:
        """Complete all files."""
        for part in self.parts:
            part.writer.close()

    def abandon(self) -> None:
        """Close or remove files that are incomplete."""
        for part in self.parts:
            part.writer.abandon()


def _sampled(
    options: TokenizeOptions, limits: Callable[[int], int | None], encoder: Encoder, report: Report | None = None
) -> Callable[[SourceFile, ChunkSize], Iterator[Chunk]]:
    """Return a reader of drawn records, which counts all, and files without any, by source in a report.

    limits: the bound of the drawn numbers in each source.
    """
    sources, places = list(options.sources), Counter[str]()

    def read(file: SourceFile, size: ChunkSize) -> Iterator[Chunk]:
        name, limit = sources[file.category_id - 1], limits(file.category_id)
        numbers = _numbers(options.seed, name, places[name])
        places[name] += 1
        records = 0
        for chunk in encoder.read(file, size):
            records += len(chunk.records)
            if report is not None:
                report.read[name] += len(chunk.records)
            if limit is not None:
                chunk = replace(chunk, records=[record for record in chunk.records if next(numbers) < limit])
            yield chunk
        if report is not None and not records:
            report.empty_files[name] += 1

    return read


def _sample_limit(options: TokenizeOptions, files: Sequence[SourceFile], source: int) -> int | None:
    """Return the bound of drawn numbers in a source; None: all.

    If `sample` is a number of records, this reads the files to count their records.
    """
    name = list(options.sources)[source - 1]
    part = options.sample.get(name) if isinstance(options.sample, Mapping) else options.sample
    if part is None:
        return None
    if isinstance(part, float):
        return round(part * (1 << BITS))
    own = (file for file in files if file.category_id == source)
    in_files = (sum(len(chunk.records) for chunk in read_chunks(file, columns=())) for file in own)
    drawn = (islice(_numbers(options.seed, name, place), records) for place, records in enumerate(in_files))
    return bound_of_lowest(chain.from_iterable(drawn), part)


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
