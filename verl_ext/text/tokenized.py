"""Text as a tokenized dataset on disk: tokenized by one process, once, and memory-mapped by all others.

    CACHE/<fingerprint>/       of the files, the tokenizer and the encoder's fields
        data-00000-of-00001.arrow, state.json, dataset_info.json    what `datasets.load_from_disk` opens
        categories.json        {"1": "gsm8k", "2": "code"}
        report.json            what became of the records, by category

Every row is a document: its tokens (DESIGN.md §3), then what a scan of its tokens would tell. These numbers hold for
the shards that were written here; a shard that `datasets` has saved anew lacks MARK and is scanned instead.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa

from verl_ext.files import cached_folder, checksum, write_json
from verl_ext.progress import Progress
from verl_ext.redaction import redacted
from verl_ext.text.arrow_folder import STATE, read_state
from verl_ext.text.documents import Counts, Documents
from verl_ext.text.sources import SourceFile, is_url, remote_facts, total_bytes

FORMAT = 4  # to be raised when the same files are written as something else
BATCH_BYTES = 4 << 20  # of text tokenized together: enough work for the tokenizer's threads
REPORT, CATEGORIES = "report.json", "categories.json"

SHARD_BYTES = 500 * 1000 * 1000
BATCH_TOKENS = 1 << 22  # of a record batch, about: each costs 60 µs and 5 kB wherever the dataset is opened
TOKEN_BYTES = 9  # input_ids, loss_mask and category_ids
TOKEN_COLUMNS = {
    "input_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.int8()),
    "category_ids": pa.list_(pa.int32()),
    "length": pa.int32(),
}
DOCUMENT_COLUMNS = {
    "num_targets": pa.int32(),  # the first token is never one
    "lowest_token_id": pa.int32(),
    "highest_token_id": pa.int32(),
    "full_length": pa.int32(),  # tokens before it was cut
    "document_category": pa.int32(),
}
WEIGHT_COLUMN = {"loss_weight": pa.list_(pa.float32())}
MARK = {b"verl_ext.document_columns": b"1"}  # metadata of a shard whose DOCUMENT_COLUMNS hold

_logger = logging.getLogger(__name__)
_reported: set[tuple[Path, str]] = set()


class Encoder(Protocol):
    """What makes documents of files: a frozen dataclass. All of its fields decide what the documents are, but for those
    with compare=False.

    key: the config key of the files, which errors name; texts: the further columns that its documents have.
    """

    texts: ClassVar[tuple[str, ...]]

    @property
    def tokenizer(self) -> Any: ...
    @property
    def key(self) -> str: ...

    def encode(self, files: Sequence[SourceFile], batch_bytes: int) -> Iterator[Documents]:
        """The files' documents, those of about `batch_bytes` of text at a time; their counts have the records, the bad
        ones and the special tokens. ValueError for a record that ends the run."""

    def notices(self, total: Mapping[str, Any]) -> Iterator[str]:
        """A line for each thing that is not as the records have it; total: their counts as the report has them."""


def tokenized(
    files: Sequence[SourceFile],
    names: Mapping[int, str],
    encoder: Encoder,
    root: Path,
    *,
    batch_bytes: int = BATCH_BYTES,
) -> Path:
    """The folder below `root` with the documents of these files, tokenized now unless it is there; what was cut or left
    out is logged once in a process. Processes may call it at the same time. names: category number -> name.

    Raises:
        ValueError: files that cannot be used, or that change meanwhile (`encoder.key` is named), a cache that cannot be
            written.
    """
    name = _fingerprint(files, names, encoder)
    folder = cached_folder(root, name, lambda to: _write(to, files, names, encoder, batch_bytes))
    if _fingerprint(files, names, encoder) != name:
        raise ValueError(f"{encoder.key} must not change while it is tokenized; one of its {len(files)} files did")
    if (folder, encoder.key) not in _reported:
        _reported.add((folder, encoder.key))
        for line in encoder.notices(read_report(folder)["total"]):
            _logger.warning("%s", line)
    return folder


def read_report(folder: str | Path) -> dict[str, Any]:
    """report.json of a folder: files, options, categories {name: counts} and total."""
    return json.loads((Path(folder) / REPORT).read_text(encoding="utf-8"))


def number_categories(
    files: Iterable[SourceFile], category_of: Callable[[SourceFile], str]
) -> tuple[list[SourceFile], dict[int, str]]:
    """(the files with their categories' numbers, number -> name), from 1 in the order in which they first occur."""
    categories = [(file, category_of(file)) for file in files]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for _, name in categories), start=1)}
    numbered = [dataclasses.replace(file, category_id=numbers[name]) for file, name in categories]
    return numbered, {number: name for name, number in numbers.items()}


