"""One GPU: tokens per second and MFU beside stock verl and TRL, the longest document, shares of a step's time.

Same random weights, documents, AdamW, bf16 compute over fp32 weights and gradient checkpointing for everybody; a step's
documents differ, and are the same for all. Lengths are LongAlign's mixture scaled to the pack (documents.py), a quarter
of the tokens are targets. `verl` is 0.9.1 with dynamic batches under the same token limit and no padding (its fused
head fails under FSDP2); `trl` packs best-fit without padding. `ours` is `attention.backend=auto`, which takes
FlashAttention 3 by itself where it can; `ours_fa3` asks for it by name. Kernel, head and optimizer are those that ran.
Tokens are the documents' own. MFU: 6 FLOPs for each token and matrix parameter, and causal attention inside documents;
nothing for recomputation. Model MFU counts the head over all tokens whatever a contestant computes; computed MFU counts
it over the targets alone where no more is computed. GB are 10⁹ bytes at the peak: reserved is
`torch.cuda.max_memory_reserved`, which `in 80 GB` compares, allocated is `max_memory_allocated`.

TRL cannot be installed beside verl 0.9.1: `pip install --no-deps --target DIR 'trl>=1.16'`, then `trl=DIR`. Every cell
has a process of its own. The row of a contestant that is not installed, or does not fit, says so.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import in_own_process
from benchmarks.gpu.shapes import SHAPES, Cell
from benchmarks.harness import Row, allocator, table, words_of
from verl_ext import options
from verl_ext.options import choice_problem, option

CONTESTANTS = ("ours", "ours_liger", "ours_fa3", "verl", "trl")
RAN = "kernel {kernel} | head {head} | optimizer {optimizer}"
MARK = "¹"
QUICK = ["packs=[512]", "step_tokens=1024", "steps=2", "first=256", "shapes=[tiny]", "contestants=[ours,verl]"]


@dataclass(frozen=True)
class Options(options.Options):
    """Contestants, shapes and lengths."""

    contestants: list[str] = option(list(CONTESTANTS), f"of {', '.join(CONTESTANTS)}")
    shapes: list[str] = option(["0.6B", "1.7B"], f"of {', '.join(SHAPES)}; tiny ones run on a CPU too")
    packs: list[int] = option([8192, 32_768, 131_072], "tokens of a pack")
    step_tokens: int = option(262_144, "tokens of an optimizer step, about", least=1)
    steps: int = option(4, "measured steps, after one more", least=1)
    first: int = option(65_536, "tokens with which the search for the longest document begins", least=256)
    overrides: dict[str, Any] = option({}, "options of ours, such as loss.head_block_mib:1024")
    trl: str | None = option(None, "folder that holds TRL alone; null: without TRL")

    def problems(self) -> Iterable[str | None]:
        """Yield a line for an unknown name, or a shape that needs a GPU."""
        yield from (choice_problem("contestants", name, CONTESTANTS) for name in self.contestants)
        yield from (choice_problem("shapes", name, SHAPES) for name in self.shapes)
        if not torch.cuda.is_available() and not all(shape.startswith("tiny") for shape in self.shapes):
            yield f"shapes must be tiny ones without a CUDA GPU (--quick); got {', '.join(self.shapes)}"

    def cells(self, folder: Path, packs: Sequence[int], *names: str) -> Iterable[list[Cell]]:
        """Yield the contestants' cells of each shape and pack, after writing the shape's model."""
        contestants = [name for name in names or self.contestants if name != "trl" or self.trl]
        common = Cell("", "", 0, self.step_tokens, self.steps, self.first, words_of(self.overrides), folder)
        for shape in self.shapes:
            if not (folder / shape).is_dir():  # the tables of a run share it
                prepared = in_own_process("benchmarks.gpu.cell:prepare", replace(common, shape=shape))
                if "failed" in prepared:
                    raise RuntimeError(f"{shape}: {prepared['failed']}")
            for pack in packs:
                yield [replace(common, contestant=name, shape=shape, pack=pack) for name in contestants]


def measured(options: Options, kind: str, cell: Cell) -> Row:
    """Return a cell's figures, with its contestant marked if its mask is quadratic."""
    is_trl = cell.contestant == "trl"
    environment = allocator()
    if is_trl:  # only its process can import it
        paths = (str(Path(options.trl or "").absolute()), os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    function = f"benchmarks.gpu.{'trl_cell' if is_trl else 'cell'}:{kind}"
    row = in_own_process(function, cell, environment=environment, group=not is_trl)
    mark = f" {MARK}" if row.get("quadratic") else ""
    named = {"name": cell.contestant, "contestant": cell.contestant + mark}
    return {"shape": cell.shape, "pack": cell.pack, **named, **row}


def marked(rows: Sequence[Row]) -> str:
    """Explain the mark, if a row has it."""
    if not any(row.get("quadratic") for row in rows):
        return ""
    return (
        f"{MARK} Without flash-attn transformers gives every layer a mask of all tokens by all tokens of a pack. The "
        "row says what that costs, and no ratio is taken of it or to it."
    )


on_a_gpu = partial(table, may_fail=True, notes=marked)


@on_a_gpu(
    f"shape {{shape}} | pack {{pack:,}} | contestant {{contestant}} | {RAN} | tokens/s {{tokens_per_second:,.0f}} | "
    "× verl {ratio:.2f} | model MFU {mfu:.2f} | computed MFU {computed_mfu:.2f} | GB reserved {reserved:.1f} | "
    "GB allocated {allocated:.1f}"
)
def throughput(options: Options, folder: Path) -> Iterable[Row]:
    """Tokens per second."""
    for cells in options.cells(folder, options.packs):
        yield from with_ratios([measured(options, "throughput", cell) for cell in cells])


def with_ratios(rows: Sequence[Row]) -> Iterable[Row]:
    """Yield the rows of the same work with their speed over verl's; quadratic masks enter no ratio."""
    comparable = {row["name"]: row for row in rows if "failed" not in row and not row["quadratic"]}
    for row in rows:
        if "verl" in comparable and row["name"] in comparable:
            row["ratio"] = row["tokens_per_second"] / comparable["verl"]["tokens_per_second"]
        yield row


@on_a_gpu(
    f"shape {{shape}} | contestant {{contestant}} | {RAN} | in 80 GB {{in_80_gb:,}} | in the whole card {{longest:,}} "
    "| tokens/s there {tokens_per_second:,.0f}"
)
def longest(options: Options, folder: Path) -> Iterable[Row]:
    """The longest document."""
    for cells in options.cells(folder, [0]):
        yield from (measured(options, "longest", cell) for cell in cells)


@on_a_gpu(
    "shape {shape} | pack {pack:,} | attention {attention:.0%} | mlp {mlp:.0%} | head {head:.0%} | "
    "optimizer {optimizer:.0%} | other {other:.0%} | waiting {waiting:.0%}"
)
def shares(options: Options, folder: Path) -> Iterable[Row]:
    """Shares of a step's time."""
    for cells in options.cells(folder, options.packs, "ours"):
        yield from (measured(options, "shares", cell) for cell in cells)
