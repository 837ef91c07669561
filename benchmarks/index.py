"""Megatron's indexed format: building it from text, its sample index, the order of blends, random samples.

Text, tokenizer and corpora are made up. megatron-core is compared if it is installed (`pip install megatron-core`);
both must write the same bytes, build the same indices and read the same tokens, or the run ends.

`build` has tokens per second against the tokenizer's own batch call on texts in memory, its threads on all cores. The
peer works like its `preprocess_data.py`: a pool of processes, one document a call, `IndexedDatasetBuilder`. Both are
whole commands; their start, measured on one text, is not counted. `samples` has one epoch's three indices over lengths
alone, in a process each: seconds of one core, peak private memory above the lengths. `blend` has the order of samples
by Megatron's rule beside megatron-core's compiled loop. `reads` has random samples through a warm map on one core; a
whole row is the result of `GPTDataset[i]`: tokens, labels, masks and positions as tensors.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import ROOT, in_own_process
from benchmarks.harness import Row, Turns, table, take_turns
from benchmarks.meters import PrivatePeak, seconds
from benchmarks.texts import first_line, write_texts
from verl_ext import options
from verl_ext.data.stream.megatron.blend import megatron_blend_order, normalised
from verl_ext.data.stream.megatron.index import IndexWriter, TokenIndex
from verl_ext.data.stream.megatron.samples import build_sample_indices
from verl_ext.options import option
from verl_ext.text.tokens.tokenizer import ModelOptions, load_tokenizer

OURS, PEER = "verl-ext", "megatron-core"
VOCABULARY = 6400
SEED = 1234
SIGMA = 0.6  # standard deviation of the logarithm of a document's length
READS_PER_TURN = 500
LINES_PER_JOB = 32  # as in preprocess_data.py
QUICK = [
    *("megabytes=0.5", "workers=1", "repeats=1", "tokens=50000", "seq_len=32", "mean_tokens=[20]"),
    *("read_tokens=20000", "reads=10", "blend_samples=200", "blend_sources=[4]"),
]


@dataclass(frozen=True)
class Options(options.Options):
    """Sizes of the four tables."""

    megabytes: float = option(48.0, "text of the build", above=0)
    workers: int = option(os.cpu_count() or 1, "processes of each builder", least=1)
    repeats: int = option(3, "turns", least=1)
    tokens: int = option(10**9, "tokens of the sample index", least=1)
    mean_tokens: list[int] = option([200, 2000], "tokens of a document, on average, a row each")
    seq_len: int = option(1024, "tokens of a sample", least=1)
    blend_samples: int = option(10**6, "samples of a blend", least=1)
    blend_sources: list[int] = option([3, 100], "sources of a blend, a row each")
    read_tokens: int = option(5 * 10**7, "tokens of the corpus that samples are read from", least=1)
    reads: int = option(20_000, "samples that are read", least=1)


def has_peer() -> bool:
    """Return whether megatron-core can be imported, without its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.core.datasets.gpt_dataset
            import megatron.core.datasets.helpers  # noqa: F401
    except ImportError:
        return False
    return True


