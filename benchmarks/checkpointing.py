"""The cost of saving, verifying, loading and exporting checkpoints, beside verl's."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.cells import in_own_process, on_ranks
from benchmarks.harness import Row, Sizes, Turns, option, table
from benchmarks.meters import MIB, measured, seconds

TOKENS = 256
SHARD_GB = 0.02
QUICK = ["hidden=128", "layers=1", "repeats=1"]


class Options(Sizes):
    folder: str | None = option(None, "folder whose disk is measured; null: a temporary one")
    hidden: int = option(512, "hidden size")
    layers: int = option(8, "layers")
    repeats: int = option(3, "turns, of which the median counts")


@table("{part} | seconds {seconds.median:.2f} | GB {GB:.2f} | GB of memory {memory:.3f}")
def saved(options: Options, folder: Path) -> Iterable[Row]:
    """Seconds of a step and of each part of a checkpoint."""
    from benchmarks.documents import random_document, write_documents
    from benchmarks.models import VOCABULARY, write_qwen3

    folder = Path(options.folder).absolute() if options.folder else folder
    write_qwen3(folder / "model", options.hidden, options.layers, TOKENS)
    rng, packs = np.random.default_rng(0), 4 * (options.repeats + 1)
    write_documents([random_document(TOKENS, VOCABULARY, rng) for _ in range(packs)], folder / "data")
    found = on_ranks(1, measure, folder, options.repeats)[0]
    size = found.pop("GB")
    for part, took in found.items():
        yield {"part": part, "seconds": Turns(took), **({"GB": size} if part == "saved" else {})}
    export = in_own_process(exported, folder / "run" / "global_step_1", folder / "export")
    shutil.rmtree(folder / "export", ignore_errors=True)
    yield {"part": f"exported, in shards of {SHARD_GB * 1000:.0f} MB", **export, "seconds": Turns([export["seconds"]])}


def measure(folder: Path, repeats: int) -> Row:
    from benchmarks.contestants import Setting, take_step, together
    from verl_ext.checkpoint.layout import Checkpoint
    from verl_ext.checkpoint.state import load_engine

    common = ("parallel=cpu", "model.enable_gradient_checkpointing=true", "data.train_batch_size=2")
    setting = Setting(folder / "model", folder / "data", folder, TOKENS, 100, (*common, "trainer.logger=[console]"))
    trainer = setting.packed("run").trainer
    batches = iter(list(trainer.batches(0, 2 * repeats + 2)))
    first, checkpoint, manager = next(batches), folder / "run/global_step_1", trainer.engine.checkpoint_manager
    share = trainer.rank.rank, trainer.rank.size  # all ranks have packs of their own
    found: Row = {
        "a step": together(lambda: take_step(trainer, next(batches), False), repeats + 1),
        "saved": together(lambda: trainer.checkpoints.save(1, {}), repeats),
        "saved as verl does": together(lambda: manager.save_checkpoint(str(folder / "verl"), global_step=1), repeats),
        "verified": together(lambda: Checkpoint.read(checkpoint).changed_file(*share), repeats),
        "loaded": together(lambda: load_engine(trainer.engine, checkpoint), repeats),
    }
    aside = setting.packed("aside", "checkpoint.async_save=true").trainer
    trainer.checkpoints = aside.checkpoints
    take_step(aside, first, False)
    waits, during = [], []
    for _ in range(repeats):
        waits += together(lambda: aside.checkpoints.save(1, {}))
        during += together(lambda: take_step(aside, first, False), 2)
        aside.checkpoints.finish()
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()) / 1e9
    return {**found, "saved aside: training waits": waits, "a step while one is saved aside": during, "GB": size}


def exported(checkpoint: Path, output: Path) -> Row:
    import verl_ext.checkpoint.export  # noqa: F401  (what export imports is not counted)
    from verl_ext.commands.export import ExportOptions, export

    options = ExportOptions(checkpoint=str(checkpoint), output_dir=str(output), shard_gb=SHARD_GB)
    with measured(private=True) as memory:
        took = seconds(lambda: export(options))
    return {"seconds": took, "memory": memory["peak_mib"] * MIB / 1e9}