def digest(facts: Any) -> str:
    """32 hex digits of plain JSON values."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def file_facts(paths: Iterable[str]) -> list[list[Any]]:
    """[real path, size, time of change] of each file, and of the files of each folder; of a URL what its host
    tells. No content is read."""
    facts: list[list[Any]] = []
    for path in paths:
        if is_url(path):
            facts.append(remote_facts(path))
        elif os.path.isdir(path):
            facts += file_facts(sorted(entry.path for entry in os.scandir(path) if entry.is_file()))
        else:
            status = os.stat(path)
            facts.append([os.path.realpath(path), status.st_size, status.st_mtime_ns])
    return facts


def tokenizer_facts(tokenizer: Any) -> list[Any]:
    """What determines how a tokenizer splits text, without the state that calls leave in it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        serialised = json.loads(backend.to_str())
        for state in ("truncation", "padding"):  # left there by the last call
            serialised.pop(state, None)
        model = json.dumps(serialised)
    else:
        model = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.all_special_tokens])
        file = getattr(tokenizer, "vocab_file", None)
        if file and os.path.isfile(file):
            model += hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return [
        type(tokenizer).__name__,
        hashlib.sha256(model.encode()).hexdigest(),
        bool(getattr(tokenizer, "split_special_tokens", False)),
    ]


def _options(encoder: Any) -> dict[str, Any]:
    fields = (field.name for field in dataclasses.fields(encoder) if field.compare)
    return {name: getattr(encoder, name) for name in fields if name != "tokenizer"}


def _fingerprint(files: Sequence[SourceFile], names: Mapping[int, str], encoder: Encoder) -> str:
    """Of everything that the documents and the report follow from."""
    tokenizer, categories = encoder.tokenizer, [[file.kind, names[file.category_id]] for file in files]
    ends = [getattr(tokenizer, f"{end}_token_id", None) for end in ("bos", "eos")]
    made_by = [tokenizer_facts(tokenizer), ends, type(encoder).__name__, _options(encoder)]
    return digest([FORMAT, file_facts(file.path for file in files), categories, *made_by])


def _write(
    folder: Path, files: Sequence[SourceFile], names: Mapping[int, str], encoder: Encoder, batch_bytes: int
) -> None:
    """The dataset with its categories and its report, in an empty folder."""
    begun = time.monotonic()
    counts = {number: Counts() for number in names}
    results = encoder.encode(files, batch_bytes)
    writer = DatasetWriter(folder, texts=encoder.texts)
    try:
        first = list(islice(results, 1))  # before the bar: files with a mistake at their start show none
        with Progress(total_bytes(files)) as progress:
            progress.started = begun
            for documents in chain(first, results):
                _count(documents)
                counts[documents.category_id].add(documents.counts)
                writer.add(documents)
                progress.add(documents)
        total = Counts()
        for of_category in counts.values():
            total.add(of_category)
        if not total.documents:
            example = next(chain.from_iterable(total.examples.values()), "")
            raise ValueError(
                f"{encoder.key} must hold at least one record with a text; got none in {files[0].path} and "
                f"{len(files) - 1} files more, of {total.records} records{example and f', such as {example}'}"
            )
        writer.close()
    finally:
        writer.abandon()
    write_json(folder / CATEGORIES, {str(number): name for number, name in names.items()})
    report = {
        "files": redacted([file.path for file in files]),
        "options": _options(encoder),
        "categories": {names[number]: of_category.as_dict() for number, of_category in counts.items()},
        "total": total.as_dict(),
    }
    write_json(folder / REPORT, report)