@table(
    "{name} | megabytes {megabytes:.1f} | tokens {tokens:,} | tokens/s {speed.median:,.0f} | "
    "× the tokenizer {ratio:.2f} | start, s {start.median:.1f}"
)
def build(options: Options, folder: Path) -> Iterable[Row]:
    """Text to .bin and .idx."""
    lines, texts = write_texts(options.megabytes, VOCABULARY, folder, np.random.default_rng(SEED))
    one, tokenizer_folder = first_line(lines), str(folder / "tokenizer")
    tokenizer = load_tokenizer(ModelOptions(tokenizer_folder))
    counts: set[int] = set()

    def tokenizer_alone() -> tuple[float, float]:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"  # for this process; workers turn it off
        took = seconds(lambda: counts.add(sum(map(len, tokenizer(texts)["input_ids"]))))
        return took, 0.0

    def whole(builder: Callable[[Path], None]) -> tuple[float, float]:
        start, took = seconds(lambda: builder(one)), seconds(lambda: builder(lines))
        return took - start, start

    def ours(source: Path) -> None:
        command = [sys.executable, "-m", "verl_ext", "index", f"sources={{texts:{source}}}", "overwrite=true"]
        command += [f"output_dir={folder / OURS}", f"model.path={tokenizer_folder}", f"num_workers={options.workers}"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    def theirs(source: Path) -> None:
        ended = in_own_process(build_as_peer, source, tokenizer_folder, folder / PEER, options.workers)
        if "failed" in ended:
            raise RuntimeError(f"{PEER}: {ended['failed']}")

    contestants = {"tokenizer alone": tokenizer_alone, "verl-ext index": partial(whole, ours)}
    contestants |= {PEER: partial(whole, theirs)} if has_peer() else {}
    turns = take_turns(contestants, options.repeats)
    if has_peer():
        same_files(folder)
    (tokens,) = counts
    alone = Turns(took for took, _ in turns["tokenizer alone"])
    for name, measured in turns.items():
        took, start = (Turns(of_part) for of_part in zip(*measured, strict=True))
        speed = Turns(tokens / each for each in took)
        size = lines.stat().st_size / 1e6
        yield {"name": name, "megabytes": size, "tokens": tokens, "speed": speed, "ratio": alone / took, "start": start}


def same_files(folder: Path) -> None:
    """Raise RuntimeError unless both builders wrote the same bytes."""
    for suffix in (".bin", ".idx"):
        ours, theirs = ((folder / name / f"texts{suffix}").read_bytes() for name in (OURS, PEER))
        if ours != theirs:
            raise RuntimeError(f"the builders wrote different {suffix} files")


def build_as_peer(source: Path, tokenizer: str, output: Path, workers: int) -> Row:
    """Run the builder of Megatron's own script, fed as that script feeds it."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    _load(tokenizer)
    builder = IndexedDatasetBuilder(f"{output}/texts.bin", dtype=DType.optimal_dtype(len(_worker["tokenizer"])))
    with open(source, encoding="utf-8") as lines:
        if workers == 1:  # in this process, like ours
            for ids in map(_encode, lines):
                builder.add_document(ids, [len(ids)])
        else:
            with multiprocessing.get_context("forkserver").Pool(workers, _load, (tokenizer,)) as pool:
                for ids in pool.imap(_encode, lines, LINES_PER_JOB):
                    builder.add_document(ids, [len(ids)])
    builder.finalize(f"{output}/texts.idx")
    return {}


_worker: dict[str, Any] = {}  # the state of a worker process of the peer


def _load(folder: str) -> None:
    _worker["tokenizer"] = load_tokenizer(ModelOptions(folder))


def _encode(line: str) -> list[int]:
    tokenizer = _worker["tokenizer"]
    return [*tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


@table(
    "tokens of a document {mean:,} | {name} | documents {documents:,} | samples {samples:,} | "
    "seconds of one core {seconds:.2f} | peak MiB above the lengths {peak_mib:,.0f}"
)
def samples(options: Options, folder: Path) -> Iterable[Row]:
    """The sample index of one epoch."""
    for mean in options.mean_tokens:
        names = [OURS, *[PEER] * has_peer()]
        rows = [in_own_process(sample_index, name, options.tokens, mean, options.seq_len) for name in names]
        if len({row.get("digest", "") for row in rows}) > 1:
            raise RuntimeError(f"the builders made different indices: {rows}")
        yield from ({"mean": mean, "name": name, **row} for name, row in zip(names, rows, strict=True))


def sample_index(name: str, tokens: int, mean: int, seq_len: int) -> Row:
    """Build the three indices of one epoch once."""
    lengths = document_lengths(tokens, mean)
    builder = _ours if name == OURS else _theirs()
    builder(lengths[:1000], seq_len)  # loads imports and library pages
    with PrivatePeak() as peak:
        started = time.process_time()
        arrays = builder(lengths, seq_len)
        took = time.process_time() - started
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    found = {"documents": len(lengths), "samples": len(arrays[2]), "seconds": took, "peak_mib": peak.peak / 2**20}
    return {**found, "digest": digest.hexdigest()}


def document_lengths(tokens: int, mean: int) -> np.ndarray:
    """Draw lognormal lengths int32[D] that sum to `tokens`."""
    rng = np.random.default_rng(SEED)
    draws = rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, int(1.1 * tokens / mean) + 100)
    ends = np.cumsum(np.maximum(draws, 1).astype(np.int64))
    count = int(np.searchsorted(ends, tokens)) + 1
    assert count <= len(ends), "10 % more documents than the mean needs are drawn"
    ends[count - 1] = tokens
    return np.diff(ends[:count], prepend=0).astype(np.int32)


def _ours(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, ...]:
    found = build_sample_indices(lengths, None, seq_len, None, SEED)
    return found.document_index, found.sample_index, found.shuffle_index


def _theirs() -> Callable[[np.ndarray, int], tuple[np.ndarray, ...]]:
    """Return a function that does GPTDataset's work for one epoch, on lengths."""
    has_peer()  # imports it without its warnings
    from megatron.core.datasets import gpt_dataset, helpers

    def peer(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, ...]:
        random = np.random.RandomState(SEED)
        documents = np.arange(len(lengths), dtype=np.int32)
        order = gpt_dataset._build_document_index(documents, 1, random, False)
        tokens = int(lengths.sum(dtype=np.int64))
        starts = helpers.build_sample_idx(lengths, order, seq_len, 1, tokens, True, True)
        count = len(starts) - 1
        return order, starts, gpt_dataset._build_shuffle_index(count, count, random)

    return peer


@table(
    "samples {samples:,} | sources {sources} | verl-ext, s {ours.median:.3f} | megatron-core, s {theirs.median:.3f} | "
    "ratio {ratio:.2f}"
)
def blend(options: Options, folder: Path) -> Iterable[Row]:
    """The order of a blend's samples."""
    for sources in options.blend_sources:
        weights = np.random.default_rng(SEED).uniform(0.01, 1, sources)
        orders = {OURS: partial(megatron_blend_order, weights.tolist(), options.blend_samples)}
        orders |= {PEER: partial(_their_blend, weights, options.blend_samples)} if has_peer() else {}
        first, *others = (order() for order in orders.values())
        if not all(np.array_equal(*pair) for other in others for pair in zip(first, other, strict=True)):
            raise RuntimeError("the blends differ")
        timed = {name: partial(seconds, order) for name, order in orders.items()}
        turns = {name: Turns(took) for name, took in take_turns(timed, options.repeats).items()}
        row: Row = {"samples": options.blend_samples, "sources": sources, "ours": turns[OURS]}
        yield row | ({"theirs": turns[PEER], "ratio": turns[OURS] / turns[PEER]} if PEER in turns else {})


def _their_blend(weights: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    from megatron.core.datasets import helpers

    source, sample = np.zeros(count, np.int16), np.zeros(count, np.int64)
    helpers.build_blending_indices(source, sample, normalised(weights.tolist()), len(weights), count, False)
    return source, sample


@table("tokens of a document {mean:,} | {name} | µs a sample {us.median:.1f} | least {us.best:.1f}")
def reads(options: Options, folder: Path) -> Iterable[Row]:
    """Random samples from a warm map."""
    for mean in options.mean_tokens:
        readers, count = build_readers(options, mean, folder)
        size = (-(-options.reads // READS_PER_TURN), READS_PER_TURN)
        drawn = np.random.default_rng(SEED).integers(0, count, size).tolist()
        contestants = {name: partial(next, _timed(read, drawn)) for name, read in readers.items()}
        for name, us in take_turns(contestants, len(drawn)).items():
            yield {"mean": mean, "name": name, "us": Turns(us)}


def _timed(read: Callable[[int], Any], drawn: list[list[int]]) -> Iterator[float]:
    """Yield the microseconds of a read for each turn."""
    for wanted in drawn:
        yield seconds(lambda wanted=wanted: [read(k) for k in wanted]) / len(wanted) * 1e6


def build_readers(options: Options, mean: int, folder: Path) -> tuple[dict[str, Callable[[int], Any]], int]:
    """Return the readers of a corpus by name, after comparing some samples, and the number of samples."""
    prefix = folder / f"reads_{mean}"
    writer = IndexWriter(prefix, np.uint16)
    lengths = document_lengths(options.read_tokens, mean)
    writer.add(np.random.default_rng(SEED).integers(0, VOCABULARY, options.read_tokens, dtype=np.uint16), lengths)
    writer.close()
    index = TokenIndex(prefix)
    plan = build_sample_indices(index.lengths, None, options.seq_len, None, SEED)
    index.token_range()  # warms every page of the map
    readers: dict[str, Callable[[int], Any]] = {OURS: lambda k: index.gather(*plan.pieces(k)).astype(np.int64)}
    if has_peer():
        theirs = _their_dataset(prefix, len(lengths), options.seq_len, folder)
        readers[PEER] = lambda k: theirs._query_document_sample_shuffle_indices(k)[0]
        readers[f"{PEER}, its whole row"] = theirs.__getitem__
        for k in range(min(100, len(plan))):
            np.testing.assert_array_equal(readers[OURS](k), readers[PEER](k))
    return readers, len(plan)


def _their_dataset(prefix: Path, documents: int, seq_len: int, folder: Path) -> Any:
    from megatron.core.datasets import gpt_dataset, indexed_dataset
    from megatron.core.datasets.utils import Split

    config = gpt_dataset.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=seq_len,
        blend=([str(prefix)], None),
        split="1,0,0",
        tokenizer=types.SimpleNamespace(vocab_size=VOCABULARY, eod=0, pad=-1, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(folder / "cache"),
    )
    low = indexed_dataset.IndexedDataset(str(prefix))
    return gpt_dataset.GPTDataset(low, str(prefix), np.arange(documents, dtype=np.int32), None, Split.train, config)
