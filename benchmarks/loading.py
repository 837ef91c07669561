"""Reading packs in a loader's worker, and starting on millions; README.md has the readers.

The conversations are made-up words, tokenized once by `verl-ext tokenize` for the first three readers; a test compares
every document's tokens and targets. Each runs on one thread and drops an output before it makes the next one, as a
worker does. The folders stay in the page cache for all readers. The documents of `start` need 4 GB in TMPDIR.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import torch

from benchmarks.cells import on_ranks
from benchmarks.documents import write_many_documents
from benchmarks.harness import Row, Sizes, Turns, equal, option, table, take_turns
from benchmarks.meters import MIB, measured, seconds
from benchmarks.texts import CHATS, LONG, Kind, make_conversations, write_conversations
from verl_ext.data import SFTDataSet
from verl_ext.losses import LossSpec
from verl_ext.packing import plan_packs
from verl_ext.trainer.collator import StepCollator

VOCABULARY = 50_000
QUICK = ["documents=2000", "chats=40", "long=2", "repeats=1", "passes=1"]
Reader = tuple[Sequence[Any], Callable[[Any], Any]]  # read(item) over all items reads each conversation once


class Options(Sizes):
    folder: str | None = option(None, "your tokenized folder, on which to start instead; null: made-up ones")
    max_tokens: int = option(8192, "tokens of a pack, of a start", least=2)
    documents: int = option(2_000_000, "documents of a start")
    mean_tokens: int = option(50, "tokens of a document of the first start; the second has 4 times", least=2)
    chats: int = option(2000, "chats of about 200 tokens")
    long: int = option(48, "documents of 8k to 32k tokens")
    repeats: int = option(7, "turns")
    passes: int = option(20, "passes of ours over the documents in each turn")


@table(
    "documents {kind} | tokens {tokens:,} | reader {reader} | million tokens/s {speed:.2f} | × seed {seed:.1f} | "
    "× templating {templating:.0f}"
)
def reading(options: Options, folder: Path) -> Iterable[Row]:
    """One worker's tokens of a processor second."""
    for kind, count in ((CHATS, options.chats), (LONG, options.long)):
        found = on_ranks(1, read_in_turns, kind, count, folder / kind.name.replace(" ", "_"), options)[0]
        rates = {name: Turns(rate) for name, rate in found["rates"].items()}
        for reader, speed in rates.items():
            others = {other: speed / rates[other] for other in ("seed", "templating") if reader in ("pack", "worker")}
            yield {"kind": kind.name, "tokens": found["tokens"], "reader": reader, "speed": speed, **others}


def read_in_turns(kind: Kind, count: int, folder: Path, options: Options) -> Row:
    readers, tokens = build_readers(kind, count, folder)

    def rate(name: str) -> float:
        (items, read), passes = readers[name], options.passes if name in ("pack", "worker") else 1
        began = time.process_time()
        for _ in range(passes):
            for item in items:
                read(item)
        return tokens * passes / (time.process_time() - began) / 1e6

    rates = take_turns({name: partial(rate, name) for name in readers}, options.repeats, warm_up=1)
    return {"tokens": tokens, "rates": rates}


