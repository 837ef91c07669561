"""Reading packs in a loader's worker, beside the original's collate and verl's templating; a start on millions.

One worker makes training data of the same conversations in four ways that take turns:

| reader | what it does |
|---|---|
| `pack` | `SFTDataSet[k]`: a pack's tensors from the memory-mapped columns |
| `worker` | the same and `StepCollator`: all work of our worker, loss coefficients and category counts included |
| `seed` | TokenAwareBatchPack's `collate_fn`: rows of a shuffled `datasets.Dataset` as Python lists, padded |
| `templating` | verl 0.9.1's `MultiTurnSFTDataset[i]`: template and tokenizer at every read, without its collator |

`seed` and `pack` end at the same point, a pack's tensors; neither prepares a loss. The conversations are made-up words,
tokenized once by `verl-ext tokenize` for the first three; a test compares every document's tokens and targets. Each
runs on one thread, as in a worker, and drops its outputs one by one, as a worker passes them on. The folders are small
and stay in the page cache for all readers. Figures are tokens per second of processor time.

`start` is the work of one rank before a model is loaded, in fresh processes: opening and checking the folder, planning
the packs, and the scan (targets, vocabulary, categories), which a first start reads from all tokens and a second from
the cache. Private memory is `RssAnon` of `/proc/self/status` above its value before. Its documents need 4 GB in TMPDIR.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.cells import on_ranks
from benchmarks.documents import write_many_documents
from benchmarks.harness import Row, Turns, table, take_turns
from benchmarks.meters import PrivatePeak
from benchmarks.texts import CHATS, LONG, Kind, make_conversations, write_conversations
from verl_ext import options
from verl_ext.data import SFTDataSet
from verl_ext.losses import LossSpec
from verl_ext.options import option
from verl_ext.trainer.batch import StepCollator

VOCABULARY = 50_000
QUICK = ["documents=2000", "chats=40", "long=2", "repeats=1", "passes=1"]


@dataclass(frozen=True)
class Options(options.Options):
    """Sizes of the two tables."""

    folder: str | None = option(None, "your tokenized folder, on which to start instead; null: made-up ones")
    max_tokens: int = option(8192, "tokens of a pack, of a start", least=2)
    documents: int = option(2_000_000, "documents of a start", least=1)
    mean_tokens: int = option(50, "tokens of a document of the first start; the second has 4 times", least=2)
    chats: int = option(2000, "chats of about 200 tokens", least=1)
    long: int = option(48, "documents of 8k to 32k tokens", least=1)
    repeats: int = option(7, "turns", least=1)
    passes: int = option(20, "passes of ours over the documents in each turn", least=1)


@table(
    "documents {kind} | tokens {tokens:,} | reader {reader} | million tokens/s {speed:.2f} | × seed {seed:.1f} | "
    "× templating {templating:.0f}"
)
def reading(options: Options, folder: Path) -> Iterable[Row]:
    """One worker's tokens of a processor second."""
    for kind, count in ((CHATS, options.chats), (LONG, options.long)):
        corpus = folder / kind.name.replace(" ", "_")
        ((found, *_),) = on_ranks(1, read_in_turns, kind, count, corpus, options, OMP_NUM_THREADS="1")
        tokens, rates = found["tokens"], {name: Turns(rate) for name, rate in found["rates"].items()}
        for reader, speed in rates.items():
            others = {other: speed / rates[other] for other in ("seed", "templating") if reader in ("pack", "worker")}
            yield {"kind": kind.name, "tokens": tokens, "reader": reader, "speed": speed, **others}


def read_in_turns(kind: Kind, count: int, folder: Path, options: Options) -> Row:
    """Return million tokens a second by reader, and the tokens of a pass."""
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    readers, tokens = build_readers(kind, count, folder)
    passes = {name: options.passes if name in ("pack", "worker") else 1 for name in readers}

    def rate(name: str) -> float:
        began = time.process_time()
        readers[name].read_all(passes[name])
        return tokens * passes[name] / (time.process_time() - began) / 1e6

    rates = take_turns({name: partial(rate, name) for name in readers}, options.repeats, warm_up=1)
    return {"tokens": tokens, "rates": rates}


@dataclass(frozen=True)
class Reader:
    """`read(item)` over all `items` reads each conversation once."""

    items: Sequence[Any]
    read: Callable[[Any], Any]

    def read_all(self, passes: int) -> None:
        """Read all items, dropping each output before the next one is made, as a worker does."""
        for _ in range(passes):
            for item in self.items:
                self.read(item)


def build_readers(kind: Kind, count: int, folder: Path) -> tuple[dict[str, Reader], int]:
    """Write conversations and build their readers by name; return also the tokens that each of them reads."""
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    tokenizer = write_corpus(kind, count, folder)
    tokenized, max_tokens = str(folder / "tokenized"), kind.max_tokens
    ours = SFTDataSet(tokenized, max_tokens)
    collate = StepCollator(LossSpec("token", np.ones(len(ours.categories) + 1), 30), ours.categories)
    theirs = SeedDataset(tokenized, max_tokens, tokenizer.pad_token_id)
    options = {"pad_mode": "no_padding", "max_length": max_tokens, "truncation": "error"}
    verls = MultiTurnSFTDataset(str(folder / "conversations.parquet"), tokenizer, options)
    packs = np.random.default_rng(0).permutation(len(ours)).tolist()
    readers = {
        "pack": Reader(packs, ours.__getitem__),
        "worker": Reader(packs, lambda pack: collate([ours[pack]])),
        "seed": Reader(theirs.packs, lambda pack: theirs.collate_fn([pack])),
        "templating": Reader(range(len(verls)), verls.__getitem__),
    }
    return readers, int(ours.facts().tokens.sum())


