"""Files in BABILong's layout, with samples of words from a tiny model's tokenizer."""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np


def write_babilong(path: Path, samples: int, words: int, seed: int = 0) -> Path:
    """Write a JSON list of records of about ``words`` words with one-word answers; all lengths differ."""
    rng = np.random.default_rng(seed)
    records = []
    for number in range(samples):
        text = " ".join(f"w{word}" for word in rng.integers(20, 100, words + number % 5))
        records.append({"input": text, "question": "w1 w2", "target": f"w{rng.integers(3, 6)}"})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records))
    return path


MOVE = r"(?P<move>\w+) (?:moved|went|journeyed|travelled|went back) to the (?P<to>\w+)\."
GET = r"(?P<get>\w+) (?:took|got|grabbed|picked up) the (?P<got>\w+)(?: there)?\."
DROP = r"(?P<drop>\w+) (?:dropped|discarded|put down|left) the (?P<dropped>\w+)(?: there)?\."
GIVE = r"(?P<give>\w+) (?:gave|handed|passed) the (?P<given>\w+) to (?P<receiver>\w+)\."
FACT = re.compile("|".join((GIVE, MOVE, GET, DROP)))
RELATION = re.compile(r"The (\w+) is (north|south|east|west) of the (\w+)\.")
ANY_FACT = re.compile(rf"(?:{GIVE})|(?:{MOVE})|(?:{GET})|(?:{DROP})|The \w+ is (?:north|south|east|west) of the \w+\.")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


def read(fact: str) -> tuple[str, ...]:
    """Read (kind, actor, place or object, receiver if any) from the words alone."""
    match = FACT.fullmatch(fact)
    assert match, fact
    kind = next(kind for kind in ("give", "move", "get", "drop") if match[kind])
    rest = {"move": ("to",), "get": ("got",), "drop": ("dropped",), "give": ("given", "receiver")}[kind]
    return (kind, match[kind], *(match[name] for name in rest))


def last_move(facts: list[str], actor: str) -> str | None:
    """Return the actor's place after the facts, by reading backwards to the last move."""
    return next((f[2] for f in map(read, reversed(facts)) if f[:2] == ("move", actor)), None)


def object_place(facts: list[str], thing: str) -> str | None:
    """Return the object's place: that of the last actor who got it, or the place where it was dropped."""
    for number in reversed(range(len(facts))):
        kind, actor, what, *_ = read(facts[number])
        if what == thing and kind in ("get", "drop"):
            return last_move(facts if kind == "get" else facts[:number], actor)
    return None


def object_path(facts: list[str], thing: str) -> list[str | None]:
    """Return the places of an object, one after the other."""
    places = [object_place(facts[:end], thing) for end in range(1, len(facts) + 1)]
    return [place for number, place in enumerate(places) if number == 0 or places[number - 1] != place]


def replay(facts: list[str], question: str) -> str | None:
    """Find the answer from the text of the facts."""
    if match := re.fullmatch(r"Where is (\w+)\? ", question):
        return last_move(facts, match[1])
    if match := re.fullmatch(r"Where is the (\w+)\? ", question):
        return object_place(facts, match[1])
    if match := re.fullmatch(r"Where was the (\w+) before the (\w+)\? ", question):
        return [a for a, b in pairwise(object_path(facts, match[1])) if b == match[2]][-1]
    return replay_relation(facts, question) if "of" in question else replay_gift(facts, question)


def replay_relation(facts: list[str], question: str) -> str | None:
    known = {}
    for fact in facts:
        match = RELATION.fullmatch(fact)
        assert match, fact
        known[match[2], match[3]] = match[1]
        known[OPPOSITE[match[2]], match[1]] = match[3]
    if match := re.fullmatch(r"What is (\w+) of the (\w+)\?", question):
        return known[match[1], match[2]]
    match = re.fullmatch(r"What is the (\w+) (\w+) of\?", question)
    assert match, question
    return known[OPPOSITE[match[2]], match[1]]


def replay_gift(facts: list[str], question: str) -> str | None:
    forms = {
        r"What did (?P<a>\w+) give to (?P<c>\w+)\? ": 2,
        r"Who gave the (?P<b>\w+) to (?P<c>\w+)\? ": 1,
        r"Who did (?P<a>\w+) give the (?P<b>\w+) to\? ": 3,
        r"Who gave the (?P<b>\w+)\? ": 1,
        r"Who received the (?P<b>\w+)\? ": 3,
    }
    for form, answer in forms.items():
        if match := re.fullmatch(form, question):
            asked = match.groupdict()
            for fact in map(read, reversed(facts)):
                given = dict(zip("abc", fact[1:], strict=False))
                if fact[0] == "give" and all(given[key] == value for key, value in asked.items()):
                    return fact[answer]
    return None
