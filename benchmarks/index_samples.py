"""Compare ours with megatron-core: the sample index over lengths, the order of a blend, and random reads of samples
from a warm memory map."""

import argparse
import hashlib
import multiprocessing
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.start_up import PrivatePeak, private_bytes
from verl_ext.data.megatron.blend import megatron_blend_order, normalised
from verl_ext.data.megatron.index import IndexWriter, TokenIndex
from verl_ext.data.megatron.samples import build_sample_indices

SIGMA = 0.6  # standard deviation of the logarithm of a document's length
VOCABULARY = 6400  # range of the random tokens
READS_PER_TURN = 500
SEED = 1234

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def peer_problem() -> str | None:
    """Return the reason why megatron-core is not compared, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.core.datasets.gpt_dataset
            import megatron.core.datasets.helpers  # noqa: F401
    except ImportError as error:
        return f"megatron-core: skipped, {error}"
    return None


def measure_sample_index(options: argparse.Namespace, mean: int, with_peer: bool) -> dict[str, Any]:
    """Measure seconds of one core and peak memory above the lengths in own processes; the arrays must be equal."""
    rows = {}
    for name in ("verl_ext", "megatron-core") if with_peer else ("verl_ext",):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows[name] = pool.apply(sample_index_run, (name, options.tokens, mean, options.seq_len))
    if len({row["digest"] for row in rows.values()}) > 1:
        raise RuntimeError("the builders made different indices")
    return {"mean_tokens": mean, "tokens": options.tokens, **rows}


def sample_index_run(name: str, tokens: int, mean: int, seq_len: int) -> dict[str, Any]:
    """Build the three indices of one epoch once."""
    lengths = document_lengths(tokens, mean)
    build = _ours if name == "verl_ext" else _theirs()
    build(lengths[:1000], seq_len, SEED)  # loads imports and library pages
    before = private_bytes()
    with PrivatePeak() as peak:
        started = time.process_time()
        arrays = build(lengths, seq_len, SEED)
        seconds = time.process_time() - started
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return {
        "documents": len(lengths),
        "samples": len(arrays[2]),
        "seconds": seconds,
        "peak_mib": (peak.bytes - before) / 2**20,
        "result_mib": sum(array.nbytes for array in arrays) / 2**20,
        "digest": digest.hexdigest(),
    }


def document_lengths(tokens: int, mean: int) -> np.ndarray:
    """Draw lognormal lengths int32[D] that sum to `tokens`."""
    rng = np.random.default_rng(SEED)
    draws = rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, int(1.1 * tokens / mean) + 100)
    ends = np.cumsum(np.maximum(draws, 1).astype(np.int64))
    count = int(np.searchsorted(ends, tokens)) + 1
    assert count <= len(ends), "10 % more documents than the mean needs are drawn"
    ends[count - 1] = tokens
    return np.diff(ends[:count], prepend=0).astype(np.int32)


def _ours(lengths: np.ndarray, seq_len: int, seed: int) -> Arrays:
    found = build_sample_indices(lengths, None, seq_len, None, seed)
    return found.document_index, found.sample_index, found.shuffle_index


def _theirs() -> Callable[[np.ndarray, int, int], Arrays]:
    """Return a function that does GPTDataset's work for one epoch, on lengths."""
    peer_problem()  # imports it without its warnings
    from megatron.core.datasets import gpt_dataset, helpers

    def build(lengths: np.ndarray, seq_len: int, seed: int) -> Arrays:
        random = np.random.RandomState(seed)
        documents = np.arange(len(lengths), dtype=np.int32)
        order = gpt_dataset._build_document_index(documents, 1, random, False)
        tokens = int(lengths.sum(dtype=np.int64))
        samples = helpers.build_sample_idx(lengths, order, seq_len, 1, tokens, True, True)
        count = len(samples) - 1
        return order, samples, gpt_dataset._build_shuffle_index(count, count, random)

    return build