def write_corpus(kind: Kind, count: int, folder: Path) -> PreTrainedTokenizerFast:
    """Write conversations with a tokenizer trained on them, as parquet and tokenized by `verl-ext tokenize`."""
    from verl_ext.commands.command_line import read_options
    from verl_ext.commands.tokenize import TokenizeOptions, tokenize

    folder.mkdir(parents=True)
    conversations = make_conversations(kind, count, np.random.default_rng(0))
    lines, tokenizer = write_conversations(conversations, folder)
    pd.DataFrame({"messages": conversations}).to_parquet(folder / "conversations.parquet")
    command = [f"sources={{made_up:{lines}}}", f"output_dir={folder / 'tokenized'}", "num_workers=1"]
    tokenize(read_options(TokenizeOptions, [*command, f"model.path={folder / 'tokenizer'}"]))
    return tokenizer


class SeedDataset:
    """The original SFTDataSet: next-fit packs over a shuffled dataset, padded to max_tokens in collate_fn."""

    columns = ("input_ids", "position_ids", "loss_mask", "category_ids", "attention_mask")

    def __init__(self, folder: str, max_tokens: int, padding_value: int) -> None:
        self.rows = datasets.load_from_disk(folder).shuffle(seed=42)
        self.max_tokens, self.padding_value = max_tokens, padding_value
        self.packs: list[list[int]] = []
        room = 0
        for index, length in enumerate(self.rows["length"]):
            if length > room:
                self.packs.append([])
                room = max_tokens
            self.packs[-1].append(index)
            room -= length

    def collate_fn(self, packs: list[list[int]]) -> dict[str, torch.Tensor]:
        """Collate as the original does: rows by index, positions from Python ranges, all padded to max_tokens."""
        rows = [self.rows[index] for index in packs[0]]
        out = {name: np.zeros(self.max_tokens, np.int64) for name in self.columns}
        out["input_ids"][:] = self.padding_value
        begin = 0
        for row in rows:
            end = begin + row["length"]
            out["input_ids"][begin:end] = row["input_ids"]
            out["position_ids"][begin:end] = [i for i in range(row["length"])]  # noqa: C416
            out["loss_mask"][begin:end] = row["loss_mask"]
            out["category_ids"][begin:end] = row["category_ids"]
            out["attention_mask"][begin:end] = 1
            begin = end
        out["position_ids"][begin:] = [i for i in range(self.max_tokens - begin)]  # noqa: C416
        return {name: torch.from_numpy(column).unsqueeze(0) for name, column in out.items()}


@table(
    "start {which} | documents {documents:,} | tokens {tokens:,} | open, s {open:.2f} | plan, s {plan:.2f} | "
    "scan, s {scan:.2f} | private MB held {held:.0f} | at the peak {peak:.0f}"
)
def start(options: Options, folder: Path) -> Iterable[Row]:
    """One rank's start on equally many documents of two sizes, or on your folder."""
    datasets.disable_progress_bars()
    if options.folder:
        yield {"which": "yours", **started(str(Path(options.folder).absolute()), options.max_tokens)}
        return
    for times in (1, 4):
        with tempfile.TemporaryDirectory(dir=folder) as name:  # keeps one set on disk at a time
            write_many_documents(Path(name), options.documents, times * options.mean_tokens, VOCABULARY, 0)
            rows = [started(name, options.max_tokens) for _ in range(2)]
        assert len({(row["documents"], row["tokens"], row["targets"]) for row in rows}) == 1, "the same data"
        yield from ({"which": which, **row} for which, row in zip(("first", "second"), rows, strict=True))


def started(folder: str, max_tokens: int) -> Row:
    """Measure a start in a fresh process, in which only the page cache may be warm."""
    ((row, *_),) = on_ranks(1, measure_start, folder, max_tokens, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    return row


def measure_start(folder: str, max_tokens: int) -> Row:
    """Open, plan and scan, as the only rank."""
    from verl_ext.data.arrow import TokenizedData
    from verl_ext.trainer.distributed import RunRanks

    datasets.disable_progress_bars()
    with PrivatePeak() as memory:
        clock = [time.perf_counter()]
        TokenizedData([folder])
        clock.append(time.perf_counter())
        dataset = SFTDataSet(folder, max_tokens)
        clock.append(time.perf_counter())
        dataset.read_together(RunRanks())
        clock.append(time.perf_counter())
    opened, built, scanned = (after - before for before, after in pairwise(clock))
    return {
        **{"open": opened, "plan": built - opened, "scan": scanned},  # a dataset opens its folder too
        **{"held": memory.held / 1e6, "peak": memory.peak / 1e6},
        "documents": len(dataset.spans),
        "tokens": int(dataset.facts().tokens.sum()),
        "targets": int(dataset.scan.targets.sum()),
    }
