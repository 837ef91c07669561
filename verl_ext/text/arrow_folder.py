"""A tokenized dataset's folder: its columns, writer and list of shards.

    data-00000-of-00002.arrow, data-00001-of-00002.arrow, dataset_info.json, and state.json:
    {"_fingerprint": "7c1e…", "_data_files": [{"filename": "data-00000-of-00002.arrow",
        "bytes": 81023, "xxh3_128": "52d0…"}, …], …}      size and checksum, only if verl-ext wrote the shard

`datasets.load_from_disk` opens these files. Every row is a document: its tokens, then the facts that a scan of its
tokens would give. Only shards with MARK, which are written here, have valid facts. If `datasets` saves a shard again,
it loses MARK and its checksum, and its tokens are read instead.
"""

import contextlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verl_ext.cache import fingerprint
from verl_ext.files import ChecksumFile, atomic_write, write_json
from verl_ext.packing.shared import BLOCK, SHORTER, block_hashes
from verl_ext.text.read.shards import STATE
from verl_ext.text.tokens.documents import UNIT_COLUMNS, Documents

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
    "document_category": pa.int32(),  # that of its record, also of one without a target
}
FIRST_BLOCK = "first_block"  # the bits of `block_hashes` of the first BLOCK tokens, or of SHORTER
WEIGHT_COLUMN = {"loss_weight": pa.list_(pa.float32())}
# Of answers: the documents of a preference in its first row, 0 in the others; 1 preferred, -1 rejected, 0 neither.
ANSWER_COLUMNS = {name: pa.from_numpy_dtype(kind) for name, kind in UNIT_COLUMNS.items()}
_ALONE = {"unit": 1, "answer": 0, "pair_weight": 1.0}  # of a document that is not an answer
MARK = {b"verl_ext.document_columns": b"1"}  # metadata of a shard whose DOCUMENT_COLUMNS are valid


