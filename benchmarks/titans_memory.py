"""Compare time and memory per token, by length, of a Qwen with long-term memory and the same Qwen with full attention.

    python benchmarks/titans_memory.py --output titans_memory.json        # --quick takes seconds, figures mean nothing

Every cell runs in a process of its own, so that its peak is its own; the two models take turns at every length.
README.md beside this file explains the comparison.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # lets the script run by its path

import torch
from tqdm import tqdm

MODELS = ("full", "memory")
WORK = ("read", "train")
VOCABULARY = 1024
ANSWER = 8  # target tokens at the end of a sequence


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--longest-step", type=int, default=16384, help="longest sequence that is trained on")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk")
    parser.add_argument("--bptt-chunks", type=int, help="gradients reach back so many chunks; all of them unless given")
    parser.add_argument("--repeats", type=int, default=2, help="of every cell; the fastest counts")
    parser.add_argument("--quick", action="store_true", help="everything small")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--cell", nargs=3, metavar=("MODEL", "WORK", "LENGTH"), help="measure one and print JSON")
    options = parser.parse_args(argv)
    if options.quick:
        options.lengths, options.hidden, options.layers, options.chunk, options.repeats = [128, 256], 32, 2, 64, 1
    for name in ("hidden", "layers", "chunk", "repeats", "longest_step"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1; got {getattr(options, name)}")
    if min(options.lengths) < 2 * ANSWER:
        parser.error(f"--lengths must be at least {2 * ANSWER}; got {min(options.lengths)}")
    return options


def build(kind: str, options: argparse.Namespace, device: str) -> Any:
    """Build the Qwen3 with random weights, plain or with a memory in its middle layer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from verl_ext.models.qwen_titans import QwenTitansConfig, QwenTitansForCausalLM

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
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if kind == "full":
        model: Any = Qwen3ForCausalLM(base)
    else:
        more = {"bptt_chunks": options.bptt_chunks, "layers": [options.layers // 2]}
        sizes = {"chunk_size": options.chunk, "sub_chunk": 64, "heads": heads, "head_dim": options.hidden // heads}
        model = QwenTitansForCausalLM(QwenTitansConfig.from_base(base, **sizes, **more))
    model.config._attn_implementation = "sdpa"
    return model.to(device=device, dtype=dtype)


def work(kind: str, what: str, length: int, options: argparse.Namespace, device: str) -> tuple[Any, Callable[[], Any]]:
    """Return (model, one pass): `read` scores the token after the sequence, `train` runs forward and backward."""
    model = build(kind, options, device)
    ids = torch.randint(0, VOCABULARY, (1, length), device=device)
    if what == "read":
        return model, torch.no_grad()(lambda: model(ids, use_cache=False, logits_to_keep=1).logits)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()

    def step() -> None:
        logits = model(ids, use_cache=False, logits_to_keep=ANSWER + 1).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits.float(), ids[0, -ANSWER:]).backward()
        model.zero_grad(set_to_none=True)

    return model, step


def measure_cell(kind: str, what: str, length: int, options: argparse.Namespace) -> dict[str, float]:
    """Return a pass's seconds, its peak MiB above the idle model, the parameters, and the memory's share of time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _, warm_up = work(kind, what, 2 * ANSWER, options, device)
    warm_up()  # loads libraries and starts threads
    model, one_pass = work(kind, what, length, options, device)
    before = _peak(device, start=True)
    seconds = []
    for _ in range(options.repeats):
        began = time.perf_counter()
        one_pass()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    mib = (_peak(device) - before) / 2**20
    parameters = sum(parameter.numel() for parameter in model.parameters())
    share = memory_share(model, one_pass) if kind == "memory" and what == "read" else 0.0
    return {"seconds": min(seconds), "mib": mib, "parameters": parameters, "share": share}


def memory_share(model: Any, one_pass: Callable[[], Any]) -> float:
    """Return the share of another pass that is spent inside the memories, waiting for the GPU at each border."""

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    spent = [0.0]
    for memory in model.memory.values():
        memory.register_forward_pre_hook(lambda *_: spent.append(spent.pop() - now()))
        memory.register_forward_hook(lambda *_: spent.append(spent.pop() + now()))
    began = now()
    one_pass()
    return spent[0] / (now() - began)


def _peak(device: str, start: bool = False) -> float:
    """Return bytes: on a GPU those allocated now (start) or the peak since, on a CPU the process's peak so far."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform != "darwin" else 1)
    if start:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return torch.cuda.max_memory_allocated()


def measure(options: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure every cell in a process of its own."""
    cells = [(what, length) for what in WORK for length in sorted(options.lengths)]
    cells = [(what, length) for what, length in cells if what == "read" or length <= options.longest_step]
    rows = []
    with tqdm(total=2 * len(cells), unit="cell") as bar:
        for what, length in cells:
            row: dict[str, Any] = {"work": what, "length": length}
            for kind in MODELS:
                bar.set_description(f"{kind} {what} {length:,}")
                command = [sys.executable, __file__, *argv, "--cell", kind, what, str(length)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{kind} {what} {length}: {done.stderr.strip().splitlines()[-1]}")
                row[kind] = json.loads(done.stdout)
                bar.update()
            rows.append(row)
    settings = {key: value for key, value in vars(options).items() if key not in ("output", "cell")}
    machine = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()}
    return {"settings": settings, "machine": {**machine, "torch": torch.__version__}, "rows": rows}


def report(result: dict[str, Any]) -> str:
    """Format the parameters, and a Markdown table of µs per token and MiB."""
    full, memory = (result["rows"][0][kind]["parameters"] for kind in MODELS)
    lines = [
        f"parameters: {full:,}, and {memory - full:,} of the memory",
        "",
        "| | tokens | full attention: µs a token · MiB | memory: µs a token · MiB | its own share "
        "| time, full over memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [f"{row[kind]['seconds'] / row['length'] * 1e6:.0f} · {row[kind]['mib']:.0f}" for kind in MODELS]
        share = f"{100 * row['memory']['share']:.0f} %" if row["work"] == "read" else ""
        ratio = row["full"]["seconds"] / row["memory"]["seconds"]
        lines.append(f"| {row['work']} | {row['length']:,} | {cells[0]} | {cells[1]} | {share} | {ratio:.2f} × |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write the table."""
    options = arguments()
    if options.cell:
        kind, what, length = options.cell
        print(json.dumps(measure_cell(kind, what, int(length), options)))
        return
    result = measure(options, [word for word in sys.argv[1:] if word != "--cell"])
    print(report(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
