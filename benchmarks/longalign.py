"""LongAlign's table: the time that each method takes to train once on the same documents, on one rank and on several.

This module starts real ranks by torchrun's module on epochs.py, and prints their rows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.lengths import Document, make_documents, write_dataset
from benchmarks.model import VOCABULARY, write_model
from benchmarks.quiet import no_progress_bars

METHODS = ("naive", "sorted", "naive_1", "sorted_1", "dynamic", "packing", "balanced")  # defined in methods.py
ON_ONE_RANK = ("naive", "sorted", "packing")
ON_REQUEST = ("single", "sorted_packs")
# Hours on 8 × A800-80G with DeepSpeed ZeRO-3, from a digest of the paper (https://arxiv.org/abs/2401.18058).
PUBLISHED = {
    "ChatGLM3-6B": {"naive": 45.4, "packing": 20.5, "sorted": 19.1},
    "Llama2-7B": {"naive": 67.2, "packing": 23.4, "sorted": 23.3},
    "Llama2-13B": {"naive": 117.2, "packing": 41.2, "sorted": 44.5},
}
_ROW = "{:<13} {:<6} {:>5} {:>8} {:>9} {:>7} {:>7} {:>18} {:>7} {:>18} {:>10} {:>5}"
_HEADS = ("engine", "steps", "forwards", "tokens", "padding", "wall s", "× {0} [range]", "cpu s", "× {0} [range]")
_HEADS += ("cost/ideal", "idle")


def table(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each number of ranks in ``options.ranks``, in processes of its own."""
    gpus = torch.cuda.device_count()
    if gpus and max(options.ranks) > gpus:
        raise ValueError(f"--ranks must be at most {gpus}, a GPU each; got {max(options.ranks)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(options, folder)
        by_ranks = {str(ranks): _on_ranks(ranks, options.threads, folder) for ranks in options.ranks}
    return {"ranks": by_ranks, "published_hours": PUBLISHED}


def write_inputs(options: argparse.Namespace, folder: Path) -> None:
    """Write the inputs of the ranks: model, documents and settings."""
    no_progress_bars()
    write_model(folder / "model", options.hidden, options.layers, options.budget, options.seed)
    write_dataset(epoch_documents(options), folder / "documents")
    (folder / "settings.json").write_text(json.dumps({**vars(options), "output": None}))


def epoch_documents(options: argparse.Namespace) -> list[Document]:
    """Make the documents of an epoch, the same on every rank."""
    rng = np.random.default_rng(options.seed)
    return make_documents(options.documents * options.steps, options.budget, VOCABULARY, rng)


def _on_ranks(ranks: int, threads: int, folder: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("epochs.py")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr=127.0.0.1")
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    code = subprocess.run([*launcher, f"--nproc_per_node={ranks}", script, folder], env=environment).returncode
    if code:
        raise SystemExit(code)  # the ranks have printed the reason
    return json.loads((folder / "result.json").read_text())


def report(result: dict[str, Any]) -> str:
    """Format a table for each number of ranks, with LongAlign's own ratios below."""
    lines = []
    for ranks, measured in result["ranks"].items():
        rows = measured["methods"]
        baseline = "naive" if "naive" in rows else next(iter(rows))
        first = rows[baseline]
        lines += [
            "",
            f"{ranks} rank{'s' * (ranks != '1')}: {measured['documents']} documents, {measured['tokens']:,} tokens, "
            f"{first['targets']:,} targets once; medians of {len(first['wall'])}",
            _ROW.format("", *(head.format(baseline) for head in _HEADS)),
        ]
        lines += [_line(name, row, first) for name, row in rows.items()]
    lines += ["", "published by LongAlign, other models and machines (8 × A800, hours; read in a digest)"]
    for model, hours in PUBLISHED.items():
        ratios = ", ".join(f"{name} {hours['naive'] / spent:.2f} × ({spent:g} h)" for name, spent in hours.items())
        lines.append(f"{model:<13} {ratios}")
    return "\n".join(lines)


def _line(name: str, row: dict[str, Any], baseline: dict[str, Any]) -> str:
    return _ROW.format(
        name,
        row["engine"],
        row["steps"],
        row["forwards"][0],
        f"{row['tokens']:,}",
        f"{row['padding_share']:.0%}",
        *_times(row["wall"], baseline["wall"]),
        *(_times(row["cpu"], baseline["cpu"]) if row["cpu"] else "––"),
        f"{row['cost_over_ideal']:.3f}",
        "–" if row["idle_share"] is None else f"{row['idle_share']:.0%}",
    )


def _times(seconds: list[float], baseline: list[float]) -> tuple[str, str]:
    ratios = np.array(baseline) / np.array(seconds)
    return f"{median(seconds):.1f}", f"{np.median(ratios):.2f} [{ratios.min():.2f}, {ratios.max():.2f}]"