def build_readers(kind: Kind, count: int, folder: Path) -> tuple[dict[str, Reader], int]:
    """Write conversations; return their readers, and the tokens that each reads."""
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    from verl_ext.commands.command_line import read_options
    from verl_ext.commands.tokenize import TokenizeOptions, tokenize

    folder.mkdir(parents=True)
    conversations = make_conversations(kind, count, np.random.default_rng(0))
    lines, tokenizer = write_conversations(conversations, folder)
    tokenized, max_tokens = str(folder / "tokenized"), kind.max_tokens
    command = [f"sources={{made_up:{lines}}}", f"output_dir={tokenized}", "num_workers=1"]
    tokenize(read_options(TokenizeOptions, [*command, f"model.path={folder / 'tokenizer'}"]))
    ours = SFTDataSet(tokenized, max_tokens)
    collate = StepCollator(LossSpec("token", np.ones(len(ours.categories) + 1), 30), ours.categories)
    packs = np.random.default_rng(0).permutation(len(ours)).tolist()
    rows = datasets.load_from_disk(tokenized).shuffle(seed=42)
    next_fit = plan_packs(np.array(rows["length"]), max_tokens, "next_fit")
    pd.DataFrame({"messages": conversations}).to_parquet(folder / "conversations.parquet")
    options = {"pad_mode": "no_padding", "max_length": max_tokens, "truncation": "error"}
    verls = MultiTurnSFTDataset(str(folder / "conversations.parquet"), tokenizer, options)
    readers = {
        "pack": (packs, ours.__getitem__),
        "worker": (packs, lambda pack: collate([ours[pack]])),
        "seed": (
            [next_fit.documents(pack).tolist() for pack in range(next_fit.num_packs)],
            lambda pack: seed_collate_fn([rows[k] for k in pack], max_tokens, tokenizer.pad_token_id),
        ),
        "templating": (range(len(verls)), verls.__getitem__),
    }
    return readers, int(ours.facts().tokens.sum())


def seed_collate_fn(rows: Sequence[dict[str, Any]], max_tokens: int, padding_value: int) -> dict[str, torch.Tensor]:
    """Collate as the original does: Python ranges, all padded to max_tokens."""
    names = ("input_ids", "position_ids", "loss_mask", "category_ids", "attention_mask")
    out = {name: np.zeros(max_tokens, np.int64) for name in names}
    out["input_ids"][:] = padding_value
    begin = 0
    for row in rows:
        end = begin + row["length"]
        out["input_ids"][begin:end] = row["input_ids"]
        out["position_ids"][begin:end] = [i for i in range(row["length"])]  # noqa: C416
        out["loss_mask"][begin:end] = row["loss_mask"]
        out["category_ids"][begin:end] = row["category_ids"]
        out["attention_mask"][begin:end] = 1
        begin = end
    out["position_ids"][begin:] = [i for i in range(max_tokens - begin)]  # noqa: C416
    return {name: torch.from_numpy(column).unsqueeze(0) for name, column in out.items()}


@table(
    "start {which} | documents {documents:,} | tokens {tokens:,} | open, s {open:.2f} | plan, s {plan:.2f} | "
    "scan, s {scan:.2f} | private MB held {held_mb:.0f} | at the peak {peak_mb:.0f}"
)
def start(options: Options, folder: Path) -> Iterable[Row]:
    """One rank's start on documents of two sizes, or on your folder."""

    def started(where: str) -> Row:
        return on_ranks(1, measure_start, where, options.max_tokens, CUDA_VISIBLE_DEVICES="")[0]

    if options.folder:
        yield {"which": "yours", **started(str(Path(options.folder).absolute()))}
        return
    for times in (1, 4):
        with tempfile.TemporaryDirectory(dir=folder) as name:  # keeps one set on disk at a time
            write_many_documents(Path(name), options.documents, times * options.mean_tokens, VOCABULARY, 0)
            rows = [{"which": which, **started(name)} for which in ("first", "second")]
        equal(rows, ("documents", "tokens", "targets"), 0)
        yield from rows


def measure_start(folder: str, max_tokens: int) -> Row:
    """Open, plan and scan; only the page cache may be warm."""
    from verl_ext.data.tokenized.arrow import TokenizedData
    from verl_ext.trainer.distributed import RunRanks

    with measured(private=True) as memory:
        opened = seconds(lambda: TokenizedData([folder]))
        began = time.perf_counter()
        dataset = SFTDataSet(folder, max_tokens)  # which opens its folder too
        built = time.perf_counter() - began
        scanned = seconds(lambda: dataset.read_together(RunRanks()))
    tokens, targets = int(dataset.facts().tokens.sum()), int(dataset.scan().targets.sum())
    return {
        **{"documents": len(dataset.spans), "tokens": tokens, "targets": targets},
        **{"open": opened, "plan": built - opened, "scan": scanned},
        **{f"{name}_mb": memory[f"{name}_mib"] * MIB / 1e6 for name in ("held", "peak")},
    }
