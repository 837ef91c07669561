"""The tokenise run: find the files, tokenise their chunks, write, publish."""

import math
from functools import partial

from verl_ext.commands.errors import DataError
from verl_ext.commands.output_folder import OutputFolder
from verl_ext.commands.progress import Progress
from verl_ext.commands.tokenizer import tokenizer_module
from verl_ext.commands.worker_pool import available_cpus, ordered_results
from verl_ext.tokenize.chunks import CHUNK_BYTES
from verl_ext.tokenize.config import TokenizeConfig
from verl_ext.tokenize.dataset_writer import DatasetWriter
from verl_ext.tokenize.report import Report
from verl_ext.tokenize.sample import SampledSources
from verl_ext.tokenize.source_files import find_source_files, total_bytes
from verl_ext.tokenize.worker import ChunkTokenizer


def tokenize(config: TokenizeConfig) -> Report:
    """Tokenise `config.sources` into a dataset at `config.output_dir`; return what was counted.

    Raises `UsageError` and `DataError`, each one line, and leaves nothing at `output_dir` then.
    """
    sources = find_source_files(config.source_patterns())
    report = Report(config)
    chunks = SampledSources(sources, list(config.sources), config.sample, config.seed)
    with OutputFolder(config.output_dir, config.overwrite) as folder:
        writer = DatasetWriter(folder.path)
        try:
            _write_documents(config, chunks, writer, report)
            _refuse_nothing(report)
            report.write(folder.path)
            writer.close()
        finally:
            writer.abandon()
        folder.publish()
    return report


def _write_documents(config: TokenizeConfig, chunks: SampledSources, writer: DatasetWriter, report: Report) -> None:
    num_bytes = total_bytes(chunks.files)
    num_workers = config.num_workers or available_cpus()
    if num_bytes is not None:
        num_workers = min(num_workers, max(math.ceil(num_bytes / CHUNK_BYTES), 1))
    results = ordered_results(
        partial(ChunkTokenizer, config),
        ChunkTokenizer.tokenise,
        chunks,
        num_workers,
        name="tokenise",
        preload=[tokenizer_module()],
    )
    with Progress(num_bytes) as progress:
        for result in results:
            report.add(result)
            writer.add(result)
            progress.add(result)
    report.read.update(chunks.read)


def _refuse_nothing(report: Report) -> None:
    for name, tally in report.tallies.items():
        if not tally.records and report.read[name]:
            raise DataError(
                f"sample must leave a record of sources.{name}, which has {report.read[name]}; it left none"
            )
        if not tally.records:
            raise DataError(f"sources.{name} must hold at least one record; got none in {report.config.sources[name]}")
    if not report.total.documents:
        raise DataError(f"no record could be used, so that nothing was written:\n{report.table()}")
