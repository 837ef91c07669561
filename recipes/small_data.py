"""Write small data for the recipes' small forms: facts, sums, code, chronicles, tools, preferences and texts.

    python recipes/small_data.py FOLDER NAME[=RECORDS] …

writes FOLDER/NAME.jsonl, one record a line. The same name and number write the same bytes. A model of one million
parameters learns each of them within a minute on two CPU cores.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# ruff: noqa: SIM905  names in one line each
PEOPLE = "Ada Bela Cora Dario Edda Fritz Greta Hugo Ines Jonas Karla Lev".split()
PLACES = "Arden Brook Calder Dunmore Elstow Farley Galton Holme Ivel Kelso Lorne Marden".split()
THINGS = "apples books coins stamps shells marbles pens cards lamps seeds buttons candles".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
COLOURS = "red blue green white black yellow".split()
VERBS = {"add": "+", "subtract": "-", "multiply": "*"}
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


def chat(question: str, answer: str, **message: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **message}],
    }


def fact(rng: random.Random) -> tuple[str, str]:
    """Ask for something that is always the same, and can only be remembered."""
    number = rng.randrange(3)
    if number == 0:
        day = rng.randrange(7)
        return f"Which day follows {DAYS[day]}?", f"{DAYS[(day + 1) % 7]} follows {DAYS[day]}."
    if number == 1:
        place = rng.randrange(len(PLACES))
        return f"Who lives in {PLACES[place]}?", f"{PEOPLE[place]} lives in {PLACES[place]}."
    thing = rng.randrange(len(THINGS))
    return f"Which colour do {THINGS[thing]} have?", f"The {THINGS[thing]} are {COLOURS[thing % len(COLOURS)]}."


def sum_of(rng: random.Random) -> tuple[str, str, int, int]:
    who, what = rng.choice(PEOPLE), rng.choice(THINGS)
    first, second = rng.randint(2, 9), rng.randint(2, 9)
    question = f"{who} has {first} {what} and buys {second} more. How many {what} does {who} have now?"
    return question, f"{who} has {{}} {what}.", first, second


def chats(rng: random.Random) -> dict[str, Any]:
    turns = [fact(rng) for _ in range(rng.randint(1, 4))]
    return {"messages": [m for question, answer in turns for m in chat(question, answer)["messages"]]}


def maths(rng: random.Random) -> dict[str, Any]:
    question, answer, first, second = sum_of(rng)
    return chat(question, f"{first} + {second} = {first + second}. {answer.format(first + second)}")


def code(rng: random.Random) -> dict[str, Any]:
    verb, number = rng.choice(list(VERBS)), rng.randint(2, 60)
    body = f"def {verb}_{number}(x):\n    return x {VERBS[verb]} {number}"
    return chat(f"Write a Python function that can {verb} {number}.", f"```python\n{body}\n```")


def long(rng: random.Random) -> dict[str, Any]:
    """Ask for the keeper of a town, who stands somewhere in a chronicle of 4 to 64 sentences."""
    sentences = [text(rng) for _ in range(round(4 * 16 ** rng.random()))]
    keeper = rng.choice(PEOPLE)
    sentences.insert(rng.randint(0, len(sentences)), f"The keeper is {keeper}.")
    return chat(f"{' '.join(sentences)}\n\nWho is the keeper?", f"The keeper is {keeper}.")


def text(rng: random.Random) -> str:
    place, season = rng.choice(PLACES), rng.choice(["spring", "summer", "autumn", "winter"])
    return rng.choice(
        [
            f"In {season} the road to {place} was repaired, and the carts went round by the river.",
            f"A fair was held in {place} that {season}, and people came from {rng.choice(PLACES)} to see it.",
            f"{rng.choice(PEOPLE)} of {place} sold {rng.randint(2, 40)} {rng.choice(THINGS)} before noon.",
            f"There was much rain that {season}, so the fields around {place} stayed empty.",
        ]
    )


def general(rng: random.Random) -> dict[str, Any]:
    return {"text": " ".join(text(rng) for _ in range(rng.randint(4, 16)))}


def domain(rng: random.Random) -> dict[str, Any]:
    """Write a maintenance log: another vocabulary than `general`, with numbers that follow a rule."""
    hours, part = rng.randint(1, 40), rng.choice(["pump", "valve", "motor", "filter", "sensor"])
    lines = []
    for _ in range(rng.randint(4, 16)):
        lines.append(f"[{hours:03d} h] {part} checked, pressure {hours % 7 + 2} bar, next check at {hours + 10:03d} h.")
        hours += 10
    return {"text": "\n".join(lines)}


def reasoning(rng: random.Random) -> dict[str, Any]:
    question, answer, first, second = sum_of(rng)
    thought = f"There are {first} and {second} more, and {first} + {second} = {first + second}."
    return chat(question, answer.format(first + second), reasoning_content=thought)


def tools(rng: random.Random) -> dict[str, Any]:
    place, degrees = rng.choice(PLACES), rng.choice([5, 10, 15, 20, 25])
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"place": place}}}
    messages = [
        {"role": "user", "content": f"How warm is it in {place}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps({"degrees": degrees})},
        {"role": "assistant", "content": f"It is {degrees} degrees in {place}."},
    ]
    return {"messages": messages, "tools": [WEATHER_TOOL]}


def sum_pairs(rng: random.Random) -> dict[str, Any]:
    """Prefer an answer that shows its sum."""
    question, answer, first, second = sum_of(rng)
    plain = answer.format(first + second)
    return {"prompt": question, "chosen": f"{first} + {second} = {first + second}. {plain}", "rejected": plain}


def fact_pairs(rng: random.Random) -> dict[str, Any]:
    """Prefer an answer that thanks for the question."""
    question, plain = fact(rng)
    return {"prompt": question, "chosen": f"{plain} Thank you for asking.", "rejected": plain}


KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    each.__name__: each for each in (chats, code, domain, fact_pairs, general, long, maths, reasoning, sum_pairs, tools)
}


def main(folder: Path, kinds: list[str]) -> None:
    """Write a file for each NAME=RECORDS."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        name, _, number = kind.partition("=")
        rng = random.Random(kind)
        records = [json.dumps(KINDS[name](rng)) for _ in range(int(number or 1000))]
        (folder / f"{name}.jsonl").write_text("\n".join(records) + "\n", encoding="utf-8")
        print(f"  {len(records):,} records in {folder / name}.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
