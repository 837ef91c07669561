"""Write documents, short chats and a benchmark about a few invented towns, for the small form of this recipe.

    python recipes/papers/longalign/make_data.py --output DIR

writes documents.jsonl (150 to 900 words, log-uniform), chats.jsonl, and cases.json and few_shots.json in
LongBench-Chat's form, whose documents are not in documents.jsonl. The same seed writes the same bytes.
"""

import argparse
import json
import math
import random
from pathlib import Path

BUILDINGS = ["mill", "bridge", "school", "harbour", "library", "market", "tower", "bakery", "chapel", "theatre"]
TOWNS = ["Arden", "Brook", "Calder", "Dunmore", "Elstow", "Farley", "Galton", "Holme"]
PEOPLE = ["Ada", "Bela", "Cora", "Dario", "Edda", "Fritz", "Greta", "Hugo", "Ines", "Jonas", "Karla", "Lev"]
ROUTINE = (
    "The council met in the spring and spoke for a long time about the price of bread.",
    "There was much rain that summer, and the fields around the town stayed empty.",
    "A fair was held near the river, and people came from far away to see it.",
    "The harvest was good, and the inn stayed open until late at night.",
    "Nobody remembers who painted the door of the old house by the gate.",
)


def chronicle(rng: random.Random, words: int) -> tuple[str, list[tuple[str, str]]]:
    """Return a chronicle of about that many words, and its questions with their answers."""
    town, sentences, asked, count = rng.choice(TOWNS), [], [], 0
    year = rng.randint(1600, 1700)
    while count < words or len(asked) < 5:
        if rng.random() < 0.4 or count >= words:
            year += rng.randint(1, 4)
            building, who = rng.choice(BUILDINGS), rng.choice(PEOPLE)
            sentence = f"In {year} the {building} of {town} was sold to {who} for {rng.randint(2, 99)} coins."
            asked.append((f"To whom was the {building} of {town} sold in {year}?", sentence))
        else:
            sentence = rng.choice(ROUTINE)
        sentences.append(sentence)
        count += len(sentence.split())
    return " ".join(sentences), asked


def write_lines(path: Path, records: list[object]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=120)
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    given.output.mkdir(parents=True, exist_ok=True)
    lengths = [round(math.exp(rng.uniform(math.log(150), math.log(900)))) for _ in range(given.documents)]
    write_lines(given.output / "documents.jsonl", [{"text": chronicle(rng, length)[0]} for length in lengths])
    chats = []
    for _ in range(200):
        who, first, second = rng.choice(PEOPLE), rng.randint(2, 9), rng.randint(2, 9)
        asked = f"{who} has {first} coins and finds {second}. How many are there now?"
        said = f"{who} has {first + second} coins."
        chats.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]})
    write_lines(given.output / "chats.jsonl", chats)
    cases, shots = [], []
    for number in range(1, given.cases + 1):
        text, asked = chronicle(rng, 300)
        query, reference = rng.choice(asked)
        cases.append({"idx": number, "prompt": f"{text}\n\n{query}", "query": query, "answer": reference})
        half = " ".join(reference.split()[:7])
        scored = (("I do not know.", 1), (half, 5), (reference, 10))
        shots.append([{"answer": answer, "score": score} for answer, score in scored])
    (given.output / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    (given.output / "few_shots.json").write_text(json.dumps(shots), encoding="utf-8")


if __name__ == "__main__":
    main()
