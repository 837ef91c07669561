"""The tokenise run: find the files, tokenise their chunks, write, publish."""

import math
from collections.abc import Iterator
from functools import partial

from verl_ext.commands.errors import DataError
from verl_ext.commands.output_folder import OutputFolder
from verl_ext.commands.progress import Progress
from verl_ext.commands.tokenizer import TOKENIZER_MODULE
from verl_ext.commands.worker_pool import available_cpus, ordered_results
from verl_ext.tokenize.chunks import CHUNK_BYTES, Chunk, read_chunks
from verl_ext.tokenize.config import TokenizeConfig
from verl_ext.tokenize.dataset_writer import DatasetWriter
from verl_ext.tokenize.report import Report
from verl_ext.tokenize.source_files import SourceFile, find_source_files
from verl_ext.tokenize.worker import ChunkTokenizer


def tokenize(config: TokenizeConfig) -> Report:
    """Tokenise `config.sources` into a dataset at `config.output_dir`; return what was counted.

    Raises `UsageError` and `DataError`, each one line, and leaves nothing at `output_dir` then.
    """
    sources = find_source_files(config.source_patterns())
    report = Report(config)
    with OutputFolder(config.output_dir, config.overwrite) as folder:
        writer = DatasetWriter(folder.path)
        try:
            _write_documents(config, sources, writer, report)
            _refuse_nothing(report)
            report.write(folder.path)
            writer.close()
        finally:
            writer.abandon()
        folder.publish()
    return report


def _write_documents(config: TokenizeConfig, sources: list[SourceFile], writer: DatasetWriter, report: Report) -> None:
    total_bytes = sum(source.num_bytes for source in sources)
    num_workers = min(config.num_workers or available_cpus(), max(math.ceil(total_bytes / CHUNK_BYTES), 1))
    results = ordered_results(
        partial(ChunkTokenizer, config),
        ChunkTokenizer.tokenise,
        _chunks(sources),
        num_workers,
        name="tokenise",
        preload=[TOKENIZER_MODULE],
    )
    with Progress(total_bytes) as progress:
        for result in results:
            writer.add(result)
            report.tally(result.category_id).add(result.tally)
            progress.add(result)


def _chunks(sources: list[SourceFile]) -> Iterator[Chunk]:
    for source in sources:
        yield from read_chunks(source)


def _refuse_nothing(report: Report) -> None:
    for name, tally in report.tallies.items():
        if not tally.records:
            raise DataError(f"sources.{name} must hold at least one record; got none in {report.config.sources[name]}")
    if not report.total.documents:
        raise DataError(f"no record could be used, so that nothing was written:\n{report.table()}")
