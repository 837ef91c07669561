"""PreTrainOptions: how text becomes rows, from arguments or from a config's data node, checked.

Which files a pretraining path stands for; the category of a file's documents is its name.

corpus/web.jsonl          category web
corpus/books.parquet      category books
more/web.jsonl.gz         category web

What became of the records of a tokenised folder: kept beside it, told by every run that opens it.

Documents cut to a number of tokens, and what is known of each besides its tokens: numpy and one Arrow table.

keep = 4 (BOS and EOS included)   B t t t t E | B t E      the EOS stays, the text's end goes
                                  B t t     E | B t E      full_tokens 6 3

Pretraining text, tokenised by one process, once, and opened by all others.

    CACHE/<fingerprint>/          a tokenised dataset (input_ids, loss_mask, category_ids, length; categories.json)
        documents.arrow           what is known of each document besides
        pretrain.json             what it was made of, and the records that were left out

A document is BOS, the first max_length - 2 tokens of its text, EOS: every token but the first is a target. A tokenizer
that has no BOS gives documents that begin with their text. The folder is one of `cached_folder`.

PreTrainDataset: text as rows of whole documents, each BOS, its first max_length - 2 tokens, EOS.

max_length = 5, texts of 4, 1 and 2 tokens; B and E are BOS and EOS, P is the padding

rows=packed, max_tokens = 9                      rows=padded
input_ids     B  a  a  a  E  B  b  E             B  a  a  a  E     B  b  E  P  P     B  c  c  E  P
position_ids  0  1  2  3  4  0  1  2             0  1  2  3  4     0  1  2  0  1     0  1  2  3  0
loss_mask     0  1  1  1  1  0  1  1             0  1  1  1  1     0  1  1  0  0     0  1  1  1  0
labels       -1  a  a  a  E -1  b  E             -1 a  a  a  E    -1  b  E -1 -1    -1  c  c  E -1

-1 stands for -100. Labels are not shifted, as Hugging Face models take them. Padding is known by its place, never by
its token: a pad token that is the EOS too costs no document its last target.
"""

import functools

# TYPE_CHECKING merged
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from verl_ext.data.categories import FILE_NAME as CATEGORIES
from verl_ext.data.categories import CategoryNumbers
from verl_ext.data.dataset import check_train_ratio, split_rows
from verl_ext.data.left_out import OverLengthRow, over_length_report
from verl_ext.data.sft import SFTDataSet
from verl_ext.data.stats import DocumentScan, OverLengthDocuments
from verl_ext.files import cached_folder, check_cache_dir, default_root
from verl_ext.packing import MOST_TOKENS, Spans, cut_spans, plan_packs
from verl_ext.text.counts import Counts
from verl_ext.text.documents import Documents
from verl_ext.text.json_records import ON_BAD_RECORD, SPECIAL_TOKENS_IN_TEXT
from verl_ext.text.sources import SourceFile
from verl_ext.text.tokenized import digest, file_facts, tokenizer_facts
from verl_ext.values import check_choice, whole_number

ROWS = ("packed", "padded")
ADDED = 2  # tokens of max_length that are not text: BOS and EOS


@dataclass(frozen=True)
class PreTrainOptions:
    """max_length: tokens of a document, BOS and EOS included; text_key: the field that holds the text; rows: `packed`
    (whole documents, up to max_tokens together) or `padded` (one document, filled up to max_length);
    special_tokens_in_text: what becomes of their names in a text; on_bad_record: what a record without a text does;
    train_ratio and seed: of the split into train and val; cache_dir: where the tokenised data is kept (None: the cache
    of `datasets`).

    max_tokens (None: max_length), strategy, over_length and pad_mode are those of packs; padded rows have their own.
    """

    max_length: int = 512
    text_key: str = "text"
    rows: str = "packed"
    special_tokens_in_text: str = "encode"
    on_bad_record: str = "error"
    train_ratio: float = 1.0
    seed: int = 42
    cache_dir: str | None = None
    max_tokens: int | None = None
    strategy: str = "best_fit"
    over_length: str = "error"
    pad_mode: str = "no_padding"

    def __post_init__(self) -> None:
        whole_number("data.max_length", self.max_length, least=ADDED + 1, most=MOST_TOKENS)
        if not isinstance(self.text_key, str) or not self.text_key:
            raise ValueError(f"data.text_key must name a field of the records; got {self.text_key!r}")
        check_choice("data.rows", self.rows, ROWS)
        check_choice("data.special_tokens_in_text", self.special_tokens_in_text, SPECIAL_TOKENS_IN_TEXT)
        check_choice("data.on_bad_record", self.on_bad_record, ON_BAD_RECORD)
        check_train_ratio(self.train_ratio)
        whole_number("data.seed", self.seed, least=0)
        check_cache_dir(self.cache_dir)

    @property
    def text_tokens(self) -> int:
        """The most tokens of its text that a document keeps, whether the tokenizer has a BOS or not."""
        return self.max_length - ADDED

    @property
    def packs(self) -> dict[str, Any]:
        """max_tokens, strategy and pad_mode of the rows."""
        if self.rows == "padded":
            return {"max_tokens": self.max_length, "strategy": "none", "pad_mode": "right"}
        budget = self.max_length if self.max_tokens is None else self.max_tokens
        return {"max_tokens": budget, "strategy": self.strategy, "pad_mode": self.pad_mode}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], given: Mapping[str, Any]) -> "PreTrainOptions":
        """What is `given` and not None, else the key of `config` (verl's data node or a mapping), else the default."""
        if config.get("mixture") is not None:
            raise ValueError("data.mixture must be null for data=pretrain, which reads text; got a mixture")
        options: dict[str, Any] = {}
        for name in (entry.name for entry in fields(cls)):
            value = config.get(name) if given.get(name) is None else given[name]
            if value is not None:
                options[name] = value
        return cls(**options)


