"""Contestants of index.py's first table: all tokenize the same texts, and all but the tokenizer write an index.

| contestant | what it does |
|---|---|
| `tokenizer` | `tokenizer(texts)` with its own threads, in memory: it reads and writes no file |
| `in process` | `write_text_indexes` with the same threads, as in a training process |
| `command` | `verl-ext index` with worker processes |
| `megatron-core` | like its `preprocess_data.py`: a pool of processes, one document a call, `IndexedDatasetBuilder` |

Contestants with worker processes are timed from the first result on, without counting each worker's first result; the
time before is their start. Processor seconds are those of this process, its threads included, and of the workers.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl_ext.commands.index import load_text_tokenizer
from verl_ext.data.megatron.text_index import TextIndexes, write_text_indexes
from verl_ext.text.plain_text import TextOptions, TextTokenizer, record_texts
from verl_ext.text.readers import Batch, read_batches
from verl_ext.text.sources import SourceFile, find_source_files
from verl_ext.text.tokenizer import ModelOptions, tokenizer_module
from verl_ext.text.workers import ordered_results

LINES_PER_JOB = 32  # as in preprocess_data.py
WORDS = 20_000


class Speed(NamedTuple):
    """The tokens, seconds and processor seconds (of all processes) of the timed part, and the seconds before it."""

    tokens: int
    seconds: float
    processor_seconds: float
    start: float = 0.0


class Corpus:
    """The texts in memory and as JSONL, and the tokenizer that encodes them."""

    def __init__(self, folder: Path, texts: list[str], tokenizer_folder: Path, workers: int) -> None:
        self.folder, self.texts, self.workers = folder, texts, workers
        self.tokenizer_folder = str(tokenizer_folder)
        self.path = folder / "texts.jsonl"
        with open(self.path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        self.files: list[SourceFile] = find_source_files({"texts": [str(self.path)]})
        self.tokenizer = load_text_tokenizer(ModelOptions(self.tokenizer_folder), TextOptions()).tokenizer


def tokenizer_alone(corpus: Corpus) -> Speed:
    """Measure the tokenizer's own batch speed."""
    return _timed_here(lambda: sum(map(len, corpus.tokenizer(corpus.texts)["input_ids"])))


def in_process(corpus: Corpus) -> Speed:
    """Measure ours in this process."""
    prefixes = {"texts": _fresh(corpus, "threads")}

    def write() -> int:
        tokenizer = TextTokenizer(corpus.tokenizer, TextOptions())
        return write_text_indexes(corpus.files, tokenizer, prefixes)["texts"].tokens

    return _timed_here(write)


def command(corpus: Corpus) -> Speed:
    """Measure ours with worker processes."""
    make = partial(load_text_tokenizer, ModelOptions(corpus.tokenizer_folder), TextOptions())
    batches = read_batches(corpus.files, lambda source: False)
    results = ordered_results(make, _tokenize, batches, corpus.workers, name="tokenize", preload=[tokenizer_module()])
    dtype = TextTokenizer(corpus.tokenizer, TextOptions()).dtype
    indexes = TextIndexes({"texts": _fresh(corpus, "workers")}, dtype)
    try:
        speed = _timed(results, lambda result: indexes.add(result).tokens)
        indexes.close()
    finally:
        indexes.abandon()
    return speed


def megatron_core(corpus: Corpus) -> Speed:
    """Measure the builder of Megatron's own script, fed as that script feeds it."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix = _fresh(corpus, "peer")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(len(corpus.tokenizer)))

    def add(ids: list[int]) -> int:
        builder.add_document(ids, [len(ids)])
        return len(ids)

    state = (corpus.tokenizer_folder, corpus.tokenizer.eos_token_id)
    with open(corpus.path, encoding="utf-8") as lines:
        if corpus.workers == 1:  # in this process, like ours
            _load(*state)
            speed = _timed(map(_encode, lines), add)
        else:
            with multiprocessing.get_context("forkserver").Pool(corpus.workers, _load, state) as pool:
                speed = _timed(pool.imap(_encode, lines, LINES_PER_JOB), add)
    builder.finalize(f"{prefix}.idx")
    return speed


CONTESTANTS: dict[str, Callable[[Corpus], Speed]] = {
    "tokenizer": tokenizer_alone,
    "in process": in_process,
    "command": command,
    "megatron-core": megatron_core,
}


def _timed_here(work: Callable[[], int]) -> Speed:
    started, processor = time.perf_counter(), time.process_time()
    tokens = work()
    return Speed(tokens, time.perf_counter() - started, time.process_time() - processor)


# A worker's result, the worker's id, and the processor seconds that it had used by then.
Stamped = tuple[Any, int, float]


def _timed(results: Iterable[Stamped], add: Callable[[Any], int]) -> Speed:
    """Time from the first result to the last."""
    began = started = time.perf_counter()
    processor, tokens = 0.0, 0
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for result, worker, used in results:
        if not first:
            started, processor = time.perf_counter(), time.process_time()
        made = add(result)
        tokens += made if worker in first else 0
        first.setdefault(worker, used)
        last[worker] = used
    others = [worker for worker in first if worker != os.getpid()]
    processor = time.process_time() - processor + sum(last[worker] - first[worker] for worker in others)
    return Speed(tokens, time.perf_counter() - started, processor, started - began)


def _fresh(corpus: Corpus, name: str) -> Path:
    """Return a prefix after removing its two files."""
    for suffix in (".bin", ".idx"):
        (corpus.folder / f"{name}{suffix}").unlink(missing_ok=True)
    return corpus.folder / name


def _tokenize(tokenizer: TextTokenizer, batch: Batch) -> Stamped:
    return tokenizer.tokenize(batch), os.getpid(), time.process_time()


# The state of a worker process of megatron-core's contestant.
_worker: dict[str, Any] = {}


def _load(folder: str, eos: int) -> None:
    _worker.update(tokenizer=load_text_tokenizer(ModelOptions(folder), TextOptions()).tokenizer, eos=eos)


def _encode(line: str) -> Stamped:
    ids = _worker["tokenizer"](json.loads(line)["text"], add_special_tokens=False)["input_ids"]
    ids.append(_worker["eos"])
    return ids, os.getpid(), time.process_time()


def made_up_texts(megabytes: float, rng: np.random.Generator) -> list[str]:
    """Make documents of about 200 words whose frequencies follow Zipf's law, as in a language."""
    letters = np.array(list("eeettaaoinshrdlucmfwypvbgkjqxz"))
    vocabulary = np.array(["".join(rng.choice(letters, rng.integers(1, 11))) for _ in range(WORDS)])
    share = 1 / np.arange(1, WORDS + 1)
    texts, size = [], 0
    while size < megabytes * 1e6:
        words = rng.choice(vocabulary, int(rng.lognormal(np.log(170), 0.6)) + 1, p=share / share.sum())
        texts.append(" ".join(words) + ".\n")
        size += len(texts[-1])
    return texts


def read_texts(paths: list[str], text_key: list[str], megabytes: float) -> Iterator[str]:
    """Read texts from files of any format that the command takes, up to a number of megabytes."""
    options = TextOptions(text_key=text_key, on_bad_record="skip")
    left = megabytes * 1e6
    for batch in read_batches(find_source_files({"text": paths}), lambda source: False):
        for text in (text for _, text in record_texts(batch, options) if isinstance(text, str)):
            if left <= 0:
                return
            left -= len(text)
            yield text
