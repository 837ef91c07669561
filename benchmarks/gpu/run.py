"""Measure one GPU: tokens per second and MFU beside stock verl and TRL, the longest context, and a step's time shares.

    python benchmarks/gpu/run.py                 # writes RESULTS.md beside this file
    python benchmarks/gpu/run.py --quick         # tiny shapes, also on a CPU: a check that it runs

TRL cannot be installed beside verl 0.9.1: `pip install --no-deps --target DIR 'trl>=1.16'`, then `--trl DIR`.

Every cell runs in a process of its own, so that its memory is its own. The row of a contestant that is not installed,
or does not fit, says so.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("throughput", "longest", "shares")
IMPLEMENTATIONS = ("kernel", "head", "optimizer")
CONTESTANTS = ("ours", "ours_liger", "ours_fa3", "verl", "trl")
_TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
_SMALL: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16}
_QWEN3_5 = {"model_type": "qwen3_5_text", "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6}
_NEMOTRON_H = {"model_type": "nemotron_h", "layers_block_type": [*["mamba", "mlp"] * 5, "attention", "mlp"] * 3}
_GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4}
SHAPES: dict[str, dict[str, Any]] = {  # a Qwen3 unless it names another type; tied embeddings, heads of 128
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3_5": {**_SMALL, **_QWEN3_5, "num_hidden_layers": 24},
    "nemotron_h": {**_SMALL, **_NEMOTRON_H},
    "gpt_oss": {**_SMALL, **_GPT_OSS, "intermediate_size": 1024, "num_hidden_layers": 16},
    "tiny": {**_TINY, "num_hidden_layers": 2},
    "tiny_qwen3_5": {
        **_TINY,
        **_QWEN3_5,
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    "tiny_nemotron_h": {**_TINY, **_NEMOTRON_H, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
    "tiny_gpt_oss": {**_TINY, **_GPT_OSS, "num_hidden_layers": 2},
}
NOTES = """\
Same random weights, documents, AdamW, bf16 compute over fp32 weights and gradient checkpointing for everybody; a
step's documents differ, and are the same for all. Lengths are LongAlign's mixture scaled to the pack
(benchmarks/lengths.py), a quarter of the tokens are targets. `verl` is 0.9.1 with dynamic batches under the same token
limit and no padding (its fused head fails under FSDP2); `trl` packs best-fit without padding. `ours` is
`attention.backend=auto`, which takes FlashAttention 3 by itself where it can; `ours_fa3` asks for it by name. Kernel,
head and optimizer are those that ran. Tokens are the documents' own. MFU: 6 FLOPs for each token and matrix parameter,
and causal attention inside documents; nothing for recomputation. Model MFU counts the head over all tokens whatever a
contestant computes; computed MFU counts it over the targets alone where no more is computed. GB are 10⁹ bytes at the
peak: reserved is `torch.cuda.max_memory_reserved`, which `in 80 GB` compares, allocated is `max_memory_allocated`."""
MARK = "¹"
QUADRATIC = f"""\
{MARK} Without flash-attn transformers gives every layer a mask of all tokens by all tokens of a pack. The row says what
that costs, and no ratio is taken of it or to it."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6B", "1.7B"])
    parser.add_argument("--packs", nargs="+", type=int, default=[8192, 32_768, 131_072], help="tokens of a pack")
    parser.add_argument("--step-tokens", type=int, default=262_144, help="of an optimizer step, about")
    parser.add_argument("--steps", type=int, default=4, help="measured, after one more")
    parser.add_argument("--first-length", type=int, default=65_536, help="where the search for the longest begins")
    parser.add_argument("--overrides", nargs="+", default=[], help="options of ours, such as loss.head_block_mib=1024")
    parser.add_argument("--trl", help="a folder that holds TRL alone; without it TRL is left out")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS.md"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes: whether everything runs")
    options = parser.parse_args()
    if not options.trl:
        options.contestants = [name for name in options.contestants if name != "trl"]
    if options.quick:
        options.packs, options.step_tokens = [512], 1024
        options.shapes = [shape for shape in options.shapes if shape.startswith("tiny")] or ["tiny"]
        options.steps, options.first_length = 2, 256
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; --quick runs tiny shapes on a CPU")
    return options


def cell(kind: str, folder: Path, trl: str | None = None, **given: Any) -> dict[str, Any]:
    """Return the cell's measurements, or {"failed": why}; only TRL's process can import TRL."""
    script = "trl_cell.py" if given.get("contestant") == "trl" else "cell.py"
    spec = json.dumps({"kind": kind, "folder": str(folder), **given})
    print(f"{kind}: {', '.join(f'{key} {value}' for key, value in given.items())}", file=sys.stderr, flush=True)
    command = [sys.executable, str(Path(__file__).with_name(script)), spec]
    paths = [trl] if trl and given.get("contestant") == "trl" else []
    environment = {
        **os.environ,
        **allocator(),
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
    }
    return {**given, **outcome(subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment))}