def find_files(given: Any, key: str) -> tuple[list["SourceFile"], dict[int, str]]:
    """(files, category number -> name) of a path or a list of paths: files, folders, globs and URLs, in the order
    given; those of a folder or a glob by name. A file's category_id is its number.

    Raises:
        ValueError: no file, a file of no known format, one that cannot be read; `key` is named.
    """
    # Here, because the tokenise command's modules import config and transformers' template tools.
    from verl_ext.text.sources import absolute_path, find_source_files

    paths = [given] if isinstance(given, (str, os.PathLike)) else list(given or [])
    if not paths or not all(isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in paths):
        raise ValueError(f"{key} must name files of records with a text; got {given!r}")
    found = find_source_files({"text": [absolute_path(path) for path in paths]}, key)
    return _by_category(found)


def category_of(file: "SourceFile") -> str:
    """The file's name without its endings; an Arrow folder's name."""
    from verl_ext.text.sources import file_name, without_compression  # here for the reason above

    name = file_name(file.path)
    return name if file.kind in ("arrow", "hub") else Path(without_compression(name)).stem


def _by_category(files: Sequence["SourceFile"]) -> tuple[list["SourceFile"], dict[int, str]]:
    names = list(dict.fromkeys(map(category_of, files)))
    numbers = {name: number for number, name in enumerate(names, start=1)}
    numbered = [replace(file, category_id=numbers[category_of(file)]) for file in files]
    return numbered, {number: name for name, number in numbers.items()}


SUMMARY_FILE = "pretrain.json"


