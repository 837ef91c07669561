"""A training step on documents that begin alike, with and without `data.share_prefixes`, beside stock verl 0.9.1.

| documents | as in |
|---|---|
| `questions` | one text and 5 questions with answers, 5 % of their document: LongAlign's data with all its questions |
| `turns` | a document a turn of chats whose template drops the reasoning of earlier turns (`turns=each`) |
| `system` | chats of 300 tokens behind one system prompt of 1,000 |
| `nothing` | no common beginning: what looking for one costs a step |

All train on the same documents and report the same loss, or the run ends; a learning rate of 1e-30 moves no weight.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import on_ranks
from benchmarks.documents import Document, document_of, make_documents, write_documents
from benchmarks.harness import Row, option, table
from benchmarks.meters import measured
from benchmarks.models import VOCABULARY, write_qwen3
from benchmarks.training import NO_LEARNING, ModelSizes, ratios, rows_of_a_step

QUESTIONS, SHARE_OF_TEXT, TURNS, SYSTEM, CHAT = 5, 0.95, 6, 1000, 300
NAMES = ("dynamic", "whole", "shared")
KINDS = ("questions", "turns", "system", "nothing")
QUICK = ["hidden=128", "layers=1", "texts=[256]", "documents=10", "repeats=1", "turn=32", "kinds=[questions,nothing]"]


class Options(ModelSizes, kinds=KINDS):
    kinds: list[str] = option(list(KINDS), "documents")
    texts: list[int] = option([512, 1024, 2048, 4096], "questions: tokens of a text, a row of contestants each")
    documents: int = option(10, "documents of a step")
    turn: int = option(128, "turns: tokens of a question, and of an answer; its reasoning has twice as many")
    repeats: int = option(3, "measured steps")


@table(
    "documents {kind} | tokens of a text {text:,} | {name} | tokens {tokens[0]:,} | computed {computed:.0%} | "
    "s/step {wall.median:.2f} | × whole, wall {× whole, wall:.2f} | × whole, cpu {× whole, cpu:.2f} | "
    "× dynamic, cpu {× dynamic, cpu:.2f} | peak × whole {peak ratio:.2f}"
)
def sharing(options: Options, folder: Path) -> Iterable[Row]:
    """Time and memory of a step, by documents and contestant."""
    sizes = [("questions", text) for text in options.texts] + [("turns", 4 * options.turn), ("system", SYSTEM)]
    for kind, text in [*sizes, ("nothing", max(options.texts))]:
        if kind in options.kinds:
            place = options, kind, text, folder / f"{kind}_{text}"
            found = on_ranks(1, compete, *place, threads=options.threads)[0]["rows"]
            peaks = {name: on_ranks(1, peak_of, *place, name, threads=options.threads)[0]["peak"] for name in NAMES}
            for row in ratios(found, "whole", "dynamic"):
                yield {"kind": kind, "text": text, "peak ratio": peaks[row["name"]] / peaks["whole"], **row}


def documents_of(kind: str, text: int, options: Options, rng: np.random.Generator) -> list[Document]:
    """Draw the documents of a step."""

    def tokens(count: int) -> list[int]:
        return rng.integers(0, VOCABULARY, count).tolist()

    if kind == "nothing":
        return make_documents(options.documents, text, VOCABULARY, rng)
    documents: list[Document] = []
    prompt, of_answer = tokens(SYSTEM), max(round(text * (1 / SHARE_OF_TEXT - 1)), 8)
    while len(documents) < options.documents:
        if kind == "system":
            documents.append(document_of(prompt + tokens(CHAT), SYSTEM + CHAT // 2))
        elif kind == "questions":
            read = tokens(text)
            documents += [document_of(read + tokens(of_answer), text + of_answer // 2) for _ in range(QUESTIONS)]
        else:
            said: list[int] = []
            for _ in range(TURNS):
                question, reasoning, answer = (tokens(times * options.turn) for times in (1, 2, 1))
                documents.append(document_of(said + question + reasoning + answer, len(said + question)))
                said += question + answer
    return documents


def compete(options: Options, kind: str, text: int, folder: Path) -> Row:
    """Return the contestants' rows; a turn is a step on the same documents."""
    built = {name: build(options, kind, text, folder, name) for name in NAMES}
    return rows_of_a_step(built, options.repeats, folder / "model", 1.4e-5)


def peak_of(options: Options, kind: str, text: int, folder: Path, name: str) -> Row:
    """Return what a contestant's first step adds to this process's memory, in MiB."""
    contestant, batch = build(options, kind, text, folder, name)
    with measured() as figures:
        contestant.train(batch)
    return {"peak": figures["peak_mib"]}


def build(options: Options, kind: str, text: int, folder: Path, name: str) -> tuple[Any, Any]:
    """Return a contestant and its batch, a step of all documents."""
    from benchmarks.contestants import Setting

    documents = documents_of(kind, text, options, np.random.default_rng(0))
    # A pack holds a text with all its questions, or the turns of a chat.
    budget = max(2 * text, 32 * options.turn * (kind == "turns"), *(len(each["input_ids"]) for each in documents))
    if not folder.exists():
        write_qwen3(folder / "model", options.hidden, options.layers, budget)
        write_documents(documents, folder / "data")
    setting = Setting(folder / "model", folder / "data", folder, budget, options.repeats + 2, (NO_LEARNING,))
    shares = f"data.share_prefixes={str(name == 'shared').lower()}"
    contestant = setting.stock(name, None) if name == "dynamic" else setting.packed(name, shares)
    return contestant, contestant.load(documents, folder / "data")
