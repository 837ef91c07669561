"""Megatron's indexed format: building it, its sample index, random samples.

megatron-core is compared if it is installed; both must write the same bytes, build the same indices and read the same
tokens, or the run ends.
"""

import filecmp
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import in_own_process
from benchmarks.harness import Row, Sizes, Turns, option, table, take_turns
from benchmarks.meters import measured, run_command, seconds
from benchmarks.texts import write_texts
from verl_ext.data.stream.megatron.index import IndexWriter, TokenIndex
from verl_ext.data.stream.megatron.samples import build_sample_indices
from verl_ext.text.tokens.tokenizer import ModelOptions, load_tokenizer

OURS, PEER = "verl-ext", "megatron-core"
VOCABULARY = 6400
SEED = 1234
SIGMA = 0.6  # standard deviation of the logarithm of a document's length
READS_PER_TURN = 500
LINES_PER_JOB = 32  # as in preprocess_data.py
QUICK = ["megabytes=0.5", "workers=1", "repeats=1", "tokens=50000", "seq_len=32", "mean_tokens=[20]"]
QUICK += ["read_tokens=20000", "reads=10"]


class Options(Sizes):
    megabytes: float = option(48.0, "text of the build", above=0)
    workers: int = option(os.cpu_count() or 1, "processes of each builder")
    repeats: int = option(3, "turns")
    tokens: int = option(10**9, "tokens of the sample index")
    mean_tokens: list[int] = option([200, 2000], "tokens of a document, on average, a row each")
    seq_len: int = option(1024, "tokens of a sample")
    read_tokens: int = option(5 * 10**7, "tokens of the corpus that samples are read from")
    reads: int = option(20_000, "samples that are read")


def peer() -> Any:
    """Import megatron-core's datasets without warnings; None without it."""
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        import megatron.core.datasets.gpt_dataset
        import megatron.core.datasets.helpers

        return megatron.core.datasets


@table(
    "{name} | megabytes {megabytes:.1f} | tokens {tokens:,} | tokens/s {speed.median:,.0f} | "
    "× the tokenizer {ratio:.2f} | start, s {start.median:.1f}"
)
def build(options: Options, folder: Path) -> Iterable[Row]:
    """Text to .bin and .idx."""
    lines, texts = write_texts(options.megabytes, VOCABULARY, folder, np.random.default_rng(SEED))
    one, path = folder / "one.jsonl", str(folder / "tokenizer")
    one.write_text(json.dumps({"text": texts[0]}) + "\n")
    tokenizer, counts = load_tokenizer(ModelOptions(path)), set()

    def tokenizer_alone() -> tuple[float, float]:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"  # for this process; workers turn it off
        return seconds(lambda: counts.add(sum(map(len, tokenizer(texts)["input_ids"])))), 0.0

    def whole(builder: Callable[[Path], Any]) -> tuple[float, float]:
        start, took = seconds(lambda: builder(one)), seconds(lambda: builder(lines))
        return took - start, start

    def ours(source: Path) -> None:
        command = [sys.executable, "-m", "verl_ext", "index", f"sources={{texts:{source}}}", "overwrite=true"]
        run_command([*command, f"output_dir={folder / OURS}", f"model.path={path}", f"num_workers={options.workers}"])

    def theirs(source: Path) -> None:
        ended = in_own_process(build_as_peer, source, path, folder / PEER, options.workers)
        if "failed" in ended:
            raise RuntimeError(f"{PEER}: {ended['failed']}")

    contestants = {"tokenizer alone": tokenizer_alone, "verl-ext index": partial(whole, ours)}
    contestants |= {PEER: partial(whole, theirs)} if peer() else {}
    turns = take_turns(contestants, options.repeats)
    if peer():
        same_files(folder)
    (tokens,), megabytes = counts, lines.stat().st_size / 1e6
    alone = Turns(took for took, _ in turns["tokenizer alone"])
    for name, of_one in turns.items():
        took, start = (Turns(of_part) for of_part in zip(*of_one, strict=True))
        figures = {"speed": Turns(tokens / each for each in took), "ratio": alone / took, "start": start}
        yield {"name": name, "megabytes": megabytes, "tokens": tokens, **figures}


def same_files(folder: Path) -> None:
    for name in ("texts.bin", "texts.idx"):
        if not filecmp.cmp(folder / OURS / name, folder / PEER / name, shallow=False):
            raise RuntimeError(f"the builders wrote different {name}")


