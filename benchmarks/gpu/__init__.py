"""One GPU: tokens/s, MFU, the longest document, the kernels of a step.

| contestant | what it is |
|---|---|
| `ours` | `attention.backend=auto`, which takes FlashAttention 3 by itself where it can; best-fit packs |
| `ours_liger`, `ours_fa3` | the same with `model.use_liger=true`; with FlashAttention 3 asked for by name |
| `verl` | 0.9.1, dynamic batches under the same token limit, no padding (its fused head fails under FSDP2) |
| `trl` | TRL's SFTTrainer, best-fit packs without padding |

- Same random weights, documents, AdamW, bf16 compute over fp32 weights and gradient checkpointing for everybody; a
  step's documents differ, and are the same for all: LongAlign's mixture scaled to the pack.
- Kernel, head and optimizer are those that ran. Tokens are the documents' own. Without flash-attn transformers gives
  every layer a mask of all tokens by all tokens of a pack (`T × T mask`): no ratio is taken of such a row, or to it.
- MFU: 6 FLOPs for each token and matrix parameter, and causal attention inside documents. docs/guides/gpu/figures.md
  has the rest of it, and what is reserved and allocated; `in 80 GB` compares what is reserved.

TRL cannot be installed beside verl 0.9.1: `pip install --no-deps --target DIR 'trl>=1.16'`, then `trl=DIR`. Every cell
has a process of its own. The row of a contestant that is not installed, or does not fit, says so.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import in_own_process
from benchmarks.gpu.cells import SHAPES, Cell, config_of_shape
from benchmarks.harness import Row, Sizes, allocator, option, table
from benchmarks.models import write_model

CONTESTANTS = ("ours", "ours_liger", "ours_fa3", "verl", "trl")
RAN = "kernel {kernel} | head {head} | optimizer {optimizer}"
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
    for shape in options.shapes:
        if not (folder / shape).is_dir():  # the tables of a run share it
            write_model(folder / shape, config_of_shape(shape), 16, torch.bfloat16)
        for pack in packs:
            rows = []
            for name in names or options.contestants:
                packages = options.trl if name == "trl" else None
                if packages or name != "trl":
                    work = f"benchmarks.gpu.cells:{kind}", Cell(name, shape, pack, options, folder)
                    found = in_own_process(*work, environment=allocator(), group=name != "trl", packages=packages)
                    rows.append({"shape": shape, "pack": pack, "name": name, **found})
            yield rows


def with_ratios(rows: Sequence[Row]) -> Iterable[Row]:
    """Yield rows with their speed over verl's; quadratic masks enter no ratio."""
    comparable = {row["name"]: row for row in rows if "failed" not in row and not row["quadratic"]}
    for row in rows:
        if "verl" in comparable and row["name"] in comparable:
            row["ratio"] = row["tokens_per_second"] / comparable["verl"]["tokens_per_second"]
        yield row


@table(
    f"shape {{shape}} | pack {{pack:,}} | contestant {{name}} | {RAN} | tokens/s {{tokens_per_second:,.0f}} | "
    "× verl {ratio:.2f} | model MFU {mfu:.2f} | computed MFU {computed_mfu:.2f} | GB reserved {reserved:.1f} | "
    "GB allocated {allocated:.1f}",
    may_fail=True,
)
def throughput(options: Options, folder: Path) -> Iterable[Row]:
    """Tokens per second."""
    return chain.from_iterable(map(with_ratios, measured("throughput", options, folder, options.packs)))


@table(
    f"shape {{shape}} | contestant {{name}} | {RAN} | in 80 GB {{in_80_gb:,}} | "
    "in the whole card {longest:,} | tokens/s there {tokens_per_second:,.0f}",
    may_fail=True,
)
def longest(options: Options, folder: Path) -> Iterable[Row]:
    """The longest document."""
    return chain.from_iterable(measured("longest", options, folder, [0]))


@table(
    "shape {shape} | pack {pack:,} | attention {attention:.0%} | matrix products {products:.0%} | "
    "optimizer {optimizer:.0%} | other kernels {other:.0%} | waiting {waiting:.0%}",
    may_fail=True,
)
def shares(options: Options, folder: Path) -> Iterable[Row]:
    """Shares of a step's time, by kind of kernel; waiting is for the host."""
    return chain.from_iterable(measured("shares", options, folder, options.packs, "ours"))
