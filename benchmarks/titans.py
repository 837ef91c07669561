"""Time and memory per token, with long-term memory and full attention.

Training back through all chunks keeps one layer input per token, which `bptt_chunks` limits. For reading, the share of
the time inside the memory's modules is measured too.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from benchmarks.cells import in_own_process
from benchmarks.harness import Row, Sizes, option, table
from benchmarks.meters import measured, seconds, wait_for_gpu
from benchmarks.models import VOCABULARY, config_of
from verl_ext.titans import QwenTitansConfig, QwenTitansForCausalLM

ANSWER = 8  # target tokens at the end of a sequence
QUICK = ["lengths=[128]", "hidden=32", "layers=2", "chunk=64", "repeats=1"]


class Options(Sizes):
    lengths: list[int] = option([4096, 8192, 16384, 32768, 65536], "tokens of a sequence, at least 16, a row each")
    longest_step: int = option(16384, "tokens of the longest sequence that is trained on")
    hidden: int = option(256, "hidden size")
    layers: int = option(4, "layers")
    chunk: int = option(2048, "tokens of a chunk")
    bptt_chunks: int | None = option(None, "chunks that gradients reach back; null: all of them")
    repeats: int = option(2, "passes of a cell, of which the fastest counts")

    def problems(self) -> Iterable[str]:
        if short := [length for length in self.lengths if length < 2 * ANSWER]:
            yield f"lengths must be at least {2 * ANSWER}; got {short[0]}"


@table(
    "{work} | tokens {length:,} | full attention: µs a token {full[us]:.0f} | MiB {full[peak_mib]:.0f} | "
    "memory: µs a token {memory[us]:.0f} | MiB of it {memory[peak_mib]:.0f} | its own share {memory[share]:.0%} | "
    "time, full over memory {ratio:.2f} ×",
)
def lengths(options: Options, folder: Path) -> Iterable[Row]:
    """Both models at every length."""
    for work in ("read", "train"):
        for length in sorted(options.lengths):
            if work == "read" or length <= options.longest_step:
                cells = {kind: in_own_process(measure, kind, work, length, options) for kind in ("full", "memory")}
                if failed := [cell["failed"] for cell in cells.values() if "failed" in cell]:
                    raise RuntimeError(f"{work} {length}: {failed[0]}")
                yield {"work": work, "length": length, **cells, "ratio": cells["full"]["us"] / cells["memory"]["us"]}


def measure(kind: str, work: str, length: int, options: Options) -> Row:
    work_of(kind, work, 2 * ANSWER, options)[1]()  # loads libraries and starts threads
    model, one_pass = work_of(kind, work, length, options)
    with measured() as figures:
        fastest = min(seconds(one_pass) for _ in range(options.repeats))
    share = memory_share(model, one_pass) if kind == "memory" and work == "read" else None
    return {**figures, "us": fastest / length * 1e6, "share": share}


def work_of(kind: str, work: str, length: int, options: Options) -> tuple[Any, Callable[[], Any]]:
    """Return a model with random weights, and one pass of the work."""
    torch.manual_seed(0)
    fields = {"intermediate_size": 4 * options.hidden, "max_position_embeddings": max(options.lengths)}
    base = config_of("qwen3", options.hidden, options.layers, **fields)
    if kind == "full":
        model: Any = Qwen3ForCausalLM(base)
    else:
        sizes = {"chunk_size": options.chunk, "sub_chunk": 64, "layers": [options.layers // 2]}
        heads = {"heads": base.num_attention_heads, "head_dim": base.head_dim, "bptt_chunks": options.bptt_chunks}
        model = QwenTitansForCausalLM(QwenTitansConfig.from_base(base, **sizes, **heads))
    model.config._attn_implementation = "sdpa"
    on_gpu = torch.cuda.is_available()
    model.to(**{"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {})
    ids = torch.randint(0, VOCABULARY, (1, length), device=model.device)
    if work == "read":
        return model, torch.no_grad()(lambda: model(ids, use_cache=False, logits_to_keep=1).logits)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()

    def step() -> None:
        logits = model(ids, use_cache=False, logits_to_keep=ANSWER + 1).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits.float(), ids[0, -ANSWER:]).backward()
        model.zero_grad(set_to_none=True)

    return model, step


def memory_share(model: Any, one_pass: Callable[[], Any]) -> float:
    """Return the share of another pass inside the memories."""
    spent = [0.0]

    def now() -> float:
        wait_for_gpu()  # at each border
        return time.perf_counter()

    for memory in model.memory.values():
        memory.register_forward_pre_hook(lambda *_: spent.append(spent.pop() - now()))
        memory.register_forward_hook(lambda *_: spent.append(spent.pop() + now()))
    whole = seconds(one_pass)
    return spent[0] / whole
