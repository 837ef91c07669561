"""The columns of a tokenized dataset folder, and the writer of its shards.

    data-00000-of-00002.arrow, data-00001-of-00002.arrow, state.json, dataset_info.json

`datasets.load_from_disk` opens these files. Every row is a document: its tokens, then the numbers that a scan of its
tokens would give. Only shards with MARK, which are written here, have valid numbers. If `datasets` saves a shard again,
it loses MARK, and its tokens are read instead.
"""

import contextlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl_ext.files import ChecksumFile, atomic_write, fingerprint, write_json
from verl_ext.text.read.arrow_folder import STATE, Shard, read_shards
from verl_ext.text.tokens.documents import Documents

SHARD_BYTES = 500 * 1000 * 1000
BATCH_TOKENS = 1 << 22  # about so many per record batch; each batch costs 60 µs and 5 kB whenever the dataset is opened
TOKEN_BYTES = 9  # input_ids, loss_mask and category_ids
TOKEN_COLUMNS = {
    "input_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.int8()),
    "category_ids": pa.list_(pa.int32()),
    "length": pa.int32(),
}
DOCUMENT_COLUMNS = {
    "num_targets": pa.int32(),  # the first token is never a target
    "lowest_token_id": pa.int32(),
    "highest_token_id": pa.int32(),
    "full_length": pa.int32(),  # tokens before it was cut
    "document_category": pa.int32(),
}
WEIGHT_COLUMN = {"loss_weight": pa.list_(pa.float32())}
MARK = {b"verl_ext.document_columns": b"1"}  # metadata of a shard whose DOCUMENT_COLUMNS are valid


class DatasetWriter:
    """A writer of documents to the shards of `folder`, which loads only after `close()`.

    texts: the names of further columns. The column `loss_weight` exists only if a target has a weight. Shards written
    before the first such record get the column, filled with 1, in `close()`. Documents with categories of their own
    tokens have no category as a whole, so that a folder of them has no MARK.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES, texts: Sequence[str] = ()) -> None:
        self.folder, self.shard_bytes, self.texts = folder, shard_bytes, tuple(texts)
        self.weighted, self.marked = False, True
        self._shards: list[tuple[Path, bool, ChecksumFile]] = []  # path, has loss_weight, what was written
        self._pending: list[pa.RecordBatch] = []
        self._pending_tokens = 0
        self._sink: Any = None
        self._stream: Any = None
        self._open = contextlib.ExitStack()

    def add(self, documents: Documents) -> None:
        """Append a batch of documents."""
        if not len(documents.lengths):
            return
        self.marked = documents.token_categories is None
        if documents.weights is not None and not self.weighted:
            self._write_pending()
            self.weighted = True
            self.abandon()  # all rows of a shard have the column, or none
        self._pending.append(self._batch(documents))
        self._pending_tokens += len(documents.input_ids)
        if self._pending_tokens >= BATCH_TOKENS or self._pending_tokens * TOKEN_BYTES >= self.shard_bytes:
            self._write_pending()

    def close(self) -> None:
        """Finish the shards and write the two files that make the folder a dataset."""
        self._write_pending()
        self.abandon()
        shards = []
        for number, (path, has_weights, written) in enumerate(self._shards):
            if self.weighted and not has_weights:
                written = _add_weights(path, _schema(True, self.texts, self.marked))
            named = self.folder / f"data-{number:05d}-of-{len(self._shards):05d}.arrow"
            os.replace(path, named)
            shards.append(Shard(named.name, written.tell(), written.checksum))
        _write_metadata(self.folder, shards, _schema(self.weighted, self.texts, self.marked))

    def abandon(self) -> None:
        """Close the open shard, at its end or after an error."""
        self._stream = None
        self._open.close()  # closes the file even if the stream's last write fails on a full disk, to free its space

    def _write_pending(self) -> None:
        """Write the pending documents as one record batch."""
        if not self._pending:
            return
        table = pa.Table.from_batches(self._pending).combine_chunks()
        self._pending, self._pending_tokens = [], 0
        if self._stream is None:
            path = self.folder / f"part-{len(self._shards):05d}.arrow"
            self._sink = self._open.enter_context(ChecksumFile(path))
            self._shards.append((path, self.weighted, self._sink))
            schema = _schema(self.weighted, self.texts, self.marked)
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
        of_tokens = documents.token_categories
        if of_tokens is None:
            of_tokens = np.where(mask == 1, np.repeat(category, lengths), np.int32(0))
        tokens = [documents.input_ids, mask, of_tokens]
        if self.weighted:
            tokens.append(np.ones(len(mask), np.float32) if documents.weights is None else documents.weights)
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
        return pa.RecordBatch.from_arrays(columns, schema=_schema(self.weighted, self.texts, self.marked))


def _write_metadata(folder: Path, shards: Sequence[Shard], schema: pa.Schema) -> None:
    """Write dataset_info.json and state.json like `Dataset.save_to_disk`, with the size and checksum of each shard."""
    from datasets import DatasetInfo, Features  # here, because importing it takes a second

    DatasetInfo(features=Features.from_arrow_schema(schema)).write_to_directory(str(folder), pretty_print=True)
    unformatted: dict[str, Any] = {"_format_columns": None, "_format_kwargs": {}, "_format_type": None}
    state = {**unformatted, "_output_all_columns": False, "_split": None}
    files = [{"filename": shard.name, "bytes": shard.bytes, "xxh3_128": shard.xxh3_128} for shard in shards]
    name = fingerprint([shard.xxh3_128 for shard in shards], digits=16)
    write_json(folder / STATE, {**state, "_fingerprint": name, "_data_files": files})


def has_document_columns(folder: Path) -> bool:
    """Return whether every shard of a dataset has MARK, so that its DOCUMENT_COLUMNS are valid."""
    for shard in read_shards(folder):
        with pa.memory_map(str(folder / shard.name)) as source, pa.ipc.open_stream(source) as reader:
            if not is_marked(reader.schema):
                return False
    return True


def is_marked(schema: pa.Schema) -> bool:
    """Return whether a shard's schema has MARK."""
    return MARK.items() <= (schema.metadata or {}).items()


@cache
def _schema(weighted: bool, texts: tuple[str, ...], marked: bool) -> pa.Schema:
    from datasets import Features  # here, because importing it takes a second

    columns = {**TOKEN_COLUMNS, **DOCUMENT_COLUMNS, **dict.fromkeys(texts, pa.large_string())}
    schema = Features.from_arrow_schema(pa.schema({**columns, **WEIGHT_COLUMN} if weighted else columns)).arrow_schema
    return schema.with_metadata({**schema.metadata, **(MARK if marked else {})})


def _add_weights(shard: Path, schema: pa.Schema) -> ChecksumFile:
    """Rewrite a shard, batch by batch, with the column loss_weight = 1; return what was written."""
    with (
        atomic_write(shard) as partial,
        pa.memory_map(str(shard)) as source,
        pa.ipc.open_stream(source) as reader,
        ChecksumFile(partial) as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in reader:
            ids = batch.column("input_ids")
            weights = pa.ListArray.from_arrays(ids.offsets, pa.array(np.ones(len(ids.values), np.float32)))
            writer.write_batch(pa.RecordBatch.from_arrays([*batch.columns, weights], schema=schema))
    return sink
