"""Compare the command that tokenizes chats with the tokenizer's own batch call.

    python benchmarks/tokenizing.py --output tokenizing.json

The script makes its own chats and tokenizer; `--records FILE.jsonl --tokenizer FOLDER` uses yours. In every turn each
contestant gets the same chats:

| contestant | what it does |
|---|---|
| `encode_batch` | the tokenizer's own call on one core, on rendered texts in memory; it keeps no token |
| `local N` | all of `verl-ext tokenize num_workers=N`: parses, renders, masks and writes the records |
| `ray N` | the same with `backend=ray`, on a Ray cluster of N CPUs that it starts, or the one at `$RAY_ADDRESS` |

A ratio is the command's speed over encode_batch's in the same turn, with and without the command's start, which is the
time of the same command on one record with one worker. Memory is the largest sampled resident memory of the command's
process and of any of its workers.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # lets the script run by its path

import numpy as np
import psutil
from tqdm import tqdm

SEED = 1234
BATCH = 1000  # texts in one call
SAMPLED_EVERY = 0.2  # seconds


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, help="JSONL file; default: made-up chats of four turns")
    parser.add_argument("--tokenizer", type=Path, help="folder with a chat template; default: trained on the chats")
    parser.add_argument("--chats", type=int, default=50_000, help="made up, or taken of the records")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="one command each")
    parser.add_argument("--backends", nargs="+", default=["local", "ray"], choices=["local", "ray"])
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    if options.tokenizer is None and options.records is not None:
        parser.error("--records must come with --tokenizer")
    for name in ("chats", "repeats"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} must be above 0; got {getattr(options, name)}")
    return options


def write_records(options: argparse.Namespace, folder: Path) -> Path:
    """Write the chats' file, and set the tokenizer's folder in `options`."""
    from benchmarks.conversations import CHATS, make_conversations, write_conversations

    if options.records is None:
        options.tokenizer = folder / "tokenizer"
        chats = make_conversations(CHATS, options.chats, np.random.default_rng(SEED))
        return write_conversations(chats, folder)[0]
    with open(options.records, "rb") as source, open(folder / "records.jsonl", "wb") as file:
        taken = [line for line, _ in zip(source, range(options.chats), strict=False)]
        file.writelines(taken * (options.chats // len(taken)))
    return folder / "records.jsonl"


def rendered_texts(records: Path, tokenizer: Any) -> list[str]:
    """Return each chat as its template prints it."""
    from verl_ext.text.messages import Chat
    from verl_ext.text.records import parse_record

    contents = (parse_record(json.loads(line)).content for line in records.open(encoding="utf-8"))
    chats = [content.messages for content in contents if isinstance(content, Chat)]
    return [tokenizer.apply_chat_template(messages, tokenize=False) for messages in chats]


def encode(tokenizer: Any, texts: list[str]) -> tuple[float, int]:
    """Return the seconds of the tokenizer's calls, and the number of tokens."""
    backend, tokens = tokenizer.backend_tokenizer, 0
    began = time.perf_counter()
    for at in range(0, len(texts), BATCH):
        tokens += sum(map(len, backend.encode_batch(texts[at : at + BATCH], add_special_tokens=False)))
    return time.perf_counter() - began, tokens


def run_command(records: Path, tokenizer: Path, backend: str, workers: int, folder: Path) -> dict[str, float]:
    """Return the seconds of the whole command, and the peak MiB of its process and of a worker."""
    output = folder / "tokenized"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "verl_ext", "tokenize", f"sources={{chats:{records}}}", f"output_dir={output}"]
    command += [f"model.path={tokenizer}", f"num_workers={workers}", f"backend={backend}"]
    began = time.perf_counter()
    root, nowhere = Path(__file__).resolve().parents[1], subprocess.DEVNULL
    run = psutil.Popen(command, cwd=root, stdout=nowhere, stderr=nowhere)
    peaks = {"own_mib": 0.0, "worker_mib": 0.0}
    while run.poll() is None:
        for process in (run, *run.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if process == run or "ray::" in words or "multiprocessing" in words:
                    key = "own_mib" if process == run else "worker_mib"
                    peaks[key] = max(peaks[key], process.memory_info().rss / 2**20)
        with contextlib.suppress(psutil.TimeoutExpired):
            run.wait(SAMPLED_EVERY)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)
    return {"seconds": time.perf_counter() - began, **peaks}


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the times of each turn and their ratios."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
    from transformers import AutoTokenizer

    records = write_records(options, folder)
    one_record = folder / "one.jsonl"
    with open(records, "rb") as lines:
        one_record.write_bytes(next(lines))
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    texts = rendered_texts(records, tokenizer)
    commands = [(backend, workers) for backend in options.backends for workers in options.workers]
    rows: dict[str, list[dict[str, Any]]] = {f"{backend} {workers}": [] for backend, workers in commands}
    bar = tqdm(total=options.repeats * len(rows), desc="tokenize", file=sys.stderr)
    tokens = 0
    for _ in range(options.repeats):
        for (backend, workers), turns in zip(commands, rows.values(), strict=True):
            alone, tokens = encode(tokenizer, texts)
            start = run_command(one_record, options.tokenizer, backend, 1, folder)
            whole = run_command(records, options.tokenizer, backend, workers, folder)
            seconds = whole.pop("seconds")
            ratios = {"ratio": alone / (seconds - start["seconds"]), "ratio_with_start": alone / seconds}
            turns.append({"encode_batch": alone, "command": seconds, "start": start["seconds"], **ratios, **whole})
            bar.update()
    bar.close()
    return {
        "options": {name: str(value) for name, value in vars(options).items()},
        "machine": {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]},
        "chats": len(texts),
        "tokens": tokens,
        "commands": rows,
    }


def report(result: dict[str, Any]) -> str:
    """Format the table."""
    lines = [f"{result['chats']:,} chats, {result['tokens']:,} tokens"]
    lines.append("speed by encode_batch's, without and with the start: median [least, most]; median seconds")
    for command, turns in result["commands"].items():
        ratios = "".join(f"{_spread([turn[key] for turn in turns]):>22}" for key in ("ratio", "ratio_with_start"))
        seconds = {key: np.median([turn[key] for turn in turns]) for key in ("encode_batch", "command", "start")}
        told = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        speed = result["tokens"] / seconds["command"]
        peaks = [max(turn[key] for turn in turns) for key in ("own_mib", "worker_mib")]
        memory = f"{peaks[0]:,.0f} MiB, of a worker {peaks[1]:,.0f} MiB"
        lines.append(f"{command:<8}{ratios}   {told}; {speed:,.0f} tokens/s; {memory}")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{np.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write the table."""
    options = arguments(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    print(report(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
