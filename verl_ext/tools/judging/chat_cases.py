"""Long texts with questions of our own, in LongBench-Chat's form: cases=shipped.

    title, entry 1, …, entry n      three sentences each, drawn; the facts of all questions, spread over them
    question                        at the end, as in the published set

All questions of a language and a length have the same text, so that a server with prefix caching reads it once. Texts
are the same on every machine.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import yaml  # type: ignore[import-untyped]

from verl_ext.text.word_count import count_words
from verl_ext.tools.judging.task import Case

SENTENCES = 3  # of an entry
_SLOT = re.compile(r"\{(\w+)\}")


def shipped_chat_cases(lengths: Sequence[int]) -> Iterator[Case]:
    """Yield our own cases of both languages, with texts of each length in words."""
    file = resources.files("verl_ext.tools.judging").joinpath("prompts/chat_cases.yaml")
    languages = yaml.safe_load(file.read_text(encoding="utf-8"))
    for length in lengths:
        for language, parts in languages.items():
            text = chronicle(parts, length, f"{language}-{length}")
            for number, each in enumerate(parts["questions"], start=1):
                facts = {"query": each["question"], "reference": each["answer"], "shots": each["shots"]}
                prompt = f"{text}\n\n{each['question']}"
                yield Case(f"{language}{number}-{length}", prompt, {**facts, "length": f"{length} words"})


def chronicle(parts: Mapping[str, Any], length: int, seed: str) -> str:
    """Return a text of about `length` words with the facts of all questions, each in an entry of its own."""
    rng, words, entries = random.Random(seed), 0, list[list[str]]()
    # Each question's facts are spread over the text, in their order: the place of one is a share of the text.
    own_facts = [each["facts"] for each in parts["questions"]]
    placed = sorted(
        ((n + 0.5) / len(facts), q, fact) for q, facts in enumerate(own_facts) for n, fact in enumerate(facts)
    )
    wanted = length - sum(count_words(fact) for *_, fact in placed)
    while words < wanted or len(entries) < len(placed):
        entries.append([_sentence(parts, rng) for _ in range(SENTENCES)])
        words += count_words(" ".join(entries[-1]))
    # The text has as many equal stretches as facts, so that two never stand in one entry.
    for turn, (*_, fact) in enumerate(placed):
        low, high = (len(entries) * each // len(placed) for each in (turn, turn + 1))
        entries[rng.randrange(low, high)].insert(rng.randint(0, SENTENCES), fact)
    join = "" if parts["entry"].endswith("。") else " "
    lines = (join.join([parts["entry"].format(number=n), *own]) for n, own in enumerate(entries, start=1))
    return "\n".join([parts["title"], *lines])


def _sentence(parts: Mapping[str, Any], rng: random.Random) -> str:
    drawn = {name: iter(rng.sample(words, 2)) for name, words in parts["words"].items()}  # no word twice
    text = _SLOT.sub(lambda slot: next(drawn[slot[1]]), rng.choice(parts["sentences"]))
    return text[0].upper() + text[1:]
