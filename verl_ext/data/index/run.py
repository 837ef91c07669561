"""The index run: find the files, tokenise their records, write one index a source, publish."""

from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import groupby
from pathlib import Path

from verl_ext.commands.output_folder import OutputFolder
from verl_ext.commands.tokenizer import ModelConfig, load_tokenizer, tokenizer_module
from verl_ext.commands.worker_pool import available_cpus, ordered_results
from verl_ext.data.index.config import IndexConfig
from verl_ext.data.index.parcels import read_parcels
from verl_ext.data.index.report import Report
from verl_ext.data.index.text_documents import Documents, TextOptions, TextTokenizer
from verl_ext.data.index.text_index import TextIndex, Written, no_document_error, show_progress
from verl_ext.tokenize.source_files import SourceFile, find_source_files, total_bytes
from verl_ext.tokenize.tally import Tally

WORKER_BYTES = 8 << 20  # of text, that make another process worth its start of a few seconds


def build_index(config: IndexConfig) -> Report:
    """Write an index for each of `config.sources` into `config.output_dir`; return what was counted.

    Raises `UsageError` and `DataError`, each one line, and leaves `output_dir` as it was then.
    """
    files = find_source_files(config.source_patterns())
    # Also made here: a tokenizer that lacks a token is told before any process is started.
    tokenizer = load_text_tokenizer(config.model, _options(config))
    report = Report(config, tokenizer)
    with OutputFolder(config.output_dir, config.overwrite) as folder:
        _write_indices(config, files, tokenizer, folder.path, report)
        report.write(folder.path)
        folder.publish()
    return report


def load_text_tokenizer(model: ModelConfig, options: TextOptions) -> TextTokenizer:
    """The state of a worker."""
    return TextTokenizer(load_tokenizer(model), options)


def _options(config: IndexConfig) -> TextOptions:
    return TextOptions(
        config.text_key, config.add_eos, config.add_bos, config.on_bad_record, config.special_tokens_in_text
    )


def _write_indices(
    config: IndexConfig, files: list[SourceFile], tokenizer: TextTokenizer, folder: Path, report: Report
) -> None:
    with closing(_written(config, files, tokenizer, folder, report)) as work:
        show_progress(work, total_bytes(files))


def _written(
    config: IndexConfig, files: list[SourceFile], tokenizer: TextTokenizer, folder: Path, report: Report
) -> Generator[Written, None, None]:
    """What is written of each parcel, and a source's bytes that are left unread, as it is done."""
    names = list(config.sources)
    full: set[int] = set()
    for source, results in groupby(_documents(config, files, tokenizer, full), key=lambda result: result.source):
        name = names[source - 1]
        with TextIndex(folder / name, tokenizer.dtype, config.max_corpus_tokens, f"sources.{name}") as index:
            unread = sum(file.num_bytes or 0 for file in files if file.category_id == source)
            report.tallies[name] = index.tally
            for result in results:
                written = index.add(result)
                if index.is_full:
                    full.add(source)
                unread -= written.num_bytes
                yield written
            yield Written(max(unread, 0), 0, 0)
            _refuse_nothing(config, name, index.tally)
            index.close()
    for name in names:
        _refuse_nothing(config, name, report.tallies[name])


def _documents(
    config: IndexConfig, files: list[SourceFile], tokenizer: TextTokenizer, full: set[int]
) -> Iterator[Documents]:
    """Every parcel's documents, in order, until its source is in `full`."""
    parcels = read_parcels(files, full.__contains__)
    num_workers = config.num_workers or _useful_workers(files)
    if num_workers == 1:
        return map(tokenizer.tokenise, parcels)
    make = partial(load_text_tokenizer, config.model, tokenizer.options)
    preload = [tokenizer_module()]
    return ordered_results(make, TextTokenizer.tokenise, parcels, num_workers, name="tokenise", preload=preload)


def _useful_workers(files: list[SourceFile]) -> int:
    num_bytes = total_bytes(files)
    return available_cpus() if num_bytes is None else min(available_cpus(), 1 + num_bytes // WORKER_BYTES)


def _refuse_nothing(config: IndexConfig, name: str, tally: Tally) -> None:
    if not tally.documents:
        raise no_document_error(f"sources.{name}", tally)
