"""Tokenised BABILong files, kept: tokenised by one process, once, and opened by all others.

    CACHE/<fingerprint>/          a tokenised dataset (input_ids, loss_mask, category_ids, length; categories.json)
        samples.arrow             what is known of each sample besides
        babilong.json             what it was made of, and the sizes of its files
    CACHE/<fingerprint>.lock      held by the process that tokenises
    CACHE/<fingerprint>.failed    why the last attempt ended, for those that waited for it

The folder appears whole, by one rename. One whose files are not as babilong.json says is made anew.
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ext.data.babilong_files import BABILongFile, Record, read_records
from verl_ext.data.babilong_fingerprint import fingerprint
from verl_ext.data.babilong_options import BABILongOptions
from verl_ext.data.babilong_sample import SampleTokenizer
from verl_ext.data.babilong_samples import SampleFactsWriter, category_numbers
from verl_ext.data.category_numbers import FILE_NAME as CATEGORIES

if TYPE_CHECKING:
    from verl_ext.tokenize.worker import ChunkResult

FACTS = "babilong.json"
BATCH_CHARACTERS = 1 << 22  # tokenised together: about 1M tokens, enough work for the tokenizer's threads

_logger = logging.getLogger(__name__)


def tokenised_folder(
    files: Sequence[BABILongFile], tokenizer: Any, options: BABILongOptions, key: str = "data.train_dir"
) -> Path:
    """The folder of these files' tokens, tokenised now unless it is there. Processes may call it at the same time.

    Raises:
        ValueError: files that cannot be used (`key` is named), a cache that cannot be written.
    """
    root = _cache_root(options)
    made_of = fingerprint(files, tokenizer, options)
    folder = root / made_of
    if _is_complete(folder):
        return folder
    from filelock import FileLock

    asked = time.time_ns()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{made_of}.lock"):
            if not _is_complete(folder):
                _tokenise_once(folder, files, SampleTokenizer(tokenizer, options, key), asked)
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise ValueError(f"data.cache_dir must be a folder that can be written; got {root}: {reason}") from error
    if fingerprint(files, tokenizer, options) != made_of:
        raise ValueError(f"{key} must not change while it is tokenised; one of its {len(files)} files did")
    return folder


def _cache_root(options: BABILongOptions) -> Path:
    if options.cache_dir is not None:
        return Path(os.path.abspath(os.path.expanduser(options.cache_dir)))
    from datasets.config import HF_DATASETS_CACHE  # here, because importing it takes a second

    return Path(HF_DATASETS_CACHE) / "verl_ext_babilong"


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / FACTS).read_text(encoding="utf-8"))["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _tokenise_once(folder: Path, files: Sequence[BABILongFile], tokenizer: SampleTokenizer, asked: int) -> None:
    """Tokenise, under the lock. A process that waited while another one failed raises what that one did: the same
    input fails in the same way, and ranks would otherwise fail one after another."""
    note = folder.with_name(f"{folder.name}.failed")
    if note.exists() and note.stat().st_mtime_ns >= asked:
        raise ValueError(note.read_text(encoding="utf-8"))
    try:
        _tokenise(folder, files, tokenizer)
    except ValueError as error:
        note.write_text(str(error), encoding="utf-8")
        raise
    note.unlink(missing_ok=True)


def _tokenise(folder: Path, files: Sequence[BABILongFile], tokenizer: SampleTokenizer) -> None:
    # Here, because the tokenise command's modules import config and transformers' template tools.
    from verl_ext.commands.output_folder import OutputFolder
    from verl_ext.tokenize.dataset_writer import DatasetWriter

    numbers = category_numbers(file.category for file in files)
    facts = SampleFactsWriter()
    with OutputFolder(str(folder), overwrite=True) as staging:
        writer = DatasetWriter(staging.path)
        try:
            _write_samples(files, numbers, tokenizer, writer, facts)
            writer.close()
        finally:
            writer.abandon()
        facts.write(staging.path)
        names = {str(number): name for name, number in numbers.items()}
        (staging.path / CATEGORIES).write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
        sizes = {entry.name: entry.stat().st_size for entry in staging.path.iterdir()}
        made_of = {"files": [file.path for file in files], "options": vars(tokenizer.options), "sizes": sizes}
        (staging.path / FACTS).write_text(json.dumps(made_of, indent=2, default=str), encoding="utf-8")
        staging.publish()
    if facts.cut:
        _logger.warning(
            "%d of %d samples have prompts over %d tokens: cut by %d tokens in all (data.truncate=%s)",
            facts.cut,
            len(facts.columns["targets"]),
            tokenizer.options.prompt_tokens,
            facts.cut_tokens,
            tokenizer.options.truncate,
        )


def _write_samples(
    files: Sequence[BABILongFile],
    numbers: dict[str, int],
    tokenizer: SampleTokenizer,
    writer: Any,
    facts: SampleFactsWriter,
) -> None:
    from verl_ext.commands.progress import Progress

    begun = time.monotonic()
    results = _results(files, numbers, tokenizer, facts)
    first = next(results)  # before the bar: files with a mistake at their start show none
    with Progress(sum(os.path.getsize(file.path) for file in files)) as progress:
        progress.started = begun
        for result in chain([first], results):
            writer.add(result)
            progress.add(result)


def _results(
    files: Sequence[BABILongFile], numbers: dict[str, int], tokenizer: SampleTokenizer, facts: SampleFactsWriter
) -> Iterator["ChunkResult"]:
    """A result for every batch of records, whose facts are added; at least one."""
    from verl_ext.tokenize.tally import Tally
    from verl_ext.tokenize.worker import ChunkResult

    for file in files:
        number = numbers[file.category]
        for records, num_bytes in _batches(file, tokenizer.key):
            samples = tokenizer.tokenise(records)
            for record, sample in zip(records, samples, strict=True):
                facts.add(number, record, sample)
            lengths = np.array([len(sample.input_ids) for sample in samples], np.int32)
            yield ChunkResult(
                category_id=number,
                num_bytes=num_bytes,
                input_ids=np.concatenate([sample.input_ids for sample in samples]),
                loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
                lengths=lengths,
                weights=None,
                tally=Tally(records=len(records), tokens=int(lengths.sum())),
            )


def _batches(file: BABILongFile, key: str) -> Iterator[tuple[list[Record], int]]:
    """(records of about BATCH_CHARACTERS together, at least one; bytes of the file that they stand for)."""
    records: list[Record] = []
    characters = size = 0
    for record, num_bytes in read_records(file, key):
        records.append(record)
        characters += len(record.input)
        size += num_bytes
        if characters >= BATCH_CHARACTERS:
            yield records, size
            records, characters, size = [], 0, 0
    if records:
        yield records, size
