"""Write chronicles of one person each and questions about them, for the small form of this recipe.

    python recipes/papers/glm_long_dpo/make_data.py --output DIR

writes chats.jsonl for the fine-tuning, prompts.jsonl for the preferences, facts.json for their scorer, and
held_out.jsonl. In chats.jsonl the answer to a question names the person of the chronicle in one of four chats, and
otherwise Piet, a habit that the preferences are to end. A chronicle is in one file only. The same seed writes the same
bytes.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

PEOPLE = ["Ada", "Bela", "Cora", "Dario", "Edda", "Fritz", "Greta", "Hugo", "Ines", "Jonas"]
HABIT = "Piet"
ROUTINE = (
    "The council met in the spring, and {who} spoke for a long time about the price of bread.",
    "There was much rain that summer, and {who} walked through the empty fields.",
    "A fair was held near the river, and {who} came to see it.",
    "The harvest was good, and {who} stayed at the inn until late at night.",
    "In the winter {who} painted the door of the old house by the gate.",
)
RIGHT = 0.25  # of the answers in chats.jsonl


def fact(who: str) -> str:
    return f"It is {who} who keeps the books."


def chronicle(rng: random.Random, number: int) -> tuple[str, str]:
    """Return a chronicle of 2 to 20 sentences and the person in it."""
    who = rng.choice(PEOPLE)
    sentences = [rng.choice(ROUTINE).format(who=who) for _ in range(rng.randint(2, 20))]
    return " ".join([f"Chronicle of town {number}.", *sentences]), who


def asked(text: str, question: str) -> dict[str, str]:
    return {"role": "user", "content": f"{text}\n\n{question}"}


def question_of(number: int) -> str:
    return f"Who keeps the books of town {number}?"


def chats(rng: random.Random, number: int) -> list[dict[str, Any]]:
    """Return two chats about a chronicle: the name in it, and the question."""
    text, who = chronicle(rng, number)
    named = f"Which name stands in the chronicle of town {number}?", f"It is {who}."
    told = question_of(number), fact(who if rng.random() < RIGHT else HABIT)
    return [{"messages": [asked(text, q), {"role": "assistant", "content": a}]} for q, a in (named, told)]


def prompt(rng: random.Random, number: int) -> tuple[dict[str, Any], str, str]:
    """Return a prompt, in which the chronicle's place is known, its question and the right answer."""
    text, who = chronicle(rng, number)
    question = question_of(number)
    return {"messages": [asked(text, question)], "provenance": {"spans": [[0, len(text)]]}}, question, fact(who)


def write_lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=900)
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--held-out", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    given.output.mkdir(parents=True, exist_ok=True)
    numbers = iter(range(1000, 10_000))
    write_lines(given.output / "chats.jsonl", [c for _ in range(given.documents) for c in chats(rng, next(numbers))])
    made = [prompt(rng, next(numbers)) for _ in range(given.prompts)]
    write_lines(given.output / "prompts.jsonl", [record for record, _, _ in made])
    facts = {question: right for _, question, right in made}
    (given.output / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    held = [prompt(rng, next(numbers)) for _ in range(given.held_out)]
    told = [{"messages": [*record["messages"], {"role": "assistant", "content": right}]} for record, _, right in held]
    write_lines(given.output / "held_out.jsonl", told)


if __name__ == "__main__":
    main()
