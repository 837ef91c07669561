"""Preferences beside SFT on the same rows, with a shared prompt, and TRL 1.16's DPOTrainer.

A prompt has 95 % of each row, or a ninth. TRL cannot be imported beside verl 0.9.1, so `trl=` names a folder that holds
it. The reference's sums are 0 for all, whose losses must agree; a learning rate of 1e-30 moves no weight.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.cells import in_own_process, on_ranks
from benchmarks.documents import Document, document_of, write_documents
from benchmarks.harness import Row, equal, option, table
from benchmarks.models import VOCABULARY, write_qwen3
from benchmarks.training import NO_LEARNING, ModelSizes, ratios, rows_of_a_step

DPO = ("pairs", "data=preference", "loss=dpo")  # the folder of its rows, and its options
PROMPT_SHARE = 0.95  # of a row
QUICK = ["hidden=128", "layers=1", "prompts=[256]", "answers=[]", "repeats=1"]


class Options(ModelSizes):
    prompts: list[int] = option([512, 1024, 2048, 4096], "tokens of a prompt, 95 % of its documents, a row each")
    answers: list[int] = option([512], "tokens of an answer to a prompt of an eighth of it, a row each")
    pairs: int = option(2, "pairs of a step")
    repeats: int = option(3, "measured steps")
    trl: str | None = option(None, "folder that holds TRL alone; null: without TRL")


@table(
    "tokens of a prompt {prompt:,} | of an answer {answer:,} | {name} | tokens {tokens[0]:,} | "
    "computed {computed:.0%} | cpu s/step {cpu.median:.2f} | × sft, cpu {× sft, cpu:.3f} | "
    "× whole, cpu {× whole, cpu:.2f} | × trl, cpu {× trl, cpu:.2f}"
)
def steps(options: Options, folder: Path) -> Iterable[Row]:
    """Speed of a step on the same pairs."""
    cases = [(prompt, max(round(prompt * (1 / PROMPT_SHARE - 1)), 8)) for prompt in options.prompts]
    for prompt, answer in [*cases, *((max(answer // 8, 1), answer) for answer in options.answers)]:
        place = options, prompt, answer, folder / f"{prompt}_{answer}"
        rows = on_ranks(1, compete, *place, threads=options.threads)[0]["rows"]
        if options.trl:
            work = place[-1] / "model", pairs_of(options, prompt, answer), prompt, options.repeats, options.threads
            found = in_own_process("benchmarks.trl_trainers:train_on_pairs", *work, packages=options.trl)
            rows.append({**{name: rows[1][name] for name in ("tokens", "ran")}, "name": "trl", **found})
        equal(rows[1:3], ("loss",), 1e-5)
        equal(rows[1:], ("loss",), 1e-4)  # TRL adds up log-probabilities in fp32
        for row in ratios(rows, *(row["name"] for row in rows if "cpu" in row)):
            yield {"prompt": prompt, "answer": answer, **row}


def pairs_of(options: Options, prompt: int, answer: int) -> list[Document]:
    """Draw the rows of a step: the preferred answer to each prompt, then the rejected one."""
    rng, documents = np.random.default_rng(0), []
    for _ in range(options.pairs):
        read, *said = (rng.integers(2, VOCABULARY, count) for count in (prompt, answer, answer))
        documents += [document_of(np.concatenate([read, each]), prompt) for each in said]
    return documents


def compete(options: Options, prompt: int, answer: int, folder: Path) -> Row:
    """Return our contestants' rows; a turn is a step on the same pairs."""
    from benchmarks.contestants import Setting

    documents, budget = pairs_of(options, prompt, answer), 2 * (prompt + answer)
    write_qwen3(folder / "model", options.hidden, options.layers, budget)
    units = {"unit": np.tile([2, 0], options.pairs), "answer": np.tile([1, -1], options.pairs)}
    write_documents(documents, folder / "rows")
    write_documents(documents, folder / "pairs", {**units, "pair_weight": np.ones(len(documents))})
    built = {}
    for name, shares, data, *own in (("sft", "false", "rows"), ("whole", "false", *DPO), ("shared", "true", *DPO)):
        setting = Setting(folder / "model", folder / data, folder, budget, options.repeats + 2, (NO_LEARNING,))
        one = setting.packed(name, *own, f"data.share_prefixes={shares}")
        built[name] = one, one.load(documents, setting.data)
    return rows_of_a_step(built, options.repeats, folder / "model", np.inf)  # SFT's loss is another
