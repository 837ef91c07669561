"""Compare reading packs with the original collate and verl's templating; time a start on millions of documents.

    python benchmarks/loading.py --output loading.json        # --quick takes seconds, its figures mean nothing

Needs 4 GB in the temporary folder (TMPDIR). README.md beside this file explains the comparison.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # lets the script run by its path

import numpy as np
from tqdm import tqdm

VOCABULARY = 50_000
START_MAX_TOKENS = 8192
OURS, THEIRS = ("pack", "worker"), ("seed", "templating")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=2_000_000, help="documents of the start-up sets; 0: no start")
    parser.add_argument("--mean-tokens", type=int, default=50, help="of the first start-up set; the second has 4 times")
    parser.add_argument("--chats", type=int, default=2000, help="chats of about 200 tokens; 0: no reading")
    parser.add_argument("--long", type=int, default=48, help="documents of 8k to 32k tokens")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--passes", type=int, default=20, help="of ours over the documents, in each repeat")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="everything small")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    if options.quick:
        options.documents, options.chats, options.long, options.repeats, options.passes = 2000, 40, 2, 1, 1
    for name in ("documents", "chats", "long"):
        if getattr(options, name) < 0:
            parser.error(f"--{name} must be at least 0; got {getattr(options, name)}")
    for name in ("mean_tokens", "repeats", "passes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1; got {getattr(options, name)}")
    return options


def measure_reading(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure a row for each kind of document: every reader's tokens per processor second, and ours by the others'."""
    import datasets
    import torch

    from benchmarks.conversations import CHATS, LONG, write_corpus
    from benchmarks.readers import build_readers

    torch.set_num_threads(1)  # as in a loader's worker
    datasets.disable_progress_bars()
    rows = []
    for kind, count in ((CHATS, options.chats), (LONG, options.long)):
        if count == 0:
            continue
        corpus = write_corpus(kind, count, folder / kind.name.replace(" ", "_"), options.seed)
        readers, tokens = build_readers(corpus, options.seed)
        rates: dict[str, list[float]] = {name: [] for name in readers}
        for name in tqdm(list(readers) * (options.repeats + 1), desc=kind.name, unit="turn"):  # the first warms up
            rates[name].append(_tokens_per_second(readers[name], tokens, options.passes if name in OURS else 1))
        rows.append(_reading_row(kind, count, tokens, {name: values[1:] for name, values in rates.items()}))
    return rows


def _tokens_per_second(reader: Any, tokens: int, passes: int) -> float:
    began = time.process_time()
    reader.read_all(passes)
    return tokens * passes / (time.process_time() - began)


def _reading_row(kind: Any, count: int, tokens: int, rates: dict[str, list[float]]) -> dict[str, Any]:
    ratios = {
        f"{ours} to {theirs}": _spread(np.divide(rates[ours], rates[theirs])) for ours in OURS for theirs in THEIRS
    }
    return {
        "kind": kind.name,
        "documents": count,
        "tokens": tokens,
        "max_tokens": kind.max_tokens,
        "tokens_per_second": {name: _spread(np.asarray(values)) for name, values in rates.items()},
        "ratios": ratios,
    }


def _spread(values: np.ndarray) -> dict[str, float]:
    return {"median": float(np.median(values)), "low": float(values.min()), "high": float(values.max())}


def measure_start(
    options: argparse.Namespace, folder: Path, token_factors: Sequence[int] = (1, 4)
) -> list[dict[str, Any]]:
    """Measure a first and a second start on each set: equally many documents, with a multiple of the tokens."""
    import datasets

    from benchmarks.large_dataset import write_large_dataset

    datasets.disable_progress_bars()
    rows = []
    for times in token_factors:
        with tempfile.TemporaryDirectory(dir=folder) as name:  # keeps one set on disk at a time
            write_large_dataset(Path(name), options.documents, times * options.mean_tokens, VOCABULARY, options.seed)
            first, second = _start(name), _start(name)
        assert {**first, "seconds": 0, "private": 0} == {**second, "seconds": 0, "private": 0}, "the same data"
        rows.append({"first": first, "second": second})
    return rows


def _start(folder: str) -> dict[str, Any]:
    """Measure one rank's start in a fresh process, in which only the page cache may be warm."""
    command = [sys.executable, str(Path(__file__).with_name("start_up.py")), folder, str(START_MAX_TOKENS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"start_up.py ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(result: dict[str, Any]) -> str:
    """Format the tables for printing."""
    lines = [str(result["machine"])]
    for row in result["reading"]:
        lines += ["", f"{row['kind']}: {row['documents']:,} documents, {row['tokens']:,} tokens, packs of "]
        lines[-1] += f"{row['max_tokens']:,}; million tokens per second of one worker"
        for name, rate in row["tokens_per_second"].items():
            text = f"  {name:<11} {rate['median'] / 1e6:8.2f} [{rate['low'] / 1e6:.2f}, {rate['high'] / 1e6:.2f}]"
            for other in THEIRS:
                if ratio := row["ratios"].get(f"{name} to {other}"):
                    text += f"   × {other} {ratio['median']:6.1f} [{ratio['low']:.1f}, {ratio['high']:.1f}]"
            lines.append(text)
    if result["start"]:
        lines += ["", "start of one rank      documents        tokens   open   plan   scan   private MB held, peak"]
    for row in result["start"]:
        for which in ("first", "second"):
            start = row[which]
            seconds = "".join(f"{value:7.2f}" for value in start["seconds"].values())
            held, peak = (start["private"][name] / 1e6 for name in ("held", "peak"))
            lines.append(
                f"  {which:<16} {start['documents']:>13,} {start['tokens']:>13,}{seconds}   {held:.0f}, {peak:.0f}"
            )
    return "\n".join(lines)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure everything, with files below ``folder``."""
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    return {
        "settings": {**vars(options), "output": None},
        "machine": {**machine, "load_average": os.getloadavg()[0]},
        "reading": measure_reading(options, folder),
        "start": measure_start(options, folder) if options.documents else [],
    }


def main() -> None:
    """Measure, print and write the tables."""
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    print(report(result))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
