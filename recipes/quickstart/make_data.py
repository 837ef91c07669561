"""Write small chat data in three categories, with lengths that differ by a factor of more than 20.

    arithmetic   one to six short sums, told as stories                       45-270 tokens
    ordering     one to eight questions on weekdays, words and numbers        32-300 tokens
    documents    three questions about a generated town chronicle            130-1,000 tokens

    python recipes/quickstart/make_data.py --output DIR

writes `<category>.train.jsonl` and `<category>.val.jsonl`, one `{"messages": [...]}` a line. The same seed writes the
same bytes, and no validation conversation occurs in the training files.
"""

import argparse
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

Conversation = list[tuple[str, str]]  # (question, answer) turns


def words(text: str) -> list[str]:
    return text.split()


PEOPLE = words("Ada Bela Cora Dario Edda Fritz Greta Hugo Ines Jonas Karla Lev")
THINGS = words("apples books coins stamps shells marbles pens cards lamps seeds buttons candles tickets bottles")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
WORDS = words(
    "anchor apple basket bread candle cloud desert drum eagle engine feather flute garden grape hammer horse island"
    " iron jacket jewel kettle kite ladder lemon mirror moon needle nest ocean orchard pearl pillow quill river rope"
    " saddle silver table thunder umbrella valley velvet window winter yellow zebra"
)
PLACES = words(
    "Arden Brook Calder Dunmore Elstow Farley Galton Holme Ivel Kelso Lorne Marden Norwell Oakham Penrith Ripley Selby"
    " Tarrant Ulver Wexham"
)
POSTS = words("mill bridge school harbour library market tower bakery garden chapel theatre lighthouse")
SEASONS = words("spring summer autumn winter")
ROUTINE = (
    "In {season} the road to {place} was repaired, and the carts went round by the river.",
    "The council of {place} met in {season} and spoke for a long time about the price of bread.",
    "A fair was held near the old {post}, and people came from {place} to see it.",
    "There was much rain that {season}, so the fields around {place} stayed empty.",
    "Travellers from {place} wrote that the {post} was closed for most of the {season}.",
    "Nobody in {place} remembers who painted the door of the {post}.",
    "The harvest of {place} was good, and the {post} stayed open until late at night.",
    "A letter about the {post} went from {place} to the capital and was never answered.",
    "{who} of {place} sold {number} {things} at the gate of the {post} before noon.",
    "When {who} came back to {place}, the {post} had a new roof and {number} broken windows.",
    "It is said in {place} that {who} once carried {number} {things} across the frozen lake.",
    "The bell of the {post} rang {number} times, and {who} ran out into the snow of {place}.",
)


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """Draw a whole number from `low` to `high`, small ones more often: the long tail of real data."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def arithmetic(rng: random.Random, most: int = 6) -> Conversation:
    """Write one to `most` sums, differences and products of small numbers."""
    turns = []
    for _ in range(log_uniform(rng, 1, most)):
        who, what = rng.choice(PEOPLE), rng.choice(THINGS)
        first, second = rng.randint(2, 9), rng.randint(2, 9)
        story, term, result = rng.choice(
            [
                (f"{who} has {first} {what} and buys {second} more.", f"{first} + {second}", first + second),
                (f"{who} has {first + second} {what} and sells {second}.", f"{first + second} - {second}", first),
                (f"{who} has {first} boxes of {second} {what}.", f"{first} * {second}", first * second),
            ]
        )
        answer = f"{term} = {result}. {who} has {result} {what}."
        turns.append((f"{story} How many {what} does {who} have now?", answer))
    return turns


def ordering(rng: random.Random, most: int = 8) -> Conversation:
    """Write one to `most` questions on weekdays, words in order or backwards, and the largest or smallest number."""
    return [rng.choice([weekday, alphabet, backwards, extreme])(rng) for _ in range(log_uniform(rng, 1, most))]


def weekday(rng: random.Random) -> tuple[str, str]:
    day, days = rng.randrange(7), rng.randint(1, 20)
    later = DAYS[(day + days) % 7]
    return f"Which day is {days} days after {DAYS[day]}?", f"{days} days after {DAYS[day]} is {later}."


def alphabet(rng: random.Random) -> tuple[str, str]:
    named = rng.sample(WORDS, 3)
    return f"Put these words in the order of the alphabet: {', '.join(named)}.", f"{', '.join(sorted(named))}."


def backwards(rng: random.Random) -> tuple[str, str]:
    named = rng.sample(WORDS, 4)
    return f"Say these words backwards: {', '.join(named)}.", f"{', '.join(reversed(named))}."


def extreme(rng: random.Random) -> tuple[str, str]:
    numbers = rng.sample(range(1, 40), 4)
    name, pick = rng.choice([("largest", max), ("smallest", min)])
    return f"Which number is the {name}: {', '.join(map(str, numbers))}?", f"The {name} number is {pick(numbers)}."


def chronicle(rng: random.Random, sentences: int) -> list[str]:
    """Write filler prose in which nobody is a keeper."""
    return [
        rng.choice(ROUTINE).format(
            season=rng.choice(SEASONS),
            place=rng.choice(PLACES),
            post=rng.choice(POSTS),
            who=rng.choice(PEOPLE),
            number=rng.randint(2, 40),
            things=rng.choice(THINGS),
        )
        for _ in range(sentences)
    ]


def documents(rng: random.Random, shortest: int = 4, longest: int = 48) -> Conversation:
    """Hide three facts in a chronicle of `shortest` to `longest` sentences (log-uniform), and ask for each."""
    sentences = chronicle(rng, log_uniform(rng, shortest, longest))
    turns = [
        ("Who is the keeper?", f"The keeper is {rng.choice(PEOPLE)}."),
        ("What is the password?", f"The password is {rng.choice(WORDS)}."),
        ("What is the treasure?", f"The treasure is {rng.randint(2, 40)} {rng.choice(THINGS)}."),
    ]
    for _, fact in turns:
        sentences.insert(rng.randint(0, len(sentences)), fact)
    rng.shuffle(turns)
    first, answer = turns[0]
    return [(f"{' '.join(sentences)}\n\n{first}", answer), *turns[1:]]


# category → (the function that makes one conversation, training conversations, validation conversations)
CATEGORIES: dict[str, tuple[Callable[[random.Random], Conversation], int, int]] = {
    "arithmetic": (arithmetic, 1400, 30),
    "ordering": (ordering, 1000, 30),
    "documents": (documents, 500, 20),
}


def split(make: Callable[[random.Random], Conversation], train: int, val: int, rng: random.Random):
    """Make `val` different conversations, then `train` conversations (repeats allowed) that are not among the first."""
    held_out: dict[str, Conversation] = {}
    while len(held_out) < val:
        turns = make(rng)
        held_out[turns[0][0]] = turns
    training: list[Conversation] = []
    while len(training) < train:
        turns = make(rng)
        if turns[0][0] not in held_out:
            training.append(turns)
    return training, list(held_out.values())


def write(path: Path, conversations: list[Conversation]) -> None:
    """Write one `{"messages": [...]}` a line."""
    with path.open("w", encoding="utf-8") as file:
        for turns in conversations:
            messages = []
            for question, answer in turns:
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": answer})
            file.write(json.dumps({"messages": messages}) + "\n")


def make_data(output: Path, seed: int = 0) -> None:
    """Write both files of every category into `output`."""
    output.mkdir(parents=True, exist_ok=True)
    for name, (make, train, val) in CATEGORIES.items():
        rng = random.Random(f"{seed} {name}")
        training, held_out = split(make, train, val, rng)
        write(output / f"{name}.train.jsonl", training)
        write(output / f"{name}.val.jsonl", held_out)
        print(f"  {name:<10} {len(training):>5} training and {len(held_out):>3} validation conversations")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_data(arguments.output, arguments.seed)