def count_targets(loss_mask: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Count the targets of documents; a first token never is one.

    starts: the first token of each, int64[D]; none is empty.
    """
    return np.add.reduceat(loss_mask, starts, dtype=np.int32) - loss_mask[starts]


def first_blocks(ids: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the hash of each document's first BLOCK tokens, SHORTER without so many; starts, lengths: integer[D]."""
    hashes, whole = np.full(len(starts), SHORTER), lengths >= BLOCK
    if whole.any():
        hashes[whole] = block_hashes(np.lib.stride_tricks.sliding_window_view(ids, BLOCK)[starts[whole]])
    return hashes


class DatasetWriter:
    """A writer of a folder, which loads only after `close()`.

    texts: the names of further columns; first_blocks: whether to write FIRST_BLOCK.

    The column `loss_weight` exists only if a target has a weight, and ANSWER_COLUMNS only if a document is an answer.
    Shards written before the first such record get the columns in `close()`, with the values of other documents.
    Documents with categories of their own tokens have no category as a whole, so that a folder of them has no MARK.
    """

    def __init__(
        self, folder: Path, shard_bytes: int = SHARD_BYTES, texts: Sequence[str] = (), first_blocks: bool = False
    ) -> None:
        self.folder, self.shard_bytes, self.texts = folder, shard_bytes, tuple(texts)
        self.first_blocks = first_blocks
        self.weighted, self.answered, self.marked = False, False, True
        self._shards: list[tuple[ChecksumFile, pa.Schema]] = []
        self._pending: list[pa.RecordBatch] = []
        self._pending_tokens = 0
        self._stream: Any = None
        self._open = contextlib.ExitStack()

    def add(self, documents: Documents) -> None:
        """Append a batch of documents."""
        if not len(documents.lengths):
            return
        self.marked = documents.token_categories is None
        weighted = self.weighted or documents.weights is not None
        answered = self.answered or documents.units is not None
        if (weighted, answered) != (self.weighted, self.answered):
            self._write_pending()
            self.weighted, self.answered = weighted, answered
            self._close_shard()  # all rows of a shard have the columns, or none
        self._pending.append(self._batch(documents))
        self._pending_tokens += len(documents.input_ids)
        if self._pending_tokens >= BATCH_TOKENS or self._pending_tokens * TOKEN_BYTES >= self.shard_bytes:
            self._write_pending()

    def close(self) -> None:
        """Finish the shards, and name them as `Dataset.save_to_disk` does."""
        from datasets import DatasetInfo, Features  # here, because importing it takes a second

        self._write_pending()
        self._close_shard()
        schema, files, checksums = self._schema, [], []
        for number, (file, own) in enumerate(self._shards):
            path = Path(file.name)
            written = file if own.names == schema.names else _add_columns(path, schema)
            named = self.folder / f"data-{number:05d}-of-{len(self._shards):05d}.arrow"
            os.replace(path, named)
            files.append({"filename": named.name, "bytes": written.size, "xxh3_128": written.checksum})
            checksums.append(written.checksum)
        info = DatasetInfo(features=Features.from_arrow_schema(schema))
        info.write_to_directory(str(self.folder), pretty_print=True)
        unformatted: dict[str, Any] = {"_format_columns": None, "_format_kwargs": {}, "_format_type": None}
        state = {**unformatted, "_output_all_columns": False, "_split": None}
        name = fingerprint(checksums, digits=16)
        write_json(self.folder / STATE, {**state, "_fingerprint": name, "_data_files": files})

    def abandon(self) -> None:
        """Close the open shard after an error."""
        self._close_shard()

    def _close_shard(self) -> None:
        self._stream = None
        self._open.close()  # closes the file even if the stream's last write fails on a full disk, to free its space

    @property
    def _schema(self) -> pa.Schema:
        return _schema_of(self.weighted, self.answered, self.texts, self.marked, self.first_blocks)

    def _write_pending(self) -> None:
        if not self._pending:
            return
        table = pa.Table.from_batches(self._pending).combine_chunks()
        self._pending, self._pending_tokens = [], 0
        if self._stream is None:
            file = self._open.enter_context(ChecksumFile(self.folder / f"part-{len(self._shards):05d}.arrow"))
            self._shards.append((file, self._schema))
            self._stream = self._open.enter_context(pa.ipc.new_stream(file, self._schema))
        self._stream.write_table(table)
        if self._shards[-1][0].size >= self.shard_bytes:
            self._close_shard()

    def _batch(self, documents: Documents) -> pa.RecordBatch:
        ids, mask, lengths = documents.input_ids, documents.loss_mask, documents.lengths
        ends = np.cumsum(lengths, dtype=np.int64)
        if ends[-1] > np.iinfo(np.int32).max:
            raise OverflowError("a chunk of records must have fewer than 2^31 tokens")
        category = np.full(len(lengths), documents.category_id, np.int32)
        if documents.category_ids is not None:
            category = documents.category_ids.astype(np.int32)
        # A token that is not a target has no category.
        of_tokens = documents.token_categories
        if of_tokens is None:
            of_tokens = np.where(mask == 1, np.repeat(category, lengths), np.int32(0))
        tokens = [ids, mask, of_tokens]
        if self.weighted:
            tokens.append(np.ones(len(mask), np.float32) if documents.weights is None else documents.weights)
        starts = ends - lengths
        lowest, highest = (reduce.reduceat(ids, starts) for reduce in (np.minimum, np.maximum))
        facts: list[NDArray[Any]] = [
            lengths,
            count_targets(mask, starts),
            lowest,
            highest,
            documents.full_lengths,
            category,
        ]
        # The schema's order: lists of tokens, numbers, hashes, texts and answers of documents, token weights.
        rows = pa.array(np.concatenate([[0], ends]).astype(np.int32))
        lists = [pa.ListArray.from_arrays(rows, pa.array(values)) for values in tokens]
        numbers = [pa.array(values.astype(np.int32, copy=False)) for values in facts]
        hashes = [pa.array(first_blocks(ids, starts, lengths).view(np.int64))] if self.first_blocks else []
        texts = [pa.array(documents.texts[name], pa.large_string()) for name in self.texts]
        answers = _alone(len(lengths)) if documents.units is None else list(map(pa.array, documents.units.values()))
        columns = [*lists[:3], *numbers, *hashes, *texts, *(answers if self.answered else ()), *lists[3:]]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


@cache
def _schema_of(weighted: bool, answered: bool, texts: tuple[str, ...], marked: bool, hashed: bool) -> pa.Schema:
    from datasets import Features  # here, because importing it takes a second

    hashes = {FIRST_BLOCK: pa.int64()} if hashed else {}
    columns = {**TOKEN_COLUMNS, **DOCUMENT_COLUMNS, **hashes, **dict.fromkeys(texts, pa.large_string())}
    columns |= ANSWER_COLUMNS if answered else {}
    schema = Features.from_arrow_schema(pa.schema({**columns, **WEIGHT_COLUMN} if weighted else columns)).arrow_schema
    return schema.with_metadata({**schema.metadata, **(MARK if marked else {})})


def _alone(rows: int) -> list[pa.Array]:
    """Return ANSWER_COLUMNS of documents that are not answers."""
    return [pa.array(np.full(rows, _ALONE[name], kind)) for name, kind in UNIT_COLUMNS.items()]


def _add_columns(shard: Path, schema: pa.Schema) -> ChecksumFile:
    """Rewrite a shard with the columns that it lacks; return the file."""
    with (
        atomic_write(shard) as partial,
        pa.memory_map(str(shard)) as source,
        pa.ipc.open_stream(source) as reader,
        ChecksumFile(partial) as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in reader:
            ids, given = batch.column("input_ids"), dict(zip(batch.schema.names, batch.columns, strict=True))
            weights = pa.ListArray.from_arrays(ids.offsets, pa.array(np.ones(len(ids.values), np.float32)))
            columns = {"loss_weight": weights, **dict(zip(UNIT_COLUMNS, _alone(len(ids)), strict=True)), **given}
            writer.write_batch(pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema))
    return sink