def outcome(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the output of a cell's process before it ended, with "failed": why if it failed."""
    found: dict[str, Any] = {}
    lines = [line for line in done.stdout.splitlines() if line.startswith(('{"', "{}"))]  # TRL prints Python dicts
    for line in lines:
        found |= json.loads(line)
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        found["failed"] = "out of memory" if "out of memory" in done.stderr else reason[:160]
    return found


def allocator() -> dict[str, str]:
    """Return the caching allocator's setting for every cell: the user's own, else a run's default."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    given = {name: os.environ[name] for name in names if name in os.environ}
    return given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Measure the cells of every section."""
    for shape in options.shapes:
        prepared = cell("prepare", folder, shape=shape)
        if "failed" in prepared:
            raise SystemExit(f"error: {prepared['failed']}")
    own = {"overrides": options.overrides} if options.overrides else {}
    sizes = {"step_tokens": options.step_tokens, "steps": options.steps, **own}
    found: dict[str, list[dict[str, Any]]] = {}
    if "throughput" in options.sections:
        found["throughput"] = [
            cell("throughput", folder, options.trl, contestant=contestant, shape=shape, pack=pack, **sizes)
            for shape in options.shapes
            for pack in options.packs
            for contestant in options.contestants
        ]
    if "longest" in options.sections:
        found["longest"] = [
            cell("longest", folder, options.trl, contestant=contestant, shape=shape, first=options.first_length, **own)
            for shape in options.shapes
            for contestant in options.contestants
        ]
    if "shares" in options.sections:
        found["shares"] = [
            cell("shares", folder, contestant="ours", shape=shape, pack=pack, **sizes)
            for shape in options.shapes
            for pack in options.packs
        ]
    return found


def report(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the text of RESULTS.md."""
    lines = [
        "# Results on one GPU",
        "",
        machine(),
        "",
        f"    python {' '.join(['benchmarks/gpu/run.py', *sys.argv[1:]])}",
    ]
    lines += ["", NOTES]
    if any(row.get("quadratic") for rows in found.values() for row in rows):
        lines += ["", QUADRATIC]
    if rows := found.get("throughput"):
        figures = ("tokens/s", "× verl", "model MFU", "computed MFU", "GB reserved", "GB allocated")
        head = ("shape", "pack", "contestant", *IMPLEMENTATIONS, *figures)
        lines += ["", "## Tokens per second", "", *table(head, [throughput_row(row, rows) for row in rows])]
    if rows := found.get("longest"):
        head = ("shape", "contestant", *IMPLEMENTATIONS, "in 80 GB", "in the whole card", "tokens/s there")
        lines += ["", "## Longest document", "", *table(head, [longest_row(row) for row in rows])]
    if rows := found.get("shares"):
        kinds = ("attention", "mlp", "head", "optimizer", "other", "waiting")
        cells = [
            [
                row["shape"],
                f"{row['pack']:,}",
                *([row["failed"]] if "failed" in row else [f"{row[k]:.0%}" for k in kinds]),
            ]
            for row in rows
        ]
        lines += ["", "## Shares of a step's time", "", *table(("shape", "pack", *kinds), cells)]
    return "\n".join(lines) + "\n"


def throughput_row(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return the figures, or the reason why there are none; rows with quadratic masks enter no ratio."""
    start = [row["shape"], f"{row['pack']:,}", *what_ran(row)]
    if "failed" in row:
        return [*start, row["failed"]]
    peers = [r for r in rows if (r["shape"], r["pack"]) == (row["shape"], row["pack"]) and "failed" not in r]
    comparable = [r for r in peers if not (r["quadratic"] or row["quadratic"])]
    stock = next((r["tokens_per_second"] for r in comparable if r["contestant"] == "verl"), None)
    ratio = "–" if stock is None else f"{row['tokens_per_second'] / stock:.2f}"
    mfus = ["–" if row[key] is None else f"{row[key]:.2f}" for key in ("mfu", "computed_mfu")]
    peaks = [f"{row[key] / 1e9:.1f}" for key in ("reserved", "allocated")]
    return [*start, f"{row['tokens_per_second']:,.0f}", ratio, *mfus, *peaks]


def what_ran(row: dict[str, Any]) -> list[str]:
    """Return the contestant, marked if its mask is quadratic, and its implementations as far as they are known."""
    mark = f" {MARK}" if row.get("quadratic") else ""
    return [row["contestant"] + mark, *(row.get(kind, "–") for kind in IMPLEMENTATIONS)]


def longest_row(row: dict[str, Any]) -> list[str]:
    """Return the figures, or the reason why there are none."""
    start = [row["shape"], *what_ran(row)]
    if "failed" in row:
        return [*start, row["failed"]]
    return [*start, f"{row['in_80_gb']:,}", f"{row['longest']:,}", f"{row['tokens_per_second']:,.0f}"]


def table(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table; a short row's last cell is its reason."""
    filled = [row + [""] * (len(head) - len(row)) for row in rows]
    return [f"| {' | '.join(row)} |" for row in [list(head), ["---"] * len(head), *filled]]


def machine() -> str:
    """Return the GPU, driver, versions and the allocator's setting in a line."""
    parts = [platform.processor() or platform.machine()]
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()
        parts = [torch.cuda.get_device_name(), f"driver {driver[0] if driver else 'unknown'}"]
    parts.append(f"torch {torch.__version__}")
    for package in ("verl", "transformers", "flash-attn", "liger-kernel"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"no {package}")
    parts += [f"{name}={value}" for name, value in allocator().items()]
    return ", ".join(parts)


def main() -> None:
    """Measure, and write the results."""
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        text = report(measure(options, Path(folder)))
    options.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
