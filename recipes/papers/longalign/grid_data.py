"""Write short and long texts about a sale, questions about it, and other chats, for the small form of grid.sh.

    python recipes/papers/longalign/grid_data.py --output DIR --seed N

writes chats.jsonl (half of them short texts with a question, half requests to count, with longer answers), long.jsonl
(long texts with a question), and cases.json and few_shots.json in LongBench-Chat's form, whose texts are in no other
file. Every text says who paid how much for a house; a long one also names other people and prices. The reference of a
case is the buyer and the price, so that a rating by words counts these alone. The same seed writes the same bytes.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

PEOPLE = ["Ada", "Bela", "Cora", "Dario", "Edda", "Fritz", "Greta", "Hugo", "Ines", "Jonas"]
NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
HOUSES = ["mill", "school", "library", "tower", "bakery", "chapel", "theatre", "inn"]
ROUTINE = (
    "The council met in the spring and spoke for a long time about the price of bread.",
    "There was much rain that summer, and the fields around the town stayed empty.",
    "A fair was held near the river, and people came from far away to see it.",
    "The harvest was good, and the doors stayed open until late at night.",
    "Nobody remembers who painted the old house by the gate.",
)
SALE = (
    "Later {who} paid the {price} coins.",
    "The clerk wrote that {who} paid {price} coins.",
    "They say that {who} paid {price} coins in silver.",
    "On a Sunday {who} paid {price} coins for the house.",
)
OTHERS = (
    "A fair was held near the river, and {who} came to see it.",
    "There was much rain that summer, and {who} walked through the empty fields.",
    "At the inn {who} asked {price} coins for a bed.",
    "The harvest was good, and {who} had {price} coins left.",
)
SHORT, LONG = (1, 5), (8, 24)  # sentences of a text
CASES = (3, 8, 16, 24)  # sentences of the texts of the cases


def sale(rng: random.Random, sentences: int) -> tuple[str, str, str, str, str]:
    """Return a text, its question and answer, the buyer and the price."""
    house, who, price = rng.choice(HOUSES), rng.choice(PEOPLE), rng.choice(NUMBERS)
    is_long = sentences > SHORT[1]
    kinds = rng.choices((SALE, OTHERS, ROUTINE), (2, 4, 9) if is_long else (1, 0, 1), k=sentences)
    lines = []
    for kind in (*kinds, SALE):  # once at least
        named = (who, price) if kind is SALE else (rng.choice(PEOPLE), rng.choice(NUMBERS))
        line = rng.choice(kind).format(who=named[0], price=named[1])
        lines.insert(rng.randint(0, len(lines)), line)
    return (
        " ".join(lines),
        f"Who bought the {house}, and for how many coins?",
        f"It was {who} for {price} coins.",
        who,
        price,
    )


def count(rng: random.Random) -> tuple[str, str]:
    """Return a request to count, and the numbers."""
    first, last = sorted(rng.sample(range(len(NUMBERS)), 2))
    said = ", ".join(f"then {number}" for number in NUMBERS[first : last + 1])
    return f"Count from {NUMBERS[first]} to {NUMBERS[last]}.", f"First {said.removeprefix('then ')}."


def chat(asked: str, said: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


def about_a_text(rng: random.Random, sentences: tuple[int, int]) -> dict[str, Any]:
    text, question, answer, _, _ = sale(rng, rng.randint(*sentences))
    return chat(f"{text}\n\n{question}", answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--chats", type=int, default=1000)
    parser.add_argument("--long", type=int, default=400)
    parser.add_argument("--cases", type=int, default=16, help="of each length")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    given.output.mkdir(parents=True, exist_ok=True)
    chats = [about_a_text(rng, SHORT) if number % 2 else chat(*count(rng)) for number in range(given.chats)]
    for name, records in (("chats", chats), ("long", [about_a_text(rng, LONG) for _ in range(given.long)])):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (given.output / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    cases, shots = [], []
    for sentences in CASES:
        for _ in range(given.cases):
            text, question, answer, who, price = sale(rng, sentences)
            prompt, idx = f"{text}\n\n{question}", len(cases) + 1
            of_case = {"prompt": prompt, "query": question, "answer": f"{who} {price}"}
            cases.append({"idx": idx, "length": f"{sentences} sentences", **of_case})
            scored = (("I do not know.", 1), (f"It was {who} for nothing.", 5), (answer, 10))
            shots.append([{"answer": said, "score": score} for said, score in scored])
    (given.output / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    (given.output / "few_shots.json").write_text(json.dumps(shots), encoding="utf-8")


if __name__ == "__main__":
    main()
