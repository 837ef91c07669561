"""The command that tokenizes chats, beside the tokenizer's own batch call.

In every turn each contestant gets the same chats:

| contestant | what it does |
|---|---|
| `encode_batch` | the tokenizer's own call on one core, on rendered texts in memory; it keeps no token |
| `local N` | all of `verl-ext tokenize num_workers=N`: parses, renders, masks and writes the records |
| `ray N` | the same with `backend=ray`, on a Ray cluster of N CPUs that it starts, or the one at `$RAY_ADDRESS` |

A ratio is the command's speed over encode_batch's in the same turn, with and without the command's start, which is the
time of the same command on one record with one worker. Memory is the largest sampled resident memory of the command's
process and of any of its workers.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, Turns, table, take_turns
from benchmarks.meters import run_command, seconds
from benchmarks.texts import CHATS, first_line, make_conversations, write_conversations
from verl_ext import options
from verl_ext.options import choice_problem, option

SEED = 1234
BATCH = 1000  # texts in one call
QUICK = ["chats=200", "workers=[1]", "backends=[local]", "repeats=1"]


@dataclass(frozen=True)
class Options(options.Options):
    """The chats and the commands."""

    records: str | None = option(None, "JSONL file of chats; null: made-up chats of four turns")
    tokenizer: str | None = option(None, "folder with a chat template; null: trained on the made-up chats")
    chats: int = option(50_000, "chats that are made up, or taken of the records", least=1)
    workers: list[int] = option([1, 2], "one command each")
    backends: list[str] = option(["local", "ray"], "one command each")
    repeats: int = option(3, "turns", least=1)

    def problems(self) -> Iterable[str | None]:
        """Yield a line for an unknown backend, and for records without their tokenizer."""
        yield from (choice_problem("backends", backend, ("local", "ray")) for backend in self.backends)
        if (self.records is None) != (self.tokenizer is None):
            yield f"records must come with tokenizer; got records={self.records}, tokenizer={self.tokenizer}"


@table(
    "{command} | chats {chats:,} | tokens {tokens:,} | seconds of encode_batch {alone.median:.1f} | "
    "of the command {whole.median:.1f} | of its start {start.median:.1f} | × encode_batch {ratio:.2f} | "
    "start included {with_start:.2f} | MiB of the command {own_mib:,.0f} | of a worker {worker_mib:,.0f}"
)
def commands(options: Options, folder: Path) -> Iterable[Row]:
    """The whole command on the same chats."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
    from transformers import AutoTokenizer

    records, tokenizer_folder = write_records(options, folder)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    texts = rendered_texts(records, tokenizer)
    tokenize = partial(run_tokenize, tokenizer_folder, folder / "tokenized")
    one = first_line(records)

    def turn(backend: str, workers: int) -> Row:
        counts: list[int] = []
        alone = seconds(lambda: counts.append(encode(tokenizer, texts)))
        start, whole = tokenize(one, backend, 1), tokenize(records, backend, workers)
        return {**whole, "alone": alone, "start": start["seconds"], "whole": whole["seconds"], "tokens": counts[0]}

    contestants = {f"{b} {w}": partial(turn, b, w) for b in options.backends for w in options.workers}
    for command, turns in take_turns(contestants, options.repeats).items():
        alone, start, whole = (Turns(each[name] for each in turns) for name in ("alone", "start", "whole"))
        yield {
            "command": command,
            "chats": len(texts),
            "tokens": turns[0]["tokens"],
            **{"alone": alone, "start": start, "whole": whole, "with_start": alone / whole},
            "ratio": alone / [all_of_it - of_start for all_of_it, of_start in zip(whole, start, strict=True)],
            **{name: max(each[name] for each in turns) for name in ("own_mib", "worker_mib")},
        }


def write_records(options: Options, folder: Path) -> tuple[Path, str]:
    """Write the chats' file; return it and the folder of the tokenizer."""
    if options.records is None or options.tokenizer is None:
        chats = make_conversations(CHATS, options.chats, np.random.default_rng(SEED))
        return write_conversations(chats, folder)[0], str(folder / "tokenizer")
    with open(options.records, "rb") as source, open(folder / "records.jsonl", "wb") as file:
        taken = [line for line, _ in zip(source, range(options.chats), strict=False)]
        file.writelines(taken * (options.chats // len(taken)))
    return folder / "records.jsonl", str(Path(options.tokenizer).absolute())


def rendered_texts(records: Path, tokenizer: Any) -> list[str]:
    """Return each chat as its template prints it."""
    from verl_ext.text.records.messages import Chat
    from verl_ext.text.records.records import parse_record

    contents = (parse_record(json.loads(line)).content for line in records.open(encoding="utf-8"))
    chats = [content.messages for content in contents if isinstance(content, Chat)]
    return [tokenizer.apply_chat_template(messages, tokenize=False) for messages in chats]


def encode(tokenizer: Any, texts: list[str]) -> int:
    """Call the tokenizer, and return the number of tokens."""
    batches = (texts[at : at + BATCH] for at in range(0, len(texts), BATCH))
    call = partial(tokenizer.backend_tokenizer.encode_batch, add_special_tokens=False)
    return sum(len(encoding) for batch in batches for encoding in call(batch))


def run_tokenize(tokenizer: str, output: Path, records: Path, backend: str, workers: int) -> Row:
    """Run the whole command."""
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "verl_ext", "tokenize", f"sources={{chats:{records}}}", f"output_dir={output}"]
    command += [f"model.path={tokenizer}", f"num_workers={workers}", f"backend={backend}"]
    return run_command(command)