def _count(documents: Documents) -> None:
    """Add the documents to their own counts: number, tokens, targets, and what was cut off."""
    counts, lengths = documents.counts, documents.lengths
    counts.documents += len(lengths)
    counts.tokens += int(lengths.sum(dtype=np.int64))
    counts.target_tokens += int(documents.loss_mask.sum(dtype=np.int64))
    counts.lengths.update(lengths.tolist())
    if documents.full_lengths is not None and (cut := documents.full_lengths - lengths).any():
        tokens = int(cut.sum(dtype=np.int64))
        counts.over_length.update(truncated_documents=int((cut > 0).sum()), truncated_tokens=tokens)


class DatasetWriter:
    """Appends documents to the shards of `folder`; nothing there loads before `close()`. texts: their further columns.

    The column `loss_weight` exists only when some target has a weight, which may be known late: shards written before
    the first such record get the column, filled with 1, at the end.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES, texts: Sequence[str] = ()) -> None:
        self.folder, self.shard_bytes, self.texts = folder, shard_bytes, tuple(texts)
        self.weighted = False
        self._shards: list[tuple[Path, bool]] = []  # path, has loss_weight
        self._pending: list[pa.RecordBatch] = []
        self._pending_tokens = 0
        self._sink: Any = None
        self._stream: Any = None
        self._open = contextlib.ExitStack()
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, documents: Documents) -> None:
        """Write a chunk's documents."""
        if not len(documents.lengths):
            return
        if documents.weights is not None and not self.weighted:
            self._write_pending()
            self.weighted = True
            self.abandon()  # a shard has the column or not
        self._pending.append(self._batch(documents))
        self._pending_tokens += len(documents.input_ids)
        if self._pending_tokens >= BATCH_TOKENS or self._pending_tokens * TOKEN_BYTES >= self.shard_bytes:
            self._write_pending()

    def close(self) -> None:
        """Finish the shards and write the two files that make the folder a dataset."""
        self._write_pending()
        self.abandon()
        files = []
        for number, (path, has_weights) in enumerate(self._shards):
            if self.weighted and not has_weights:
                _add_weights(path, _schema(True, self.texts))
            files.append(f"data-{number:05d}-of-{len(self._shards):05d}.arrow")
            os.replace(path, self.folder / files[-1])
        self._write_metadata(files)

    def abandon(self) -> None:
        """Close the open shard: at its end, or after an error."""
        self._stream = None
        self._open.close()  # the file too where the stream's last bytes find the disk full, which it would keep so

    def _write_pending(self) -> None:
        """The documents added since the last time, as one record batch."""
        if not self._pending:
            return
        table = pa.Table.from_batches(self._pending).combine_chunks()
        self._pending, self._pending_tokens = [], 0
        if self._stream is None:
            path = self.folder / f"part-{len(self._shards):05d}.arrow"
            self._shards.append((path, self.weighted))
            self._sink = self._open.enter_context(pa.OSFile(str(path), "wb"))
            schema = _schema(self.weighted, self.texts)
            self._stream = self._open.enter_context(pa.ipc.new_stream(self._sink, schema))
        self._stream.write_table(table)
        if self._sink.tell() >= self.shard_bytes:
            self.abandon()

    def _batch(self, documents: Documents) -> pa.RecordBatch:
        mask, lengths = documents.loss_mask, documents.lengths
        ends = np.cumsum(lengths, dtype=np.int64)
        if ends[-1] > np.iinfo(np.int32).max:
            raise OverflowError("a chunk of records must have fewer than 2^31 tokens")
        category = np.full(len(lengths), documents.category_id, np.int32)
        if documents.category_ids is not None:
            category = documents.category_ids.astype(np.int32)
        tokens = [documents.input_ids, mask, np.where(mask == 1, np.repeat(category, lengths), np.int32(0))]
        if self.weighted:
            tokens.append(np.ones(len(mask), np.float32) if documents.weights is None else documents.weights)
        for array in (*tokens, lengths):
            self._hash.update(np.ascontiguousarray(array).data)
        rows = pa.array(np.concatenate([[0], ends]).astype(np.int32))
        lists = [pa.ListArray.from_arrays(rows, pa.array(values)) for values in tokens]
        full = lengths if documents.full_lengths is None else documents.full_lengths
        starts = ends - lengths
        targets = np.add.reduceat(mask, starts, dtype=np.int32) - mask[starts]
        lowest, highest = (reduce.reduceat(documents.input_ids, starts) for reduce in (np.minimum, np.maximum))
        facts = [lengths, targets, lowest, highest, full, category]
        numbers = [pa.array(values.astype(np.int32, copy=False)) for values in facts]
        texts = [pa.array(documents.texts[name], pa.large_string()) for name in self.texts]
        columns = [*lists[:3], *numbers, *texts, *lists[3:]]
        return pa.RecordBatch.from_arrays(columns, schema=_schema(self.weighted, self.texts))

    def _write_metadata(self, files: list[str]) -> None:
        """dataset_info.json and state.json as `Dataset.save_to_disk` writes them, with what our shards hold."""
        from datasets import DatasetInfo, Features  # here, because importing it takes a second

        features = Features.from_arrow_schema(_schema(self.weighted, self.texts))
        DatasetInfo(features=features).write_to_directory(str(self.folder), pretty_print=True)
        unformatted: dict[str, Any] = {"_format_columns": None, "_format_kwargs": {}, "_format_type": None}
        state = {**unformatted, "_output_all_columns": False, "_split": None, "_fingerprint": self._hash.hexdigest()}
        facts = [(name, os.path.getsize(self.folder / name), checksum(self.folder / name)) for name in files]
        shards = [dict(zip(("filename", "bytes", "xxh3_128"), each, strict=True)) for each in facts]
        write_json(self.folder / STATE, {**state, "_data_files": shards})


