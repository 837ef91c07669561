"""Write a tokenized dataset of millions of documents in large record batches, without Python per token or document.

Lengths are lognormal around a mean, token ids random; a document's last quarter is its target, in four categories.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value

BATCH_DOCUMENTS = 1 << 15
SHARD_BYTES = 1 << 29
BYTES_PER_TOKEN = 9  # input_ids int32, loss_mask int8, category_ids int32
SIGMA = 0.6  # standard deviation of the logarithm of a length
SHORTEST = 2
CATEGORIES = 4
KINDS = {"input_ids": "int32", "loss_mask": "int8", "category_ids": "int32"}


def write_large_dataset(folder: Path, documents: int, mean_tokens: int, vocabulary: int, seed: int = 0) -> int:
    """Write the dataset for ``datasets.load_from_disk``, and return its number of tokens."""
    features = Features({**{name: List(Value(kind)) for name, kind in KINDS.items()}, "length": Value("int32")})
    schema = features.arrow_schema
    Dataset(schema.empty_table()).save_to_disk(str(folder))  # writes the two JSON files, but no shard for no rows
    for stray in folder.glob("*.arrow"):
        stray.unlink()
    files, tokens, stream, sink = [], 0, None, None
    for batch in _batches(documents, mean_tokens, vocabulary, schema, np.random.default_rng(seed)):
        if stream is None or sink.tell() > SHARD_BYTES:
            _close(stream, sink)
            files.append(f"data-{len(files):05d}.arrow")
            sink = pa.OSFile(str(folder / files[-1]), "wb")
            stream = pa.ipc.new_stream(sink, schema)
        stream.write_batch(batch)
        tokens += len(batch.column("input_ids").values)
    _close(stream, sink)
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"] = [{"filename": name} for name in files]
    (folder / "state.json").write_text(json.dumps(state))
    return tokens


def _batches(
    documents: int, mean_tokens: int, vocabulary: int, schema: pa.Schema, rng: np.random.Generator
) -> Iterator[pa.RecordBatch]:
    for first in range(0, documents, BATCH_DOCUMENTS):
        count = min(BATCH_DOCUMENTS, documents - first)
        lengths = rng.lognormal(np.log(mean_tokens) - SIGMA**2 / 2, SIGMA, count).astype(np.int32).clip(SHORTEST)
        ends = np.cumsum(lengths, dtype=np.int32)
        offsets = np.concatenate([np.zeros(1, np.int32), ends])
        targets = np.maximum(lengths // 4, 1)
        steps = np.zeros(ends[-1] + 1, np.int8)
        steps[ends - targets] += 1  # a target begins here
        steps[ends] -= 1  # and ends before here; the next document's target begins later
        mask = np.cumsum(steps[:-1], dtype=np.int8)
        category = np.repeat(rng.integers(1, CATEGORIES + 1, count, dtype=np.int32), lengths) * mask
        flat = rng.integers(0, vocabulary, ends[-1], dtype=np.int32), mask, category
        rows = [pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)) for values in flat]
        yield pa.RecordBatch.from_arrays([*rows, pa.array(lengths)], schema=schema)


def _close(stream, sink) -> None:
    if stream is not None:
        stream.close()
        sink.close()
