"""Tokenised BABILong files, kept: tokenised by one process, once, and opened by all others.

    CACHE/<fingerprint>/          a tokenised dataset (input_ids, loss_mask, category_ids, length; categories.json)
        samples.arrow             what is known of each sample besides
        babilong.json             what it was made of

The folder is one of `cached_folder`.
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
from verl_ext.data.cached_folder import cached_folder, default_root
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
    made_of = fingerprint(files, tokenizer, options)

    def make(folder: Path) -> None:
        _tokenise(folder, files, SampleTokenizer(tokenizer, options, key))

    folder = cached_folder(default_root("verl_ext_babilong", options.cache_dir), made_of, make)
    if fingerprint(files, tokenizer, options) != made_of:
        raise ValueError(f"{key} must not change while it is tokenised; one of its {len(files)} files did")
    return folder


def _tokenise(folder: Path, files: Sequence[BABILongFile], tokenizer: SampleTokenizer) -> None:
    """Write the dataset into `folder`, and say what was cut."""
    # Here, because the tokenise command's modules import config and transformers' template tools.
    from verl_ext.tokenize.dataset_writer import DatasetWriter

    numbers = category_numbers(file.category for file in files)
    facts = SampleFactsWriter()
    writer = DatasetWriter(folder)
    try:
        _write_samples(files, numbers, tokenizer, writer, facts)
        writer.close()
    finally:
        writer.abandon()
    facts.write(folder)
    names = {str(number): name for name, number in numbers.items()}
    (folder / CATEGORIES).write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
    made_of = {"files": [file.path for file in files], "options": vars(tokenizer.options)}
    (folder / FACTS).write_text(json.dumps(made_of, indent=2, default=str), encoding="utf-8")
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
