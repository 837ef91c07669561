"""Write short and long texts of the length that is asked for, for the small form of grid.sh.

    python recipes/papers/longwriter/grid_data.py --output DIR --seed N

writes short.jsonl, long.jsonl, and cases.jsonl in LongBench-Write's form, on subjects that neither has. A text
consists of parts of 20 words, each of which says which part it is and how many there are. The same seed writes the same
bytes.
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
WORDS = 20  # of a part
SHORT, LONG, CASES = (1, 2), (3, 4, 5, 6, 7, 8), (1, 2, 4, 6, 8)  # parts of a text


def part(number: int, parts: int, subject: str) -> str:
    """Return a part of exactly WORDS words, of which its heading has two, as digits are none."""
    words = " ".join(REMARKS[(2 * number + n) % len(REMARKS)] for n in range(3)).format(subject=subject).split()
    return f"Part {number} of {parts}. {' '.join(words[: WORDS - 2])}"


def prompt(form: str, parts: int, subject: str) -> str:
    return f"Write {form} of {parts * WORDS} words about the {subject} of our town."


def chat(rng: random.Random, lengths: tuple[int, ...]) -> dict[str, Any]:
    form, parts, subject = rng.choice(FORMS), rng.choice(lengths), rng.choice(SUBJECTS)
    text = "\n".join(part(number, parts, subject) for number in range(1, parts + 1))
    turns = zip(("user", "assistant"), (prompt(form, parts, subject), text), strict=True)
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--short", type=int, default=900)
    parser.add_argument("--long", type=int, default=600)
    parser.add_argument("--cases", type=int, default=4, help="of each length")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    given.output.mkdir(parents=True, exist_ok=True)
    write_lines(given.output / "short.jsonl", [chat(rng, SHORT) for _ in range(given.short)])
    write_lines(given.output / "long.jsonl", [chat(rng, LONG) for _ in range(given.long)])
    cases = [
        {"prompt": prompt(form, parts, subject), "type": form, "length": parts * WORDS}
        for parts in CASES
        for form, subject in zip(rng.sample(FORMS, given.cases), UNSEEN, strict=False)
    ]
    write_lines(given.output / "cases.jsonl", cases)


if __name__ == "__main__":
    main()
