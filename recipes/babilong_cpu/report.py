"""The recipe's table: generated answers with and without memory, over seeds, lengths and distances, beside guesses.

python recipes/babilong_cpu/report.py --run babilong_cpu_run
"""

import argparse
import json
import os
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import verl_ext.models.qwen_titans  # noqa: F401 - registers the model type
from verl_ext.commands.babilong.stories import PLACES, VERBS
from verl_ext.data.babilong import prompt_text
from verl_ext.data.babilong_answers import PLACE_LABELS, compare_answers

MOVE = re.compile(rf"(\w+) (?:{'|'.join(VERBS['move'])}) the ({'|'.join(PLACES)})\.")
WORD = re.compile(r"\w+|[^\w\s]")  # a token of the recipe's tokenizer
BATCH_TOKENS = 200_000
KINDS = {"memory": "with memory", "tokens": "with memory tokens", "plain": "without"}
Rows = dict[str, list[list[float]]]  # by title, for each column the figures of the seeds or the one of a guess


class Sample(NamedTuple):
    """A question, what a guess would say, and how far back its fact is."""

    prompt: str
    question: str
    target: str
    last: str  # the last place that an actor moved to
    held: list[str]  # the actors' last places
    distance: int  # tokens from the last move to the target until the answer


def samples(file: Path) -> list[Sample]:
    """The samples of a file of `verl-ext babilong`."""
    found = []
    for record in json.loads(file.read_text(encoding="utf-8")):
        text, target = record["input"], record["target"]
        prompt = prompt_text(text, record["question"])
        moves = list(MOVE.finditer(text))
        asked = max(move.end() for move in moves if move[2] == target)
        held = list({move[1]: move[2] for move in moves}.values())
        distance = len(WORD.findall(prompt[asked:]))
        found.append(Sample(prompt, record["question"], target, moves[-1][2], held, distance))
    return found


@torch.no_grad()
def answers(folder: Path, files: list[Path]) -> list[list[bool]]:
    """Whether the exported model of a run generates the right place, by BABILong's rule, for each sample of each file."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    right = []
    for file in files:
        asked = samples(file)
        size = max(1, BATCH_TOKENS // len(WORD.findall(asked[0].prompt)))
        texts = []
        for first in range(0, len(asked), size):
            batch = tokenizer(
                [sample.prompt for sample in asked[first : first + size]], padding=True, return_tensors="pt"
            )
            batch.pop("token_type_ids", None)
            said = model.generate(**batch, max_new_tokens=2, do_sample=False, pad_token_id=tokenizer.pad_token_id)
            texts += tokenizer.batch_decode(said[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        right.append(
            [compare_answers(text, x.target, x.question, PLACE_LABELS) for text, x in zip(texts, asked, strict=True)]
        )
    return right


def table(rows: Rows, head: str, columns: list[str]) -> str:
    """Markdown, in percent: mean and range of several figures, or the one."""

    def cell(values: list[float]) -> str:
        middle = f"{100 * mean(values):.0f}"
        return middle if len(values) == 1 else f"{middle} ({100 * min(values):.0f} to {100 * max(values):.0f})"

    lines = [f"| {head} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {title} | {' | '.join(map(cell, cells))} |" for title, cells in rows.items()]
    return "\n".join(lines)


def report(run: Path, seeds: list[str], task: str) -> str:
    """Both tables: by length, of all questions and of those where the last place is wrong; and by distance."""
    files = sorted((run / "val" / task).glob("*.json"), key=lambda file: int(file.stem))
    asked = [samples(file) for file in files]
    runs = {(kind, seed): run / f"{kind}_{seed}" for kind in KINDS for seed in seeds}
    folders = {key: max(path.glob("global_step_*")) / "huggingface" for key, path in runs.items() if path.is_dir()}
    with ProcessPoolExecutor() as pool:
        found = dict(zip(folders, pool.map(answers, folders.values(), [files] * len(folders)), strict=True))

    def share(kind: str, wanted: list[list[bool]]) -> list[float]:
        """Of each seed, the right answers among the wanted samples."""
        return [
            mean(
                answer
                for each in zip(found[kind, seed], wanted, strict=True)
                for answer, one in zip(*each, strict=True)
                if one
            )
            for seed in seeds
        ]

    ...
