"""Print the recipe's tables: the accuracy of answers with and without memory by length and distance, beside guesses.

python recipes/papers/babilong_cpu/report.py --run babilong_cpu_run --task qa1
"""

import argparse
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import verl_ext.titans  # noqa: F401 - registers the model type
from verl_ext.data.families.babilong import question_prompt
from verl_ext.data.families.babilong_answers import PLACE_LABELS, compare_answers
from verl_ext.tools.babilong.stories import OBJECTS, PLACES, VERBS

KINDS = {"memory": "with memory", "plain": "without"}
VERB = "|".join(verb for kind in ("move", "get", "drop") for verb in VERBS[kind])
FACT = re.compile(rf"(\w+) ({VERB}) the ({'|'.join((*PLACES, *OBJECTS))})\b")  # actor, verb, place or object
WORD = re.compile(r"\w+|[^\w\s]")  # a token of the recipe's tokenizer
BATCH_TOKENS = 200_000  # the most tokens of one batch
DISTANCES = (0, 32, 128, 512, 2048, 8192, 1 << 30)


class Sample(NamedTuple):
    """A question, the guesses that need no look at it, and the distance back to its facts."""

    prompt: str
    question: str
    target: str
    held: list[str]  # each actor's last place; the actor who moved last comes first
    distance: int  # tokens from the earliest needed fact to the answer

    def guesses(self) -> dict[str, float]:
        """Return the expected accuracy of answers that ignore whom or what the question asks for."""
        return {
            "the last place named": float(self.target == self.held[0]),
            "that of the actor before": float(self.target in self.held[1:2]),
            "some actor's place": self.held.count(self.target) / len(self.held),
            "any place": 1 / len(PLACES),
        }


PARTS: dict[str, Callable[[Sample], bool]] = {
    "all questions": lambda sample: True,
    "the last place named is wrong": lambda sample: sample.target != sample.held[0],
    "and so is that of the actor before": lambda sample: sample.target not in sample.held[:2],
}


def read_sample(record: dict[str, str]) -> Sample:
    """Parse a qa1 or qa2 sample of `verl-ext babilong`."""
    text, question = record["input"], record["question"]
    prompt = question_prompt(text, question)
    facts = list(FACT.finditer(text))
    held: dict[str, str] = {}
    for actor, verb, place in (fact.groups() for fact in reversed(facts)):
        if verb in VERBS["move"]:
            held.setdefault(actor, place)
    actor, until, needed = question.strip(" ?").split()[-1], len(text), len(text)
    if actor in OBJECTS:  # needs the object's last get or drop and its actor's last move (before it, if it is a drop)
        touched = next(fact for fact in reversed(facts) if fact[3] == actor)
        actor, needed = touched[1], touched.start()
        until = needed if touched[2] in VERBS["drop"] else until
    moves = [fact.start() for fact in facts if fact[1] == actor and fact[2] in VERBS["move"] and fact.start() < until]
    distance = len(WORD.findall(prompt[min(needed, moves[-1]) :]))
    return Sample(prompt, question, record["target"], list(held.values()), distance)


def read_samples(file: Path) -> list[Sample]:
    """Return the samples of a file of `verl-ext babilong`."""
    return [read_sample(record) for record in json.loads(file.read_text(encoding="utf-8"))]


@torch.no_grad()
def answers(folder: Path, files: list[Path]) -> list[bool]:
    """Return, for each sample, whether an exported model generates the right place by BABILong's rule."""
    torch.set_num_threads(1)  # each model has a process of its own
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    right = []
    for file in files:
        samples = read_samples(file)
        size = max(1, BATCH_TOKENS // len(WORD.findall(samples[0].prompt)))
        for batch in (samples[first : first + size] for first in range(0, len(samples), size)):
            given = tokenizer([each.prompt for each in batch], padding=True, return_tensors="pt")
            ids, mask = given["input_ids"], given["attention_mask"]
            said = model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0)
            texts = tokenizer.batch_decode(said[:, ids.shape[1] :])
            right += [
                compare_answers(text, each.target, each.question, PLACE_LABELS)
                for text, each in zip(texts, batch, strict=True)
            ]
    return right


def table(head: str, columns: Iterable[str], rows: dict[str, list[list[float]]]) -> str:
    """Return a Markdown table in percent: the mean and range over seeds, a guess's single figure, or an empty cell."""

    def cell(values: list[float]) -> str:
        if len(values) < 2:
            return f"{100 * values[0]:.0f}" if values else ""
        return f"{100 * mean(values):.0f} ({100 * min(values):.0f} to {100 * max(values):.0f})"

    lines = [f"| {head} | {' | '.join(columns)} |", "|---" * (1 + len(list(columns))) + "|"]
    lines += [f"| {title} | {' | '.join(map(cell, cells))} |" for title, cells in rows.items()]
    return "\n".join(lines)


def report(run: Path, task: str) -> str:
    """Return both tables: by length (all questions, and those that defeat the easy guesses) and by distance."""
    files = sorted((run / task / "val" / task).glob("*.json"), key=lambda file: int(file.stem))
    samples = [(file.stem, sample) for file in files for sample in read_samples(file)]
    folders = {
        (kind, path.name): max(path.glob("global_step_*")) / "huggingface"
        for kind in KINDS
        for path in sorted((run / task).glob(f"{kind}_*"))
    }
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = dict(zip(folders, pool.map(answers, folders.values(), [files] * len(folders)), strict=True))

    def shares(kind: str, chosen: list[bool]) -> list[float]:
        """Return each seed's share of right answers among the chosen samples."""
        rights = [right for (each, _), right in found.items() if each == kind]
        return [
            mean(one for one, wanted in zip(right, chosen, strict=True) if wanted) for right in rights if any(chosen)
        ]

    seeds = max(sum(each == kind for each, _ in found) for kind in KINDS)
    present = [kind for kind in KINDS if any(each == kind for each, _ in found)]
    sizes, stems = [file.stem for file in files], [stem for stem, _ in samples]
    rows: dict[str, list[list[float]]] = {}
    for part, is_of in PARTS.items():
        columns = [[stem == size and is_of(sample) for stem, sample in samples] for size in sizes]
        of_size = [
            [sample for (_, sample), wanted in zip(samples, column, strict=True) if wanted] for column in columns
        ]
        rows[f"**{part}**: share"] = [
            [sum(column) / stems.count(size)] for size, column in zip(sizes, columns, strict=True)
        ]
        for kind in present:
            rows[f"{part}: {KINDS[kind]}"] = [shares(kind, column) for column in columns]
        guesses = [[sample.guesses() for sample in some] for some in of_size]
        best = [max(mean(each[name] for each in some) for name in some[0]) for some in guesses]
        rows[f"{part}: the best guess"] = [[each] for each in best]
    by_length = table(f"{task}, % right: mean (range) of {seeds} seeds", [f"{size} tokens" for size in sizes], rows)
    between = list(itertools.pairwise(DISTANCES))
    columns = [[low <= sample.distance < high for _, sample in samples] for low, high in between]
    rows = {KINDS[kind]: [shares(kind, column) for column in columns] for kind in present}
    heads = [f"{low} to {high - 1}" if high < DISTANCES[-1] else f"from {low}" for low, high in between]
    return f"{by_length}\n\n{table('tokens from the earliest fact needed to the answer', heads, rows)}"


def main() -> None:
    """Print the tables and write them beside the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--task", default="qa1", choices=("qa1", "qa2"))
    options = parser.parse_args()
    text = report(options.run, options.task)
    print(text)
    (options.run / f"table_{options.task}.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
