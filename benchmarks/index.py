"""Measure Megatron's indexed format: building it from text, its sample index, blends, and reading samples.

    python benchmarks/index.py --output index.json

The script makes its own text, tokenizer and corpora. It compares megatron-core if that is installed (pip install
megatron-core): index_build.py explains the first table, index_samples.py the others.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # lets the script run by its path

import numpy as np
from tqdm import tqdm

from benchmarks.index_samples import measure_blend, measure_reads, measure_sample_index, peer_problem

VOCABULARY = 6400  # of the trained tokenizer, in tokens
TRAINED_ON = 2000  # texts
SEED = 1234


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=12, help="text of the build")
    parser.add_argument("--text", nargs="+", help="files of that text; default: made-up words")
    parser.add_argument("--text-key", nargs="+", default=["text"], help="fields of their records")
    parser.add_argument("--tokenizer", type=Path, help="folder; default: one trained on a part of the text")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of those that use them")
    parser.add_argument("--repeats", type=int, default=3, help="turns of the build")
    parser.add_argument("--tokens", type=int, default=10**9, help="of the sample index")
    parser.add_argument("--mean-tokens", type=int, nargs="+", default=[200, 2000], help="of a document, one row each")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--blend-samples", type=int, default=10**6)
    parser.add_argument("--blend-sources", type=int, nargs="+", default=[3, 100], help="one row each")
    parser.add_argument("--read-tokens", type=int, default=5 * 10**7, help="of the corpus that samples are read from")
    parser.add_argument("--reads", type=int, default=20_000)
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    for name in ("megabytes", "workers", "repeats", "tokens", "seq_len", "blend_samples", "read_tokens", "reads"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0; got {getattr(options, name)}")
    return options


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all tables, and return them as one record."""
    skipped = peer_problem()
    return {
        "options": {name: str(value) for name, value in vars(options).items()},
        "machine": {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]},
        "skipped": [skipped] if skipped else [],
        "build": measure_build(options, folder, not skipped),
        "sample_index": [measure_sample_index(options, mean, not skipped) for mean in options.mean_tokens],
        "blend": [measure_blend(options, sources, not skipped) for sources in options.blend_sources],
        "reads": [measure_reads(options, mean, folder, not skipped) for mean in options.mean_tokens],
    }


def measure_build(options: argparse.Namespace, folder: Path, with_peer: bool) -> dict[str, Any]:
    """Measure each contestant's tokens per second in turns, and its ratio to the tokenizer's in the same turn."""
    from benchmarks.index_build import CONTESTANTS, Corpus, made_up_texts, read_texts

    rng = np.random.default_rng(SEED)
    texts = list(read_texts(options.text, options.text_key, options.megabytes)) if options.text else []
    texts = texts or made_up_texts(options.megabytes, rng)
    corpus = Corpus(folder, texts, options.tokenizer or _trained_tokenizer(texts, folder), options.workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # for this process; workers turn it off
    names = [name for name in CONTESTANTS if with_peer or name != "megatron-core"]
    turns: list[dict[str, Any]] = []
    bar = tqdm(total=options.repeats * len(names), desc="build", file=sys.stderr)
    for _ in range(options.repeats):
        turn = {}
        for name in names:
            bar.set_postfix_str(name)
            os.environ["TOKENIZERS_PARALLELISM"] = "true"
            turn[name] = CONTESTANTS[name](corpus)
            bar.update()
        turns.append(turn)
    bar.close()
    if with_peer:
        _check_same_files(folder)
    rates = {name: np.array([turn[name].tokens / turn[name].seconds for turn in turns]) for name in names}
    on_one = {name: np.array([turn[name].tokens / turn[name].processor_seconds for turn in turns]) for name in names}
    return {
        "megabytes": corpus.path.stat().st_size / 1e6,
        "documents": len(texts),
        "tokens": turns[0]["in process"].tokens,
        "contestants": {
            name: {
                "tokens_per_second": float(np.median(rates[name])),
                "ratios": sorted((rates[name] / rates["tokenizer"]).tolist()),
                "processor_ratios": sorted((on_one[name] / on_one["tokenizer"]).tolist()),
                "start": float(np.median([turn[name].start for turn in turns])),
            }
            for name in names
        },
    }


def _trained_tokenizer(texts: list[str], folder: Path) -> Path:
    from verl_ext.tools.init_model.tokenizer import TokenizerOptions, trained_tokenizer

    trained_tokenizer(texts[:TRAINED_ON], TokenizerOptions(vocab_size=VOCABULARY)).save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def _check_same_files(folder: Path) -> None:
    for suffix in (".bin", ".idx"):
        written = [(folder / f"{name}{suffix}").read_bytes() for name in ("threads", "workers", "peer")]
        if written[0] != written[1] or written[0] != written[2]:
            raise RuntimeError(f"the builders wrote different {suffix} files")


def report(result: dict[str, Any]) -> str:
    """Format all tables as text."""
    build = result["build"]
    lines = [*result["skipped"], ""]
    lines.append(f"build: {build['megabytes']:.1f} MB, {build['documents']:,} documents, {build['tokens']:,} tokens")
    lines.append("tokens per second, and per second and per processor second to the tokenizer's: median [least, most]")
    for name, row in build["contestants"].items():
        ratios = "".join(f"{_spread(row[key]):>22}" for key in ("ratios", "processor_ratios"))
        lines.append(f"{name:<16}{row['tokens_per_second']:>12,.0f}{ratios}   start {row['start']:.1f} s")
    for row in result["sample_index"]:
        lines += ["", f"sample index: {row['tokens']:,} tokens in documents of {row['mean_tokens']:,} on average"]
        for name in ("verl_ext", "megatron-core"):
            if name in row:
                found = row[name]
                lines.append(
                    f"{name:<16}{found['seconds']:>7.2f} s of one core, peak {found['peak_mib']:,.0f} MiB above the "
                    f"lengths, {found['result_mib']:,.0f} of them the result; {found['documents']:,} documents"
                )
    lines.append("")
    for row in result["blend"]:
        beside = f", {_spread(row['ratios'])} × megatron-core's {row['megatron-core']:.3f} s" if "ratios" in row else ""
        lines.append(
            f"blend: {row['samples']:,} samples of {row['sources']} sources, Megatron's rule, "
            f"{row['verl_ext']:.3f} s{beside}"
        )
    for row in result["reads"]:
        lines += ["", f"random sample, warm map, documents of {row['mean_tokens']:,} on average"]
        lines += [f"{name:<30}{t['median']:>7.1f} µs, least {t['least']:.1f}" for name, t in row["readers"].items()]
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{np.median(values):.2f} [{values[0]:.2f}, {values[-1]:.2f}]"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write the tables."""
    options = arguments(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    print(report(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
