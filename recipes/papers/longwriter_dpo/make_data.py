"""Write texts of chapters, writing prompts and a benchmark for the small form of this recipe.

    python recipes/papers/longwriter_dpo/make_data.py --output DIR

writes chats.jsonl for the fine-tuning, prompts.jsonl for the preferences, and cases.jsonl in LongBench-Write's form.
Each prompt asks for 200 or 300 words, each chapter has 100. In chats.jsonl two of five answers have the length
that is asked for; the others have 100 words, a habit that the preferences are to end. The subjects of the cases are in
no other file. The same seed writes the same bytes.
"""

import argparse
import json
import random
import runpy
from pathlib import Path
from typing import Any

REMARKS = runpy.run_path(str(Path(__file__).parents[2] / "scripted_model.py"))["REMARKS"]
FORMS = ["a history", "a description", "an essay", "a story", "a guide", "a report"]
SUBJECTS = ["mill", "bridge", "school", "harbour", "library", "market", "tower", "bakery", "chapel", "theatre", "inn"]
UNSEEN = ["station", "garden", "castle", "museum"]
WORDS = 100  # of a chapter
CHAPTERS = (2, 3)  # of the texts that are asked for
RIGHT, HABIT = 0.4, 1  # the share of answers in chats.jsonl with the length asked for, the chapters of the others


def chapter(number: int, subject: str) -> str:
    """Return a chapter of exactly WORDS words, which ends with its number."""
    end = f"So ends chapter {number}."
    words = " ".join(REMARKS[(3 * number + n) % len(REMARKS)] for n in range(len(REMARKS))).format(subject=subject)
    return " ".join([*words.split()[: WORDS - 3], end])  # digits are no words


def text(chapters: int, subject: str) -> str:
    return "\n".join(chapter(number, subject) for number in range(1, chapters + 1))


def prompt(form: str, chapters: int, subject: str) -> str:
    return f"Write {form} of {chapters * WORDS} words about the {subject} of our town."


def write_lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--chats", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    given.output.mkdir(parents=True, exist_ok=True)
    every = [(form, chapters, subject) for form in FORMS for chapters in CHAPTERS for subject in SUBJECTS]
    chats = []
    for form, chapters, subject in rng.choices(every, k=given.chats):
        written = text(chapters if rng.random() < RIGHT else HABIT, subject)
        turns = zip(("user", "assistant"), (prompt(form, chapters, subject), written), strict=True)
        chats.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    write_lines(given.output / "chats.jsonl", chats)
    asked = [prompt(*each) for each in rng.sample(every, given.prompts)]
    write_lines(given.output / "prompts.jsonl", [{"prompt": each} for each in asked])
    cases = [
        {"prompt": prompt(form, chapters, subject), "type": form, "length": chapters * WORDS}
        for form, subject in zip(FORMS, UNSEEN, strict=False)
        for chapters in CHAPTERS
    ]
    write_lines(given.output / "cases.jsonl", cases)


if __name__ == "__main__":
    main()
