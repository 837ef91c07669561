"""Time and memory per token, by length, of a Qwen with long-term memory and of the same Qwen with full attention.

A small Qwen3 with random weights (fp32 on a CPU, bf16 on a GPU) runs once with full causal attention (transformers'
`sdpa`, which never holds a T × T matrix), and once as `model=qwen_titans` in chunks with a memory in one layer. `read`
scores the next token after T tokens, without gradients. `train` is the forward and backward pass of a step whose
targets are the last 8 tokens, with gradient checkpointing in both; training back through all chunks keeps one layer
input per token, which `bptt_chunks` limits. A cell has a process of its own: its time is the fastest of its passes, its
memory the peak above that of the loaded model. For reading, the share of the time inside the memory's modules is
measured too.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.cells import in_own_process
from benchmarks.harness import Row, table
from benchmarks.meters import measured, seconds, wait_for_gpu
from verl_ext import options
from verl_ext.models.qwen_titans import QwenTitansConfig, QwenTitansForCausalLM
from verl_ext.options import option

MODELS = ("full", "memory")
VOCABULARY = 1024
ANSWER = 8  # target tokens at the end of a sequence
QUICK = ["lengths=[128]", "hidden=32", "layers=2", "chunk=64", "repeats=1"]


@dataclass(frozen=True)
class Options(options.Options):
    """Sizes of the model and lengths of the texts."""

    lengths: list[int] = option([4096, 8192, 16384, 32768, 65536], "tokens of a sequence, at least 16, a row each")
    longest_step: int = option(16384, "tokens of the longest sequence that is trained on", least=1)
    hidden: int = option(256, "hidden size", least=1)
    layers: int = option(4, "layers", least=1)
    chunk: int = option(2048, "tokens of a chunk", least=1)
    bptt_chunks: int | None = option(None, "chunks that gradients reach back; null: all of them")
    repeats: int = option(2, "passes of a cell, of which the fastest counts", least=1)

    def problems(self) -> Iterable[str]:
        """Yield a line for a length that leaves no text before the answer."""
        if short := [length for length in self.lengths if length < 2 * ANSWER]:
            yield f"lengths must be at least {2 * ANSWER}; got {short[0]}"


@table(
    "{work} | tokens {length:,} | full attention: µs a token {full[us]:.0f} | MiB {full[peak_mib]:.0f} | "
    "memory: µs a token {memory[us]:.0f} | MiB of it {memory[peak_mib]:.0f} | its own share {memory[share]:.0%} | "
    "time, full over memory {ratio:.2f} × | parameters {full[parameters]:,} | with memory {memory[parameters]:,}",
)
def lengths(options: Options, folder: Path) -> Iterable[Row]:
    """Both models at every length."""
    for work in ("read", "train"):
        for length in sorted(options.lengths):
            if work == "read" or length <= options.longest_step:
                cells = {kind: in_own_process(measure, kind, work, length, options) for kind in MODELS}
                if failed := next((cell["failed"] for cell in cells.values() if "failed" in cell), None):
                    raise RuntimeError(f"{work} {length}: {failed}")
                yield {"work": work, "length": length, **cells, "ratio": cells["full"]["us"] / cells["memory"]["us"]}


def measure(kind: str, work: str, length: int, options: Options) -> Row:
    """Return microseconds a token, peak MiB above the idle model, parameters, and the memory's share of time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    work_of(kind, work, 2 * ANSWER, options, device)[1]()  # loads libraries and starts threads
    model, one_pass = work_of(kind, work, length, options, device)
    with measured() as figures:
        fastest = min(seconds(one_pass) for _ in range(options.repeats))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    found = {"us": fastest / length * 1e6, "peak_mib": figures["peak_mib"], "parameters": parameters}
    return {**found, "share": memory_share(model, one_pass) if kind == "memory" and work == "read" else None}


def build(kind: str, options: Options, device: str) -> Any:
    """Build the Qwen3 with random weights, plain or with a memory in its middle layer."""
    torch.manual_seed(0)
    heads = max(options.hidden // 64, 1)
    base = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=options.hidden // heads,
        max_position_embeddings=max(options.lengths),
    )
    if kind == "full":
        model: Any = Qwen3ForCausalLM(base)
    else:
        more = {"bptt_chunks": options.bptt_chunks, "layers": [options.layers // 2]}
        sizes = {"chunk_size": options.chunk, "sub_chunk": 64, "heads": heads, "head_dim": options.hidden // heads}
        model = QwenTitansForCausalLM(QwenTitansConfig.from_base(base, **sizes, **more))
    model.config._attn_implementation = "sdpa"
    return model.to(device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)


def work_of(kind: str, work: str, length: int, options: Options, device: str) -> tuple[Any, Callable[[], Any]]:
    """Return (model, one pass): `read` scores the token after the sequence, `train` runs forward and backward."""
    model = build(kind, options, device)
    ids = torch.randint(0, VOCABULARY, (1, length), device=device)
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
    """Return the share of another pass that is spent inside the memories, waiting for the GPU at each border."""
    spent = [0.0]

    def now() -> float:
        wait_for_gpu()
        return time.perf_counter()

    for memory in model.memory.values():
        memory.register_forward_pre_hook(lambda *_: spent.append(spent.pop() - now()))
        memory.register_forward_hook(lambda *_: spent.append(spent.pop() + now()))
    whole = seconds(one_pass)
    return spent[0] / whole