def measure_blend(options: argparse.Namespace, sources: int, with_peer: bool) -> dict[str, Any]:
    """Time the order of a blend by megatron-core's rule, in turns with its compiled helper, and take their ratio."""
    weights = np.random.default_rng(SEED).uniform(0.01, 1, sources)
    seconds: dict[str, list[float]] = {"verl_ext": [], "megatron-core": []}
    for _ in range(options.repeats + 1):  # the first round is not counted
        begun = time.perf_counter()
        ours = megatron_blend_order(weights.tolist(), options.blend_samples)
        seconds["verl_ext"].append(time.perf_counter() - begun)
        if with_peer:
            begun = time.perf_counter()
            theirs = _their_blend(weights, options.blend_samples)
            seconds["megatron-core"].append(time.perf_counter() - begun)
            if not all(map(np.array_equal, ours, theirs)):
                raise RuntimeError("the blends differ")
    row: dict[str, Any] = {"sources": sources, "samples": options.blend_samples}
    row |= {name: float(np.median(turns[1:])) for name, turns in seconds.items() if turns}
    if with_peer:
        row["ratios"] = sorted(ours / theirs for ours, theirs in list(zip(*seconds.values(), strict=True))[1:])
    return row


def _their_blend(weights: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray]:
    from megatron.core.datasets import helpers

    source, sample = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
    helpers.build_blending_indices(source, sample, normalised(weights.tolist()), len(weights), samples, False)
    return source, sample


def measure_reads(options: argparse.Namespace, mean: int, folder: Path, with_peer: bool) -> dict[str, Any]:
    """Measure microseconds of a random sample as an int64 array, and as all that megatron-core's dataset returns."""
    prefix = folder / f"reads_{mean}"
    writer = IndexWriter(prefix, np.uint16)
    lengths = document_lengths(options.read_tokens, mean)
    writer.add(np.random.default_rng(SEED).integers(0, VOCABULARY, options.read_tokens, dtype=np.uint16), lengths)
    writer.close()
    index = TokenIndex(prefix)
    samples = build_sample_indices(index.lengths, None, options.seq_len, None, SEED)
    index.token_range()  # warms every page of the map
    readers: dict[str, Callable[[int], Any]] = {
        "verl_ext": lambda k: index.gather(*samples.pieces(k)).astype(np.int64),
    }
    if with_peer:
        theirs = _their_dataset(prefix, len(lengths), options.seq_len, folder)
        readers["megatron-core"] = lambda k: theirs._query_document_sample_shuffle_indices(k)[0]
        readers["megatron-core, its whole row"] = theirs.__getitem__
        for k in range(min(100, len(samples))):
            np.testing.assert_array_equal(readers["verl_ext"](k), readers["megatron-core"](k))
    return {"mean_tokens": mean, "readers": _in_turn(readers, len(samples), options.reads)}


def _their_dataset(prefix: Path, documents: int, seq_len: int, folder: Path) -> Any:
    from megatron.core.datasets import gpt_dataset, indexed_dataset
    from megatron.core.datasets.utils import Split

    tokenizer = types.SimpleNamespace(vocab_size=VOCABULARY, eod=0, pad=-1, unique_identifiers={})
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=seq_len,
        blend=([str(prefix)], None),
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(folder / "cache"),
    )
    low = indexed_dataset.IndexedDataset(str(prefix))
    return gpt_dataset.GPTDataset(low, str(prefix), np.arange(documents, dtype=np.int32), None, Split.train, config)


def _in_turn(readers: dict[str, Callable[[int], Any]], samples: int, reads: int) -> dict[str, dict[str, float]]:
    """Return microseconds a read: the median and minimum over turns of READS_PER_TURN reads of the same samples."""
    rng = np.random.default_rng(SEED)
    turns: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(-(-reads // READS_PER_TURN)):
        drawn = rng.integers(0, samples, READS_PER_TURN).tolist()
        for name, read in readers.items():
            started = time.perf_counter()
            for k in drawn:
                read(k)
            turns[name].append((time.perf_counter() - started) / READS_PER_TURN * 1e6)
    return {name: {"median": float(np.median(values)), "least": min(values)} for name, values in turns.items()}