@dataclass
class Summary:
    """files and options: what it was made of. documents of records; of them cut, by cut_tokens in all, to max_length.
    special_tokens: records whose text holds names of special tokens, and occurrences of these. bad_records: category ->
    reason -> how many gave no document; example: one of these, with its file and line."""

    files: list[str]
    options: dict[str, Any]
    bos: bool
    records: int = 0
    documents: int = 0
    cut: int = 0
    cut_tokens: int = 0
    special_tokens: dict[str, int] = field(default_factory=dict)
    bad_records: dict[str, dict[str, int]] = field(default_factory=dict)
    example: str = ""

    def write(self, folder: Path) -> None:
        """pretrain.json in `folder`."""
        text = json.dumps(asdict(self), indent=2, default=str, ensure_ascii=False)
        (folder / SUMMARY_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Summary":
        """What `write` wrote."""
        return cls(**json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8")))

    def notices(self, key: str) -> Iterator[str]:
        """A line for each thing that is not as the records have it; `key`: the config key of the path."""
        if not self.bos:
            yield f"the tokenizer has no bos_token: documents of {key} begin with the first token of their text"
        if self.cut:
            yield (
                f"{self.cut:,} of {self.documents:,} documents of {key} are longer than data.max_length="
                f"{self.options['max_length']}: {self.cut_tokens:,} tokens in all are cut off their ends"
            )
        if self.special_tokens:
            yield (
                f"{self.special_tokens['records']:,} records of {key} hold names of special tokens, "
                f"{self.special_tokens['occurrences']:,} in all, which are encoded as text "
                "(data.special_tokens_in_text=encode)"
            )
        bad: Counter[str] = sum(map(Counter, self.bad_records.values()), start=Counter())
        if bad:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(bad.items()))
            yield (
                f"{bad.total():,} of {self.records:,} records of {key} are left out (data.on_bad_record=skip): "
                f"{reasons}; one of them is {self.example}"
            )

    def bad_record_rows(self) -> list[OverLengthRow]:
        """A row for each category and reason of records that gave no document."""
        return [
            OverLengthRow(category, f"bad record: {reason}", count)
            for category, bad in self.bad_records.items()
            for reason, count in sorted(bad.items())
        ]


DOCUMENTS_FILE = "documents.arrow"
_COLUMNS = {
    "category_id": pa.int32(),
    "full_tokens": pa.int64(),  # before the cut
    "lowest": pa.int32(),  # token ids
    "highest": pa.int32(),
}


def cut_documents(
    tokens: NDArray[Any], lengths: NDArray[np.integer], keep: int
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """(tokens, lengths int32[D]) of the documents side by side in `tokens`, a longer one than `keep` as its first
    keep - 1 tokens and its last."""
    if not (lengths > keep).any():
        return tokens, lengths.astype(np.int32)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    position = np.arange(len(tokens)) - np.repeat(starts, lengths)
    is_last = position == np.repeat(lengths - 1, lengths)
    return tokens[(position < keep - 1) | is_last], np.minimum(lengths, keep).astype(np.int32)


@dataclass
class FactsWriter:
    """Collects facts in the order of the documents; cut: how many were cut, by cut_tokens in all."""

    columns: dict[str, list[NDArray[Any]]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    documents: int = 0
    cut: int = 0
    cut_tokens: int = 0

    def add(
        self, category_id: int, tokens: NDArray[Any], lengths: NDArray[np.int32], full: NDArray[np.integer]
    ) -> None:
        """Documents of one category, at least one, side by side in `tokens`; full int[D]: their tokens uncut."""
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        self.documents += len(lengths)
        self.cut += int((full > lengths).sum())
        self.cut_tokens += int((full - lengths).sum(dtype=np.int64))
        values = (
            np.full(len(lengths), category_id),
            full,
            np.minimum.reduceat(tokens, starts),
            np.maximum.reduceat(tokens, starts),
        )
        for (name, kind), column in zip(_COLUMNS.items(), values, strict=True):
            self.columns[name].append(column.astype(kind.to_pandas_dtype()))

    def write(self, folder: Path) -> None:
        """The table, in `folder`."""
        table = pa.table(
            {name: np.concatenate(parts) for name, parts in self.columns.items()}, schema=pa.schema(_COLUMNS)
        )
        with pa.OSFile(str(folder / DOCUMENTS_FILE), "wb") as sink, pa.ipc.new_file(sink, table.schema) as stream:
            stream.write_table(table)


class DocumentFacts:
    """Memory-mapped columns of N documents: category_id, lowest, highest int32[N], full_tokens int64[N]. names:
    category number -> name."""

    def __init__(self, folder: Path, names: dict[int, str]) -> None:
        self.folder, self.names = folder, names
        with pa.memory_map(str(folder / DOCUMENTS_FILE)) as source:
            table = pa.ipc.open_file(source).read_all()
        columns = {name: table[name].combine_chunks().to_numpy() for name in _COLUMNS}
        self.category_id: NDArray[np.int32] = columns["category_id"]
        self.full_tokens: NDArray[np.int64] = columns["full_tokens"]
        self.lowest: NDArray[np.int32] = columns["lowest"]
        self.highest: NDArray[np.int32] = columns["highest"]

    def __len__(self) -> int:
        return len(self.category_id)

    def __reduce__(self) -> tuple[type, tuple[Path, dict[int, str]]]:
        return type(self), (self.folder, self.names)

    def cut_report(self, rows: NDArray[np.int64], lengths: NDArray[np.int64], reason: str) -> list[OverLengthRow]:
        """A row for each category with documents of `rows` that were cut; lengths int64[rows]: after the cut. tokens
        and share are of before it."""
        full = self.full_tokens[rows]
        cut = full > lengths
        total = int(full.sum())
        return self._by_category(rows[cut], full[cut], lengths[cut], total, reason)

    def left_report(
        self, rows: NDArray[np.int64], lengths: NDArray[np.int64], total: int, reason: str
    ) -> list[OverLengthRow]:
        """A row for each category of `rows`, which no pack holds; lengths int64[rows]; total: what share is of."""
        return self._by_category(rows, lengths, np.zeros_like(lengths), total, reason)

    def _by_category(
        self, rows: NDArray[np.int64], tokens: NDArray[np.int64], kept: NDArray[np.int64], total: int, reason: str
    ) -> list[OverLengthRow]:
        category = self.category_id[rows]
        report = []
        for number in np.unique(category).tolist():
            of_it = category == number
            before, after = int(tokens[of_it].sum()), int(kept[of_it].sum())
            share = before / total
            row = OverLengthRow(self.names[number], reason, int(of_it.sum()), before, share, after, before - after)
            report.append(row)
        return report


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
        from verl_ext.text.counts import Counts
        from verl_ext.text.plain_text import TextOptions, TextTokenizer

        self.files, self.names, self.options, self.key = files, names, options, key
        self.has_bos = tokenizer.bos_token_id is not None
        of_text = TextOptions(
            options.text_key, True, self.has_bos, options.on_bad_record, options.special_tokens_in_text, "data."
        )
        self.tokenizer = TextTokenizer(tokenizer, of_text)
        self.tallies = {number: Counts() for number in names}
        self.facts = FactsWriter()

    def write(self, folder: Path) -> None:
        """The dataset, in `folder`."""
        from verl_ext.progress import Progress
        from verl_ext.text.sources import total_bytes
        from verl_ext.text.tokenized import DatasetWriter

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

    def _results(self) -> Iterator["Documents"]:
        """A result for every batch of records of one category, whose facts and bad records are counted."""
        from verl_ext.text.counts import Counts
        from verl_ext.text.documents import Documents
        from verl_ext.text.readers import read_batches

        keep = self.options.text_tokens + 1 + self.has_bos
        for batch in read_batches(self.files, lambda category: False, BATCH_BYTES):
            found = self.tokenizer.tokenise(batch)
            if found.failure:
                raise ValueError(f"{self.key} must hold records with a text; {found.failure}")
            tally = self.tallies[batch.source]
            tally.records += batch.num_records
            for bad in found.bad:
                tally.add_bad(bad.reason, bad.line)
            tally.add_special_tokens(int(found.special_tokens.sum()), int((found.special_tokens > 0).sum()))
            tokens, lengths = cut_documents(found.tokens.astype(np.int32), found.lengths, keep)
            mask = np.ones(len(tokens), np.int8)
            if len(lengths):
                mask[np.cumsum(lengths, dtype=np.int64) - lengths] = 0
                self.facts.add(batch.source, tokens, lengths, found.lengths)
            counted = Counts(records=batch.num_records, tokens=len(tokens))
            yield Documents(batch.source, batch.num_bytes, tokens, mask, lengths, None, counted)

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

    def _total(self) -> "Counts":
        from verl_ext.text.counts import Counts

        total = Counts()
        for tally in self.tallies.values():
            total.add(tally)
        return total


IGNORED = -100  # the label that Hugging Face losses leave out


class PreTrainDataset(SFTDataSet):
    """Records with a text (jsonl, json, parquet, csv, Arrow folders, .txt files) as rows; see the picture above.

    Two constructor forms give the same rows: `PreTrainDataset(tokenizer, datapath, max_length=512)`, and verl's
    `PreTrainDataset(parquet_files=…, tokenizer=…, config=…, processor=None, max_samples=-1)`, whose options are the
    keys of `config` (those of PreTrainOptions); an argument that is given wins. A path is a file, a folder, a glob or a
    list of these; the category of a document is its file's name.

    `split` "train" or "val" is one part of the seeded random split of all documents, None all of them; documents keep
    the files' order. Files are tokenised when they, the tokenizer or an option are new, whole, whatever the split,
    max_samples and the rows; after that rows are read from the cache. An SFTDataSet otherwise.
    """

    needs_tokenizer = True

    def __init__(
        self,
        tokenizer: Any = None,
        datapath: str | Sequence[str] | None = None,
        max_length: int | None = None,
        *,
        parquet_files: str | Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
        split: str | None = None,
        text_key: str | None = None,
        rows: str | None = None,
        special_tokens_in_text: str | None = None,
        on_bad_record: str | None = None,
        train_ratio: float | None = None,
        seed: int | None = None,
        cache_dir: str | None = None,
        max_tokens: int | None = None,
        strategy: str | None = None,
        over_length: str | None = None,
        pad_mode: str | None = None,
        key: str = "data.train_dir",
    ) -> None:
        """`max_samples`: the first so many documents of the split, all when it is not above 0. `key`: the config key
        that messages name for the path. `processor` is verl's argument for images and not used.

        Raises:
            ValueError: an option, a file or a tokenizer that cannot be used; one line with the key and the value.
        """
        if datapath is not None and parquet_files is not None:
            raise ValueError(f"{key} must be given once; got datapath={datapath!r} and parquet_files={parquet_files!r}")
        if tokenizer is None:
            raise ValueError("PreTrainDataset must be given a tokenizer (model.path's); got nothing")
        given = {
            "max_length": max_length,
            "text_key": text_key,
            "rows": rows,
            "special_tokens_in_text": special_tokens_in_text,
            "on_bad_record": on_bad_record,
            "train_ratio": train_ratio,
            "seed": seed,
            "cache_dir": cache_dir,
            "max_tokens": max_tokens,
            "strategy": strategy,
            "over_length": over_length,
            "pad_mode": pad_mode,
        }
        self.text = PreTrainOptions.from_config(config or {}, given)
        self.split = split
        self.has_bos = tokenizer.bos_token_id is not None
        files, names = find_files(parquet_files if datapath is None else datapath, key)
        self.files = tuple(file.path for file in files)
        folder = tokenised_folder(files, names, tokenizer, self.text, key)
        packs = self.text.packs
        super().__init__(
            str(folder),
            packs["max_tokens"],
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            strategy="none",  # planned below, with the documents in use
            seed=self.text.seed,
            over_length=self.text.over_length,
            pad_mode=packs["pad_mode"],
            key=key,
        )
        self.options = replace(self.options, strategy=packs["strategy"])
        self._facts = DocumentFacts(folder, CategoryNumbers.read(self.folders).names)
        self._restrict(max_samples)

    def _restrict(self, max_samples: int) -> None:
        """Pack the documents of the split, the first `max_samples` of them."""
        options, lengths = self.options, self._data.lengths()
        self._split_rows = split_rows(len(self._facts), self.split, self.text.train_ratio, options.seed)
        self._documents = min(len(self._split_rows), max_samples) if max_samples > 0 else len(self._split_rows)
        self._rows = self._split_rows[: self._documents]
        spans = cut_spans(lengths[self._rows], options.max_tokens, options.over_length, self.key)
        self.spans = Spans(self._rows[spans.row], spans.start, spans.length)
        self.plan = plan_packs(spans.length, options.max_tokens, options.strategy, options.seed)

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Row `pack`: 1-D tensors of one length, those of `pack_row` and labels int64."""
        row = super().__getitem__(pack)
        row["labels"] = torch.where(row["loss_mask"] == 1, row["input_ids"], IGNORED)
        return row

    def scan_part(self, first: int, last: int, progress: bool = True) -> DocumentScan:
        """The scan of spans first..last-1 (at least one), from what tokenising them told: no token is read. Of a
        document that was cut into spans, token ids are those of the whole."""
        rows, facts = self.spans.row[first:last], self._facts
        targets = self.spans.length[first:last] - 1
        categories = tuple(np.unique(facts.category_id[rows[targets > 0]]).tolist())
        return DocumentScan(targets, int(facts.lowest[rows].min()), int(facts.highest[rows].max()), categories)

    @cached_property
    def over_length(self) -> OverLengthDocuments:
        """The documents longer than a pack."""
        over = OverLengthDocuments.of(
            self._data.lengths()[self._rows], self.options.max_tokens, self.options.over_length
        )
        return replace(over, rows=self._rows[over.rows])

    @cached_property
    def over_length_report(self) -> list[OverLengthRow]:
        """The documents cut at max_length, by category, `truncated to max_length` with the tokens from before the cut;
        then those longer than a pack (needs the scan)."""
        lengths, names = self._data.lengths()[self._rows], self._facts.names
        cut = self._facts.cut_report(self._rows, lengths, "truncated to max_length")
        for row in cut:
            row.targets_removed = row.tokens_removed
        counts, policy = self.scan.over_length, self.options.over_length
        return [*cut, *over_length_report(counts, policy, names, lengths, int(lengths.sum()))]

    def not_as_they_stand(self) -> list[OverLengthRow]:
        """over_length_report, the documents of the split beyond max_samples, and the records left out under
        on_bad_record=skip (told with the part to train on), by category (needs the scan)."""
        lengths = self._data.lengths()
        beyond, total = self._split_rows[self._documents :], int(lengths[self._split_rows].sum())
        bad = [] if self.split == "val" else Summary.read(Path(self.folders[0])).bad_record_rows()
        return [
            *self.over_length_report,
            *self._facts.left_report(beyond, lengths[beyond], total, "beyond max_samples"),
            *bad,
        ]

    def facts(self) -> dict[str, Any]:
        """What its report says besides: how documents became rows, and whether they begin with a BOS."""
        return {"rows": self.text.rows, "max_length": self.text.max_length, "bos": self.has_bos}
