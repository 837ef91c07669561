"""The command that tokenizes chats, beside the tokenizer's own batch call, by chat template.

A long chat is JOINED of the records, each message joined with those at its place. Processor time is that of all the
command's processes, divided by its workers. Memory is the largest sampled resident memory of the command's process and
of any of its workers.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cells import ROOT
from benchmarks.harness import Row, Sizes, Turns, option, table, take_turns
from benchmarks.meters import run_command
from benchmarks.texts import CHATS, Conversation, make_conversations, write_conversations
from verl_ext.tools.init_model.tokenizer import CHATML_TEMPLATE

SEED = 1234
BATCH = 1000  # texts in one call
JOINED = 20  # short chats of a long one, of about 4,000 tokens
TOOLS = (ROOT / "benchmarks/tools.jinja").read_text(encoding="utf-8")  # with tools, calls and thoughts
TEMPLATES = {"chatml": CHATML_TEMPLATE, "tools": TOOLS}  # the first is the quickstart's
QUICK = ["chats=200", "workers=[1]", "templates=[chatml]", "lengths=[short]", "repeats=1"]


class Options(Sizes, lengths=("short", "long"), backends=("local", "ray")):
    records: str | None = option(None, "JSONL file of chats; null: made-up chats of four turns")
    tokenizer: str | None = option(None, "folder with a chat template; null: trained on the made-up chats")
    chats: int = option(40_000, "short chats that are made up, or taken of the records", least=JOINED * 4)
    templates: list[str] = option([*TEMPLATES], f"{', '.join(TEMPLATES)}, own (the tokenizer's), or Jinja files")
    lengths: list[str] = option(["short", "long"], "short | long: about 4,000 tokens")
    workers: list[int] = option([1, 2], "one command each")
    backends: list[str] = option(["local"], "one command each: local | ray")
    repeats: int = option(3, "turns")

    def problems(self) -> Iterable[str | None]:
        yield from super().problems()
        if (self.records is None) != (self.tokenizer is None):
            yield f"records must come with tokenizer; got records={self.records}, tokenizer={self.tokenizer}"


class Corpus(NamedTuple):
    """Chats in a file, a quarter of them in another, and the rendered texts of the rest."""

    whole: Path
    part: Path
    texts: list[str]
    template: list[str]  # the command's option for it


@table(
    "template {template} | chats {length} | tokens {tokens:,} | command {command} | × encode_batch {speed:.2f} | "
    "× one worker {gain:.2f} | by processor time: × encode_batch {cpu_speed:.2f} | × one worker {cpu_gain:.2f} | "
    "seconds of its start {start.median:.1f} | MiB of the command {own_mib:,.0f} | of a worker {worker_mib:,.0f}"
)
def commands(options: Options, folder: Path) -> Iterable[Row]:
    """The steady state of the command on the same chats."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
    from transformers import AutoTokenizer

    chats, tokenizer_folder = read_chats(options, folder)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    corpora = {
        (template, length): write_corpus(chats, length, template, tokenizer, folder)
        for template, length in product(options.templates, options.lengths)
    }

    def turn(corpus: Corpus, backend: str, workers: int) -> Row:
        began, cpu, tokens = time.perf_counter(), time.process_time(), encode(tokenizer, corpus.texts)
        alone = {"alone": time.perf_counter() - began, "cpu_alone": time.process_time() - cpu}
        more = [f"model.path={tokenizer_folder}", f"num_workers={workers}", f"backend={backend}", *corpus.template]
        part, whole = (run_tokenize(file, folder / "tokenized", more) for file in (corpus.part, corpus.whole))
        wall, cpu = whole["seconds"] - part["seconds"], (whole["cpu"] - part["cpu"]) / workers
        return {**whole, **alone, "tokens": tokens, "wall": wall, "cpu": cpu, "start": part["seconds"] - wall / 3}

    cases = [*product(corpora, options.backends, sorted(options.workers))]
    contestants = {str(case): partial(turn, corpora[case[0]], *case[1:]) for case in cases}
    results = take_turns(contestants, options.repeats).values()
    for ((template, length), backend, workers), turns in zip(cases, results, strict=True):
        took = {name: Turns(each[name] for each in turns) for name in turns[0]}
        row: Row = {"start": took["start"], "tokens": turns[0]["tokens"], "command": f"{backend} {workers}"}
        row |= {"speed": took["alone"] / took["wall"], "cpu_speed": took["cpu_alone"] / took["cpu"]}
        if workers == 1:
            one = took
        elif 1 in options.workers:
            row |= {"gain": one["wall"] / took["wall"], "cpu_gain": one["cpu"] / took["cpu"]}
        row |= {name: max(took[name]) for name in ("own_mib", "worker_mib")}
        yield {"template": Path(template).stem, "length": length, **row}


def read_chats(options: Options, folder: Path) -> tuple[list[Conversation], str]:
    """Return the short chats and the folder of the tokenizer."""
    from verl_ext.text.records.records import parse_record

    if options.records is None or options.tokenizer is None:
        chats = make_conversations(CHATS, options.chats, np.random.default_rng(SEED))
        write_conversations(chats, folder)
        return chats, str(folder / "tokenizer")
    with open(options.records, "rb") as source:
        chats = [parse_record(json.loads(line)).content.messages for line in source][: options.chats]
    return (chats * -(-options.chats // len(chats)))[: options.chats], str(Path(options.tokenizer).absolute())


def write_corpus(chats: list[Conversation], length: str, template: str, tokenizer: Any, folder: Path) -> Corpus:
    """Write the chats of a length, and render them with a template."""
    if length == "long":
        groups = (zip(*chats[at : at + JOINED], strict=False) for at in range(0, len(chats), JOINED))
        joined = (((turn[0]["role"], "\n\n".join(each["content"] for each in turn)) for turn in g) for g in groups)
        chats = [[{"role": role, "content": content} for role, content in turns] for turns in joined]
    files, part = (folder / f"{length}.jsonl", folder / f"{length}_part.jsonl"), len(chats) // 4
    for file, some in zip(files, (chats, chats[:part]), strict=True):
        file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in some))
    source, option = None, []
    if template != "own":
        source = TEMPLATES.get(template) or Path(template).read_text(encoding="utf-8")
        path = folder / f"{Path(template).stem}.jinja"
        path.write_text(source, encoding="utf-8")
        option = [f"chat_template={path}"]
    texts = [tokenizer.apply_chat_template(chat, chat_template=source, tokenize=False) for chat in chats[part:]]
    return Corpus(*files, texts, option)


def encode(tokenizer: Any, texts: list[str]) -> int:
    """Call the tokenizer, and return the number of tokens."""
    batches = (texts[at : at + BATCH] for at in range(0, len(texts), BATCH))
    call = partial(tokenizer.backend_tokenizer.encode_batch, add_special_tokens=False)
    return sum(len(encoding) for batch in batches for encoding in call(batch))


def run_tokenize(records: Path, output: Path, more: list[str]) -> Row:
    """Run the whole command."""
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "verl_ext", "tokenize", f"sources={{chats:{records}}}", f"output_dir={output}"]
    return run_command([*command, *more])
