"""What tokenised files follow from, as one digest: the parts that every cache shares.

The tokenised dataset on disk: Arrow shards as `datasets.load_from_disk` maps them, written as a stream.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl_ext.text.documents import Documents
from verl_ext.text.sources import is_url, remote_facts


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
    """What decides how a tokenizer splits text, and nothing that a call changes."""
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


SHARD_BYTES = 500 * 1000 * 1000
BATCH_TOKENS = 1 << 22  # of a record batch, about: each costs 60 µs and 5 kB wherever the dataset is opened
TOKEN_BYTES = 9  # input_ids, loss_mask and category_ids
COLUMNS = {
    "input_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.int8()),
    "category_ids": pa.list_(pa.int32()),
    "length": pa.int32(),
}
WEIGHT_COLUMN = {"loss_weight": pa.list_(pa.float32())}


class DatasetWriter:
    """Appends results to the shards of `folder`; nothing there loads before `close()`.

    The column `loss_weight` exists only when some target has a weight, which may be known late: shards written before
    the first such record get the column, filled with 1, at the end.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder = folder
        self.shard_bytes = shard_bytes
        self.weighted = False
        self._shards: list[tuple[Path, bool]] = []  # path, has loss_weight
        self._pending: list[pa.RecordBatch] = []
        self._pending_tokens = 0
        self._sink: Any = None
        self._stream: Any = None
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, result: Documents) -> None:
        """Write a chunk's documents."""
        if not len(result.lengths):
            return
        if result.weights is not None and not self.weighted:
            self._write_pending()
            self.weighted = True
            self._end_shard()
        self._pending.append(self._batch(result))
        self._pending_tokens += len(result.input_ids)
        if self._pending_tokens >= BATCH_TOKENS or self._pending_tokens * TOKEN_BYTES >= self.shard_bytes:
            self._write_pending()

    def _write_pending(self) -> None:
        """The results added since the last time, as one record batch."""
        if not self._pending:
            return
        table = pa.Table.from_batches(self._pending).combine_chunks()
        self._pending, self._pending_tokens = [], 0
        if self._stream is None:
            self._begin_shard()
        self._stream.write_table(table)
        if self._sink.tell() >= self.shard_bytes:
            self._end_shard()

    def close(self) -> None:
        """Finish the shards and write the two files that make the folder a dataset."""
        self._write_pending()
        self._end_shard()
        files = []
        for number, (path, has_weights) in enumerate(self._shards):
            if self.weighted and not has_weights:
                _add_weights(path, _schema(True))
            files.append(f"data-{number:05d}-of-{len(self._shards):05d}.arrow")
            os.replace(path, self.folder / files[-1])
        self._write_metadata(files)

    def abandon(self) -> None:
        """Let go of the open shard, after an error."""
        stream, sink = self._stream, self._sink
        self._stream = self._sink = None
        try:
            if stream is not None:
                stream.close()
        finally:  # the stream's last bytes may find the disk full, which a file that stays open keeps so
            if sink is not None:
                sink.close()

    def _batch(self, result: Documents) -> pa.RecordBatch:
        mask = result.loss_mask
        category = result.category_id if result.category_ids is None else np.repeat(result.category_ids, result.lengths)
        categories = np.where(mask == 1, np.int32(category), np.int32(0))
        offsets = np.concatenate([[0], np.cumsum(result.lengths, dtype=np.int64)])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise OverflowError("a chunk of records must have fewer than 2^31 tokens")
        flat = [result.input_ids, mask, categories]
        if self.weighted:
            flat.append(np.ones(len(mask), np.float32) if result.weights is None else result.weights)
        for array in (*flat, result.lengths):
            self._hash.update(np.ascontiguousarray(array).data)
        rows = pa.array(offsets.astype(np.int32))
        columns = [pa.ListArray.from_arrays(rows, pa.array(values)) for values in flat]
        columns.insert(3, pa.array(result.lengths))
        return pa.RecordBatch.from_arrays(columns, schema=_schema(self.weighted))

    def _begin_shard(self) -> None:
        path = self.folder / f"part-{len(self._shards):05d}.arrow"
        self._shards.append((path, self.weighted))
        self._sink = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._sink, _schema(self.weighted))

    def _end_shard(self) -> None:
        self.abandon()

    def _write_metadata(self, files: list[str]) -> None:
        """dataset_info.json and state.json as `datasets` itself writes them for these columns, naming our shards."""
        import datasets

        schema = _schema(self.weighted)
        empty = datasets.Dataset(schema.empty_table())
        template = self.folder / "metadata"
        with _no_progress_bars():
            empty.save_to_disk(template)
        os.replace(template / "dataset_info.json", self.folder / "dataset_info.json")
        state = json.loads((template / "state.json").read_text(encoding="utf-8"))
        state["_data_files"] = [{"filename": name} for name in files]
        state["_fingerprint"] = self._hash.hexdigest()
        shutil.rmtree(template)
        (self.folder / "state.json").write_text(json.dumps(state, indent=2, sort_keys=True), encoding="utf-8")


@cache
def _schema(weighted: bool) -> pa.Schema:
    from datasets import Features

    plain = pa.schema({**COLUMNS, **WEIGHT_COLUMN} if weighted else COLUMNS)
    return Features.from_arrow_schema(plain).arrow_schema


class _no_progress_bars:
    """No bar of `datasets` for a file of no rows; the user's own setting afterwards."""

    def __enter__(self) -> None:
        import datasets

        self.were_on = datasets.are_progress_bars_disabled() is False
        datasets.disable_progress_bars()

    def __exit__(self, *error: object) -> None:
        import datasets

        if self.were_on:
            datasets.enable_progress_bars()


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
            ones = pa.array(np.ones(len(ids.values), np.float32))
            weights = pa.ListArray.from_arrays(ids.offsets, ones)
            writer.write_batch(pa.RecordBatch.from_arrays([*batch.columns, weights], schema=schema))
    os.replace(target, path)
