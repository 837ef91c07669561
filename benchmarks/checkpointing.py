"""Measure the cost of saving (waiting or in the background), verifying, loading and exporting checkpoints, beside verl.

    python benchmarks/checkpointing.py                                   one rank
    torchrun --nproc_per_node=2 benchmarks/checkpointing.py              two

The model is a Qwen3 with random weights in fp32 and AdamW. Files are written to --folder, whose disk is measured.
"""

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # lets the script run by its path

import numpy as np

from benchmarks.model import VOCABULARY, write_model
from benchmarks.start_up import PrivatePeak, private_bytes

SHARD_GB = 0.02


def seconds(function: Callable[[], Any]) -> float:
    """Return the seconds of one call that every rank joins."""
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - began


def write_data(folder: Path, packs: int, max_tokens: int) -> None:
    """Write data of one document a pack, all of whose tokens are targets."""
    from datasets import Dataset

    rng = np.random.default_rng(0)
    ids = [rng.integers(2, VOCABULARY, max_tokens).tolist() for _ in range(packs)]
    ones = [[0] + [1] * (max_tokens - 1)] * packs
    columns = {"input_ids": ids, "loss_mask": ones, "category_ids": ones, "length": [max_tokens] * packs}
    Dataset.from_dict(columns).save_to_disk(str(folder))


def build(folder: Path, name: str, *more: str) -> Any:
    """Build a trainer that saves into a folder of its own."""
    from verl_ext.config import compose
    from verl_ext.trainer.setup import prepare
    from verl_ext.trainer.trainer import SFTTrainer

    common = ("data.max_tokens=256", "data.train_batch_size=2", "data.num_workers=0", "parallel=cpu")
    where = (f"data.train_dir={folder / 'data'}", f"model.path={folder / 'model'}")
    output = f"trainer.default_local_dir={folder / name}"
    return SFTTrainer(prepare(compose([*common, *where, output, "trainer.logger=[console]", *more])))


def measure(folder: Path, repeats: int) -> dict[str, float]:
    """Return the median seconds of each part over `repeats`, and the checkpoint's GB."""
    import torch.distributed as dist

    from benchmarks.steps import take_step
    from verl_ext.checkpoint.layout import changed_file
    from verl_ext.checkpoint.state import load_engine

    trainer = build(folder, "run")
    batches = list(trainer.rank.batches(trainer.run.train_set, trainer.run.plan, 0, 2 * repeats + 2))

    def steps(count: int) -> float:
        return statistics.median(seconds(partial(take_step, trainer, batches[k], False)) for k in range(count))

    found = {"a step": steps(repeats + 1)}
    found["saved"] = statistics.median(seconds(lambda: trainer.checkpoints.save(1)) for _ in range(repeats))
    manager = trainer.engine.checkpoint_manager
    found["saved by verl"] = statistics.median(
        seconds(lambda: manager.save_checkpoint(str(folder / "verl"), global_step=1)) for _ in range(repeats)
    )
    checkpoint = folder / "run" / "global_step_1"
    ranks = dist.get_rank(), dist.get_world_size()
    found["verified"] = statistics.median(seconds(lambda: changed_file(checkpoint, *ranks)) for _ in range(repeats))
    found["loaded"] = statistics.median(
        seconds(lambda: load_engine(trainer.engine, checkpoint)) for _ in range(repeats)
    )
    files = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    aside = build(folder, "aside", "checkpoint.async_save=true")
    trainer.checkpoints = aside.checkpoints
    take_step(aside, batches[0], False)
    waits, during = [], []
    for _ in range(repeats):
        waits.append(seconds(lambda: aside.checkpoints.save(1)))
        during += [seconds(partial(take_step, aside, batches[k], False)) for k in range(2)]
        aside.checkpoints.finish()
    found["saved aside: the copy"] = statistics.median(waits)
    found["saved aside: a step meanwhile"] = statistics.median(during)
    return {**found, "GB": files / 1e9}


def export_alone(checkpoint: str, output: str) -> None:
    """Print an export's seconds, and its GB of private memory beyond a process with torch, transformers and verl."""
    import verl_ext.checkpoint.export  # noqa: F401  (what export imports is not counted)
    from verl_ext.commands.export import ExportOptions, export

    before, began = private_bytes(), time.perf_counter()
    with PrivatePeak() as peak:
        export(ExportOptions(checkpoint=checkpoint, output_dir=output, shard_gb=SHARD_GB))
    print(json.dumps([time.perf_counter() - began, (peak.bytes - before) / 1e9]))


def exported(checkpoint: Path, output: Path) -> tuple[float, float]:
    """Run :func:`export_alone` in a process of its own."""
    command = [sys.executable, __file__, "--export", str(checkpoint), str(output)]
    took, memory = json.loads(subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1])
    return took, memory


def checksum_speeds() -> dict[str, float]:
    """Return the GB/s of checksums over 256 MiB."""
    import xxhash

    content = np.random.default_rng(0).bytes(2**28)
    speeds = {}
    for name, checksum in (("xxh3_128", xxhash.xxh3_128), ("crc32", zlib.crc32), ("blake2b", hashlib.blake2b)):
        began = time.perf_counter()
        checksum(content)
        speeds[name] = len(content) / 1e9 / (time.perf_counter() - began)
    return speeds


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--export", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.export:
        export_alone(*given.export)
        return

    from verl_ext.trainer.distributed import RunRanks, process_group

    with process_group():
        ranks = RunRanks()
        folder = Path(ranks.broadcast(str(given.folder or tempfile.mkdtemp())))
        if ranks.rank == 0:
            write_model(folder / "model", given.hidden, given.layers, 256, seed=0)
            write_data(folder / "data", 4 * (given.repeats + 1), 256)
        ranks.broadcast(None)
        found = measure(folder, given.repeats)
        if ranks.rank == 0:
            gigabytes = found.pop("GB")
            print(f"\ncheckpoint of {gigabytes:.2f} GB, {ranks.size} rank(s), medians of {given.repeats}")
            for name, value in found.items():
                print(f"  {name:<30} {value:7.2f} s")
            took, memory = exported(folder / "run" / "global_step_1", folder / "export")
            print(f"  {'exported':<30} {took:7.2f} s in {memory:.3f} GB of memory, shards of {SHARD_GB} GB")
            print("  checksums: " + ", ".join(f"{name} {speed:.1f} GB/s" for name, speed in checksum_speeds().items()))
        ranks.broadcast(None)
        if given.folder is None and ranks.rank == 0:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