def build_as_peer(source: Path, tokenizer: str, output: Path, workers: int) -> Row:
    """Run the builder of Megatron's script, fed as that script feeds it."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    builder = IndexedDatasetBuilder(f"{output}/texts.bin", dtype=DType.optimal_dtype(VOCABULARY))
    pools = multiprocessing.get_context("forkserver")
    with open(source, encoding="utf-8") as lines, pools.Pool(workers, _load, (tokenizer,)) as pool:
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
    builders = {OURS: our_indices, **({PEER: their_indices} if peer() else {})}
    for mean in options.mean_tokens:
        work = options.tokens, mean, options.seq_len
        rows = [
            {"mean": mean, "name": name, **in_own_process(sample_index, builder, *work)}
            for name, builder in builders.items()
        ]
        if len({row.get("digest", "") for row in rows}) > 1:
            raise RuntimeError(f"the builders made different indices: {rows}")
        yield from rows


def sample_index(builder: Callable[..., tuple[np.ndarray, ...]], tokens: int, mean: int, seq_len: int) -> Row:
    lengths = drawn_lengths(tokens, mean)
    builder(lengths[:1000], seq_len)  # loads imports and library pages
    with measured(private=True) as figures:
        arrays = builder(lengths, seq_len)
    digest = hashlib.sha256(b"".join(hashlib.sha256(np.ascontiguousarray(array)).digest() for array in arrays))
    return {"documents": len(lengths), "samples": len(arrays[2]), "digest": digest.hexdigest(), **figures}


def drawn_lengths(tokens: int, mean: int) -> np.ndarray:
    """Draw lognormal lengths int32[D] that sum to `tokens`."""
    rng = np.random.default_rng(SEED)
    draws = rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, int(1.1 * tokens / mean) + 100)
    ends = np.cumsum(np.maximum(draws, 1).astype(np.int64))
    count = int(np.searchsorted(ends, tokens)) + 1
    assert count <= len(ends), "10 % more documents than the mean needs are drawn"
    ends[count - 1] = tokens
    return np.diff(ends[:count], prepend=0).astype(np.int32)


def our_indices(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, ...]:
    found = build_sample_indices(lengths, None, seq_len, None, SEED)
    return found.document_index, found.sample_index, found.shuffle_index


def their_indices(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, ...]:
    gpt_dataset, random = peer().gpt_dataset, np.random.RandomState(SEED)
    order = gpt_dataset._build_document_index(np.arange(len(lengths), dtype=np.int32), 1, random, False)
    tokens = int(lengths.sum(dtype=np.int64))
    starts = peer().helpers.build_sample_idx(lengths, order, seq_len, 1, tokens, True, True)
    return order, starts, gpt_dataset._build_shuffle_index(len(starts) - 1, len(starts) - 1, random)


@table("tokens of a document {mean:,} | {name} | µs a sample {us.median:.1f}")
def reads(options: Options, folder: Path) -> Iterable[Row]:
    """Random samples from a warm map."""

    def us(read: Callable[[int], Any], drawn: list[int]) -> float:
        return seconds(lambda: [read(k) for k in drawn]) / len(drawn) * 1e6

    for mean in options.mean_tokens:
        readers, count = build_readers(options, mean, folder)
        size = (-(-options.reads // READS_PER_TURN), READS_PER_TURN)
        turns = np.random.default_rng(SEED).integers(0, count, size).tolist()
        contestants = {name: partial(next, map(partial(us, read), turns)) for name, read in readers.items()}
        for name, took in take_turns(contestants, len(turns)).items():
            yield {"mean": mean, "name": name, "us": Turns(took)}


def build_readers(options: Options, mean: int, folder: Path) -> tuple[dict[str, Callable[[int], Any]], int]:
    """Return the readers of a corpus, and its number of samples."""
    prefix = folder / f"reads_{mean}"
    writer = IndexWriter(prefix, np.uint16)
    lengths = drawn_lengths(options.read_tokens, mean)
    writer.add(np.random.default_rng(SEED).integers(0, VOCABULARY, options.read_tokens, dtype=np.uint16), lengths)
    writer.close()
    index = TokenIndex(prefix)
    plan = build_sample_indices(index.lengths, None, options.seq_len, None, SEED)
    index.token_range()  # warms every page of the map
    readers: dict[str, Callable[[int], Any]] = {OURS: lambda k: index.gather(*plan.pieces(k)).astype(np.int64)}
    if peer():
        theirs = their_dataset(prefix, len(lengths), options.seq_len, folder)
        readers[PEER] = lambda k: theirs._query_document_sample_shuffle_indices(k)[0]
        readers[f"{PEER}, its whole row"] = theirs.__getitem__
        for k in range(min(100, len(plan))):
            np.testing.assert_array_equal(readers[OURS](k), readers[PEER](k))
    return readers, len(plan)


def their_dataset(prefix: Path, documents: int, seq_len: int, folder: Path) -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    off = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
    tokenizer = types.SimpleNamespace(vocab_size=VOCABULARY, eod=0, pad=-1, unique_identifiers={})
    source = {"blend": ([str(prefix)], None), "split": "1,0,0", "path_to_cache": str(folder / "cache")}
    config = peer().gpt_dataset.GPTDatasetConfig(
        random_seed=SEED, sequence_length=seq_len, tokenizer=tokenizer, **source, **dict.fromkeys(off, False)
    )
    parts = IndexedDataset(str(prefix)), str(prefix), np.arange(documents, dtype=np.int32), None, Split.train
    return peer().gpt_dataset.GPTDataset(*parts, config)
