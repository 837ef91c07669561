"""The cost of saving (waiting or in the background), verifying, loading and exporting checkpoints, beside verl's.

The model is a Qwen3 with random weights in fp32 and AdamW. "Saved" includes syncing the copy to the disk and its
checksums; verl's files are neither synced nor checked. "Aside" is `checkpoint.async_save=true`: the time for which
training waits. The export's memory is private, beyond a process with torch, transformers and verl.
"""

import hashlib
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import in_own_process, on_ranks
from benchmarks.harness import Row, Turns, table
from benchmarks.meters import PrivatePeak, seconds
from verl_ext import options
from verl_ext.options import option

TOKENS = 256
SHARD_GB = 0.02
QUICK = ["hidden=128", "layers=1", "repeats=1"]


@dataclass(frozen=True)
class Options(options.Options):
    """Size of the model, and where files are written."""

    folder: str | None = option(None, "folder whose disk is measured; null: a temporary one")
    hidden: int = option(512, "hidden size", least=1)
    layers: int = option(8, "layers", least=1)
    repeats: int = option(3, "turns, of which the median counts", least=1)
    ranks: int = option(1, "ranks", least=1)


@table("{part} | seconds {seconds.median:.2f} | GB {GB:.2f} | GB of memory {memory:.3f}")
def saved(options: Options, folder: Path) -> Iterable[Row]:
    """Seconds of a step and of each part of a checkpoint."""
    from benchmarks.documents import write_documents
    from benchmarks.small_run import VOCABULARY, write_model

    folder = Path(options.folder).absolute() if options.folder else folder
    write_model(folder / "model", options.hidden, options.layers, TOKENS)
    rng, mask = np.random.default_rng(0), np.arange(TOKENS).clip(0, 1)
    packs = 4 * (options.repeats + 1)
    ids = [rng.integers(2, VOCABULARY, TOKENS) for _ in range(packs)]
    write_documents([{"input_ids": each, "loss_mask": mask, "category_ids": mask} for each in ids], folder / "data")
    ((found, *_),) = on_ranks(options.ranks, measure, folder, options.repeats, OMP_NUM_THREADS="1")
    size = found.pop("GB")
    for part, took in found.items():
        yield {"part": part, "seconds": Turns(took), **({"GB": size} if part == "saved" else {})}
    export = in_own_process(exported, folder / "run" / "global_step_1", folder / "export")
    shutil.rmtree(folder / "export", ignore_errors=True)
    yield {"part": f"exported, in shards of {SHARD_GB * 1000:.0f} MB", **export, "seconds": Turns([export["seconds"]])}


def measure(folder: Path, repeats: int) -> Row:
    """Return the seconds of each part over `repeats`, and the checkpoint's GB."""
    import torch.distributed as dist

    from benchmarks.small_run import build_trainer, take_step
    from verl_ext.checkpoint.layout import changed_file
    from verl_ext.checkpoint.state import load_engine

    def together(function: Callable[[], Any], count: int = repeats) -> list[float]:
        def met() -> None:
            function()
            dist.barrier()

        dist.barrier()
        return [seconds(met) for _ in range(count)]

    common = (f"data.max_tokens={TOKENS}", "data.train_batch_size=2", "trainer.logger=[console]")
    trainer = build_trainer(folder, folder / "run", *common)
    batches = iter(list(trainer.rank.batches(trainer.run.train_set, trainer.run.plan, 0, 2 * repeats + 2)))
    first = next(batches)
    found: Row = {"a step": together(lambda: take_step(trainer, next(batches), False), repeats + 1)}
    found["saved"] = together(lambda: trainer.checkpoints.save(1))
    manager = trainer.engine.checkpoint_manager
    found["saved as verl does"] = together(lambda: manager.save_checkpoint(str(folder / "verl"), global_step=1))
    checkpoint = folder / "run" / "global_step_1"
    found["verified"] = together(lambda: changed_file(checkpoint, dist.get_rank(), dist.get_world_size()))
    found["loaded"] = together(lambda: load_engine(trainer.engine, checkpoint))
    aside = build_trainer(folder, folder / "aside", "checkpoint.async_save=true", *common)
    trainer.checkpoints = aside.checkpoints
    take_step(aside, first, False)
    waits, during = [], []
    for _ in range(repeats):
        waits += together(lambda: aside.checkpoints.save(1), 1)
        during += together(partial(take_step, aside, first, False), 2)
        aside.checkpoints.finish()
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()) / 1e9
    return {**found, "saved aside: training waits": waits, "a step while one is saved aside": during, "GB": size}


def exported(checkpoint: Path, output: Path) -> Row:
    """Return an export's seconds, and its GB of private memory."""
    import verl_ext.checkpoint.export  # noqa: F401  (what export imports is not counted)
    from verl_ext.commands.export import ExportOptions, export

    options = ExportOptions(checkpoint=str(checkpoint), output_dir=str(output), shard_gb=SHARD_GB)
    with PrivatePeak() as peak:
        took = seconds(lambda: export(options))
    return {"seconds": took, "memory": peak.peak / 1e9}


@table("checksum {name} | GB/s {speed:.1f}")
def checksums(options: Options, folder: Path) -> Iterable[Row]:
    """Checksums over 256 MiB."""
    import xxhash

    content = np.random.default_rng(0).bytes(2**28)
    for name, checksum in (("xxh3_128", xxhash.xxh3_128), ("crc32", zlib.crc32), ("blake2b", hashlib.blake2b)):
        began = time.perf_counter()
        checksum(content)
        yield {"name": name, "speed": len(content) / 1e9 / (time.perf_counter() - began)}
