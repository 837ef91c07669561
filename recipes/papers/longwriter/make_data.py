"""Write instructions, short chats and a benchmark for the small form of this recipe.

    python recipes/papers/longwriter/make_data.py --output DIR

writes instructions.jsonl (each `prompt` asks for 100 to 600 words), chats.jsonl, and cases.jsonl in LongBench-Write's
form, on subjects that no instruction has. The same seed writes the same bytes.
"""

import argparse
import json
import random
from pathlib import Path

SUBJECTS = ["mill", "bridge", "school", "harbour", "library", "market", "tower", "bakery", "chapel", "theatre"]
UNSEEN = ["station", "garden", "castle", "museum"]
FORMS = ["a history", "a description", "an essay", "a story", "a guide", "a report"]
LENGTHS = [100, 200, 300, 400, 500, 600]


def write_lines(path: Path, records: list[object]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    given.output.mkdir(parents=True, exist_ok=True)
    asked = [
        {"prompt": f"Write {form} of {length} words about the {subject} of our town."}
        for form in FORMS
        for length in LENGTHS
        for subject in rng.sample(SUBJECTS, 3)
    ]
    write_lines(given.output / "instructions.jsonl", asked)
    chats = []
    for number in range(200):
        first, second = rng.randint(2, 9), rng.randint(2, 9)
        said = f"There are {first + second} coins at the {rng.choice(SUBJECTS)}."
        question = f"There are {first} coins and {second} more at number {number}. How many?"
        chats.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": said}]})
    write_lines(given.output / "chats.jsonl", chats)
    cases = [
        {"prompt": f"Write {form} of {length} words about the {subject} of our town.", "type": form, "length": length}
        for subject, form in zip(UNSEEN, FORMS, strict=False)
        for length in (100, 200, 400)
    ]
    write_lines(given.output / "cases.jsonl", cases)


if __name__ == "__main__":
    main()
