"""Pretraining text, tokenised by one process, once, and opened by all others.

    CACHE/<fingerprint>/          a tokenised dataset (input_ids, loss_mask, category_ids, length; categories.json)
        documents.arrow           what is known of each document besides
        pretrain.json             what it was made of, and the records that were left out

A document is BOS, the first max_length - 2 tokens of its text, EOS: every token but the first is a target. A tokenizer
that has no BOS gives documents that begin with their text. The folder is one of `cached_folder`.
"""

import functools
import json
import logging
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ext.data.cached_folder import cached_folder, default_root
from verl_ext.data.category_numbers import FILE_NAME as CATEGORIES
from verl_ext.data.fingerprint import digest, file_facts, tokenizer_facts
from verl_ext.data.pretrain_documents import FactsWriter, cut_documents
from verl_ext.data.pretrain_options import PreTrainOptions
from verl_ext.data.pretrain_summary import Summary

if TYPE_CHECKING:
    from verl_ext.tokenize.source_files import SourceFile
    from verl_ext.tokenize.tally import Tally
    from verl_ext.tokenize.worker import ChunkResult

FORMAT = 1  # to be raised when the same input is written as something else
BATCH_BYTES = 4 << 20  # tokenised together: enough work for the tokenizer's threads

_logger = logging.getLogger(__name__)


def tokenised_folder(
    files: Sequence["SourceFile"],
    names: dict[int, str],
    tokenizer: Any,
    options: PreTrainOptions,
    key: str = "data.train_dir",
) -> Path:
    """The folder of these files' documents, tokenised now unless it is there; names: category number -> name.

    Raises:
        ValueError: a tokenizer without EOS, files that cannot be used (`key` is named), a cache that cannot be written.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer must have an eos_token, which every document of data=pretrain ends with")
    made_of = _fingerprint(files, names, tokenizer, options)

    def make(folder: Path) -> None:
        _Maker(files, names, tokenizer, options, key).write(folder)

    folder = cached_folder(default_root("verl_ext_pretrain", options.cache_dir), made_of, make)
    if _fingerprint(files, names, tokenizer, options) != made_of:
        raise ValueError(f"{key} must not change while it is tokenised; one of its {len(files)} files did")
    _tell(folder, key)
    return folder


@functools.cache
def _tell(folder: Path, key: str) -> None:
    """The folder's notices, once in a process: a run says them whether it tokenised the files itself or not."""
    for line in Summary.read(folder).notices(key):
        _logger.warning("%s", line)


def _fingerprint(files: Sequence["SourceFile"], names: dict[int, str], tokenizer: Any, options: PreTrainOptions) -> str:
    """Of everything that the tokens, categories and counts follow from; rows and packs are made of the same tokens."""
    return digest(
        [
            FORMAT,
            file_facts(file.path for file in files),
            [[file.kind, names[file.category_id]] for file in files],
            tokenizer_facts(tokenizer),
            [tokenizer.bos_token_id, tokenizer.eos_token_id],
            [options.max_length, options.text_key, options.special_tokens_in_text, options.on_bad_record],
        ]
    )


class _Maker:
    """Tokenises files into a folder, and counts what is not as the files have it."""

    def __init__(
        self,
        files: Sequence["SourceFile"],
        names: dict[int, str],
        tokenizer: Any,
        options: PreTrainOptions,
        key: str,
    ) -> None:
        # Here, because the commands' modules import config and transformers' template tools.
        from verl_ext.data.index.text_documents import TextOptions, TextTokenizer
        from verl_ext.tokenize.tally import Tally

        self.files, self.names, self.options, self.key = files, names, options, key
        self.has_bos = tokenizer.bos_token_id is not None
        of_text = TextOptions(
            options.text_key, True, self.has_bos, options.on_bad_record, options.special_tokens_in_text, "data."
        )
        self.tokenizer = TextTokenizer(tokenizer, of_text)
        self.tallies = {number: Tally() for number in names}
        self.facts = FactsWriter()

    def write(self, folder: Path) -> None:
        """The dataset, in `folder`."""
        from verl_ext.commands.progress import Progress
        from verl_ext.tokenize.dataset_writer import DatasetWriter
        from verl_ext.tokenize.source_files import total_bytes

        begun = time.monotonic()
        writer = DatasetWriter(folder)
        results = self._results()
        try:
            first = next(results, None)  # before the bar: files with a mistake at their start show none
            with Progress(total_bytes(self.files)) as progress:
                progress.started = begun
                for result in chain([first] if first else [], results):
                    writer.add(result)
                    progress.add(result)
            self._refuse_nothing()
            writer.close()
        finally:
            writer.abandon()
        self.facts.write(folder)
        names = {str(number): name for number, name in self.names.items()}
        (folder / CATEGORIES).write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
        self._summary().write(folder)

    def _results(self) -> Iterator["ChunkResult"]:
        """A result for every batch of records of one category, whose facts and bad records are counted."""
        from verl_ext.data.index.parcels import read_parcels
        from verl_ext.tokenize.tally import Tally
        from verl_ext.tokenize.worker import ChunkResult

        keep = self.options.text_tokens + 1 + self.has_bos
        for parcel in read_parcels(self.files, lambda category: False, BATCH_BYTES):
            found = self.tokenizer.tokenise(parcel)
            if found.failure:
                raise ValueError(f"{self.key} must hold records with a text; {found.failure}")
            tally = self.tallies[parcel.source]
            tally.records += parcel.num_records
            for bad in found.bad:
                tally.add_bad(bad.reason, bad.line)
            tally.add_special_tokens(int(found.special_tokens.sum()), int((found.special_tokens > 0).sum()))
            tokens, lengths = cut_documents(found.tokens.astype(np.int32), found.lengths, keep)
            mask = np.ones(len(tokens), np.int8)
            if len(lengths):
                mask[np.cumsum(lengths, dtype=np.int64) - lengths] = 0
                self.facts.add(parcel.source, tokens, lengths, found.lengths)
            counted = Tally(records=parcel.num_records, tokens=len(tokens))
            yield ChunkResult(parcel.source, parcel.num_bytes, tokens, mask, lengths, None, counted)

    def _refuse_nothing(self) -> None:
        if self.facts.documents == 0:
            total = self._total()
            example = next(chain.from_iterable(total.examples.values()), "")
            raise ValueError(
                f"{self.key} must hold at least one record with a text; got none in {self.files[0].path} and "
                f"{len(self.files) - 1} files more, of {total.records} records{example and f', such as {example}'}"
            )

    def _summary(self) -> Summary:
        facts, total = self.facts, self._total()
        return Summary(
            files=[file.path for file in self.files],
            options=vars(self.options),
            bos=self.has_bos,
            records=total.records,
            documents=facts.documents,
            cut=facts.cut,
            cut_tokens=facts.cut_tokens,
            special_tokens=dict(total.special_tokens),
            bad_records={self.names[number]: dict(tally.bad) for number, tally in self.tallies.items() if tally.bad},
            example=next(chain.from_iterable(total.examples.values()), ""),
        )

    def _total(self) -> "Tally":
        from verl_ext.tokenize.tally import Tally

        total = Tally()
        for tally in self.tallies.values():
            total.add(tally)
        return total