def has_document_columns(folder: Path) -> bool:
    """Whether every shard of a dataset is as it was written here, so that its DOCUMENT_COLUMNS hold."""
    for shard in read_state(folder).shards:
        with pa.memory_map(str(folder / shard.name)) as source, pa.ipc.open_stream(source) as reader:
            if not MARK.items() <= (reader.schema.metadata or {}).items():
                return False
    return True


@cache
def _schema(weighted: bool, texts: tuple[str, ...]) -> pa.Schema:
    from datasets import Features  # here, because importing it takes a second

    columns = {**TOKEN_COLUMNS, **DOCUMENT_COLUMNS, **dict.fromkeys(texts, pa.large_string())}
    schema = Features.from_arrow_schema(pa.schema({**columns, **WEIGHT_COLUMN} if weighted else columns)).arrow_schema
    return schema.with_metadata({**schema.metadata, **MARK})


def _add_weights(path: Path, schema: pa.Schema) -> None:
    """Rewrite a shard with loss_weight = 1, batch by batch."""
    target = path.with_suffix(".weighted")
    with (
        pa.memory_map(str(path)) as source,
        pa.ipc.open_stream(source) as reader,
        pa.OSFile(str(target), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in reader:
            ids = batch.column("input_ids")
            weights = pa.ListArray.from_arrays(ids.offsets, pa.array(np.ones(len(ids.values), np.float32)))
            writer.write_batch(pa.RecordBatch.from_arrays([*batch.columns, weights], schema=schema))
    os.replace(target, path)
