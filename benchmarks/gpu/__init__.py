"""One GPU: tokens/s, MFU, the longest document, shares of a step's time.

| contestant | what it is |
|---|---|
| `ours` | `attention.backend=auto`, which takes FlashAttention 3 by itself where it can; best-fit packs |
| `ours_liger`, `ours_fa3` | the same with `model.use_liger=true`; with FlashAttention 3 asked for by name |
| `verl` | 0.9.1, dynamic batches under the same token limit, no padding (its fused head fails under FSDP2) |
| `trl` | TRL's SFTTrainer, best-fit packs without padding |

- Same random weights, documents, AdamW, bf16 compute over fp32 weights and gradient checkpointing for everybody; a
  step's documents differ, and are the same for all: LongAlign's mixture scaled to the pack.
- Kernel, head and optimizer are those that ran. Tokens are the documents' own.
- MFU: 6 FLOPs for each token and matrix parameter, and causal attention inside documents; nothing for recomputation.
  Model MFU counts the head over all tokens whatever a contestant computes; computed MFU counts it over the targets
  alone where no more is computed.
- GB are 10⁹ bytes at the peak: reserved is `torch.cuda.max_memory_reserved`, which `in 80 GB` compares, allocated is
  `max_memory_allocated`.

TRL cannot be installed beside verl 0.9.1: `pip install --no-deps --target DIR 'trl>=1.16'`, then `trl=DIR`. Every cell
has a process of its own. The row of a contestant that is not installed, or does not fit, says so.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import in_own_process
from benchmarks.gpu.shapes import SHAPES, Cell, config_of
from benchmarks.harness import Row, Sizes, allocator, option, table
from benchmarks.models import write_model

CONTESTANTS = ("ours", "ours_liger", "ours_fa3", "verl", "trl")
RAN = "kernel {kernel} | head {head} | optimizer {optimizer}"
MARK = "¹"
QUICK = ["packs=[512]", "step_tokens=1024", "steps=2", "first=256", "shapes=[tiny]", "contestants=[ours,verl]"]


class Options(Sizes, contestants=CONTESTANTS, shapes=SHAPES):
    contestants: list[str] = option(list(CONTESTANTS), f"of {', '.join(CONTESTANTS)}")
    shapes: list[str] = option(["0.6B", "1.7B"], f"of {', '.join(SHAPES)}; tiny runs on a CPU too")
    packs: list[int] = option([8192, 32_768, 131_072], "tokens of a pack")
    step_tokens: int = option(262_144, "tokens of an optimizer step, about")
    steps: int = option(4, "measured steps, after one more")
    first: int = option(65_536, "tokens with which the search for the longest document begins", least=256)
    overrides: dict[str, Any] = option({}, "options of ours, such as loss.head_block_mib:1024")
    trl: str | None = option(None, "folder that holds TRL alone; null: without TRL")

    def problems(self) -> Iterable[str | None]:
        yield from super().problems()
        if not torch.cuda.is_available() and set(self.shapes) != {"tiny"}:
            yield f"shapes must be tiny without a CUDA GPU (--quick); got {', '.join(self.shapes)}"


def measured(kind: str, options: Options, folder: Path, packs: Sequence[int], *names: str) -> Iterable[list[Row]]:
    """Yield the contestants' rows for each shape and pack."""
    names = [name for name in names or options.contestants if name != "trl" or options.trl]
    for shape in options.shapes:
        if not (folder / shape).is_dir():  # the tables of a run share it
            written = in_own_process(write_model, folder / shape, config_of(shape), 16, torch.bfloat16)
            if "failed" in written:
                raise RuntimeError(f"{shape}: {written['failed']}")
        for pack in packs:
            yield [row_of(kind, Cell(name, shape, pack, options, folder)) for name in names]


def row_of(kind: str, cell: Cell) -> Row:
    """Return a cell's figures, marked if its mask is quadratic."""
    is_trl = cell.contestant == "trl"
    function = f"benchmarks.gpu.{'trl_cell' if is_trl else 'cell'}:{kind}"
    packages = cell.options.trl if is_trl else None
    row = in_own_process(function, cell, environment=allocator(), group=not is_trl, packages=packages)
    mark = f" {MARK}" if row.get("quadratic") else ""
    return {"shape": cell.shape, "pack": cell.pack, "name": cell.contestant, "mark": mark, **row}


def marked(rows: Sequence[Row]) -> str:
    if not any(row.get("quadratic") for row in rows):
        return ""
    return (
        f"{MARK} Without flash-attn transformers gives every layer a mask of all tokens by all tokens of a pack. The "
        "row says what that costs, and no ratio is taken of it or to it."
    )


def with_ratios(rows: Sequence[Row]) -> Iterable[Row]:
    """Yield rows with their speed over verl's; quadratic masks enter no ratio."""
    comparable = {row["name"]: row for row in rows if "failed" not in row and not row["quadratic"]}
    for row in rows:
        if "verl" in comparable and row["name"] in comparable:
            row["ratio"] = row["tokens_per_second"] / comparable["verl"]["tokens_per_second"]
        yield row


on_a_gpu = partial(table, may_fail=True, notes=marked)


@on_a_gpu(
    f"shape {{shape}} | pack {{pack:,}} | contestant {{name}}{{mark}} | {RAN} | tokens/s {{tokens_per_second:,.0f}} | "
    "× verl {ratio:.2f} | model MFU {mfu:.2f} | computed MFU {computed_mfu:.2f} | GB reserved {reserved:.1f} | "
    "GB allocated {allocated:.1f}"
)
def throughput(options: Options, folder: Path) -> Iterable[Row]:
    """Tokens per second."""
    for rows in measured("throughput", options, folder, options.packs):
        yield from with_ratios(rows)


@on_a_gpu(
    f"shape {{shape}} | contestant {{name}}{{mark}} | {RAN} | in 80 GB {{in_80_gb:,}} | "
    "in the whole card {longest:,} | tokens/s there {tokens_per_second:,.0f}"
)
def longest(options: Options, folder: Path) -> Iterable[Row]:
    """The longest document."""
    for rows in measured("longest", options, folder, [0]):
        yield from rows


@on_a_gpu(
    "shape {shape} | pack {pack:,} | attention {attention:.0%} | mlp {mlp:.0%} | head {head:.0%} | "
    "optimizer {optimizer:.0%} | other {other:.0%} | waiting {waiting:.0%}"
)
def shares(options: Options, folder: Path) -> Iterable[Row]:
    """Shares of a step's time."""
    for rows in measured("shares", options, folder, options.packs, "ours"):
        yield from rows
