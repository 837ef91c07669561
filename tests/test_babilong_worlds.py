"""bAbI stories: their rules, their wordings, and answers that follow from the facts."""

import random
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.commands.babilong.stories import STARTS, TASKS, Event, Story, StoryOptions, World, make_story
from verl_ext.data.babilong import TASK_LABELS

MOVE = r"(?P<move>\w+) (?:moved|went|journeyed|travelled|went back) to the (?P<to>\w+)\."
GET = r"(?P<get>\w+) (?:took|got|grabbed|picked up) the (?P<got>\w+)(?: there)?\."
DROP = r"(?P<drop>\w+) (?:dropped|discarded|put down|left) the (?P<dropped>\w+)(?: there)?\."
GIVE = r"(?P<give>\w+) (?:gave|handed|passed) the (?P<given>\w+) to (?P<receiver>\w+)(?: there)?\."
FACT = re.compile("|".join((GIVE, MOVE, GET, DROP)))
RELATION = re.compile(r"The (\w+) is (north|south|east|west) of the (\w+)\.")
ANY_FACT = re.compile(rf"(?:{GIVE})|(?:{MOVE})|(?:{GET})|(?:{DROP})|The \w+ is (?:north|south|east|west) of the \w+\.")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
seeds = st.integers(0, 2**32)


def read(fact: str) -> tuple[str, ...]:
    """(kind, actor, place or object, receiver if any), from the words alone."""
    match = FACT.fullmatch(fact)
    assert match, fact
    kind = next(kind for kind in ("give", "move", "get", "drop") if match[kind])
    rest = {"move": ("to",), "get": ("got",), "drop": ("dropped",), "give": ("given", "receiver")}[kind]
    return (kind, match[kind], *(match[name] for name in rest))


def last_move(facts: list[str], actor: str) -> str | None:
    """Where the actor is after the facts: read backwards to the last move."""
    return next((f[2] for f in map(read, reversed(facts)) if f[:2] == ("move", actor)), None)


def object_place(facts: list[str], thing: str) -> str | None:
    """Where the object is: with the last who got it, or where the last who dropped it stood then."""
    for number in reversed(range(len(facts))):
        kind, actor, what, *_ = read(facts[number])
        if what == thing and kind in ("get", "drop"):
            return last_move(facts if kind == "get" else facts[:number], actor)
    return None


def replay(facts: list[str], question: str) -> str | None:
    """The answer, found from the facts as text."""
    if match := re.fullmatch(r"Where is (\w+)\? ", question):
        return last_move(facts, match[1])
    if match := re.fullmatch(r"Where is the (\w+)\? ", question):
        return object_place(facts, match[1])
    if match := re.fullmatch(r"Where was the (\w+) before the (\w+)\? ", question):
        places = [object_place(facts[:end], match[1]) for end in range(1, len(facts) + 1)]
        path = [place for number, place in enumerate(places) if number == 0 or places[number - 1] != place]
        (before,) = [a for a, b in pairwise(path) if b == match[2]]
        return before
    if "of" in question.split() or question.endswith("of? "):
        return replay_relation(facts, question)
    return replay_gift(facts, question)


def replay_relation(facts: list[str], question: str) -> str | None:
    known = {}
    for fact in facts:
        match = RELATION.fullmatch(fact)
        assert match, fact
        known[match[2], match[3]] = match[1]
        known[OPPOSITE[match[2]], match[1]] = match[3]
    if match := re.fullmatch(r"What is (\w+) of the (\w+)\? ", question):
        return known[match[1], match[2]]
    match = re.fullmatch(r"What is the (\w+) (\w+) of\? ", question)
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


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_every_answer_follows_from_the_facts_before_its_question(task: str, seed: int) -> None:
    story = make_story(task, random.Random(seed), StoryOptions())
    assert len(story.questions) == (1 if task == "qa4" else 5)
    for question in story.questions:
        assert replay(story.facts[: question.num_facts], question.text) == question.answer
        assert question.text.endswith("? ")
        assert question.answer in TASK_LABELS[task]
        assert not re.search(rf"\b{question.answer}\b", question.text)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, moves=st.integers(1, 4), questions=st.integers(1, 6))
def test_qa1_is_so_many_times_moves_and_a_question_about_an_actor_who_moved(
    seed: int, moves: int, questions: int
) -> None:
    story = make_story("qa1", random.Random(seed), StoryOptions(questions, moves))
    assert [question.num_facts for question in story.questions] == [moves * (n + 1) for n in range(questions)]
    here = dict(STARTS)
    for kind, actor, place in map(read, story.facts):
        assert kind == "move"
        assert here[actor] != place
        here[actor] = place


@pytest.mark.parametrize("task", ["qa2", "qa3", "qa5"])
@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_objects_are_got_dropped_and_given_only_by_those_who_can(task: str, seed: int) -> None:
    holder: dict[str, str] = {}
    place: dict[str, str] = {}
    actors = set()
    for kind, actor, what, *receiver in map(read, make_story(task, random.Random(seed), StoryOptions()).facts):
        actors.add(actor)
        if kind == "move":
            assert place.get(actor) != what
            place[actor] = what
        elif kind == "get":
            assert what not in holder
            holder[what] = actor
        elif kind == "drop":
            assert holder.pop(what) == actor
        else:
            assert holder[what] == actor != receiver[0]
            assert place.get(actor, place.get(receiver[0])) == place.get(receiver[0], place.get(actor))
            holder[what] = receiver[0]
    assert actors <= ({"Bill", "Fred", "Jeff", "Mary"} if task == "qa5" else set(STARTS))


@pytest.mark.parametrize("task", ["qa2", "qa3"])
def test_questions_of_qa2_and_qa3_come_after_the_third_fact_or_later(task: str) -> None:
    for fewest in (None, 6):
        options = StoryOptions(facts_per_question=fewest)
        counts = [q.num_facts for q in make_story(task, random.Random(1), options).questions]
        assert all(b - a >= (fewest or 3) for a, b in pairwise([0, *counts]))


def test_qa5_asks_about_the_last_gift_at_most_five_facts_later() -> None:
    waits = set()
    for seed in range(60):
        story = make_story("qa5", random.Random(seed), StoryOptions())
        for question in story.questions:
            kinds = [read(fact)[0] for fact in story.facts[: question.num_facts]]
            waits.add(len(kinds) - 1 - max(n for n, kind in enumerate(kinds) if kind == "give"))
    assert waits == {0, 1, 2, 3, 4, 5}


def test_qa4_relates_three_rooms_and_asks_in_every_form() -> None:
    stories = [make_story("qa4", random.Random(seed), StoryOptions()) for seed in range(100)]
    for story in stories:
        rooms = [room for fact in story.facts for room in RELATION.fullmatch(fact).group(1, 3)]  # type: ignore[union-attr]
        assert (len(story.facts), len(set(rooms))) == (2, 3)
    assert len({re.sub(r"the \w+", "X", story.questions[0].text) for story in stories}) == 8


def test_all_wordings_occur() -> None:
    stories = [make_story(task, random.Random(seed), StoryOptions()) for task in ("qa2", "qa5") for seed in range(40)]
    facts = " ".join(fact for story in stories for fact in story.facts)
    verbs = "moved to,went to,journeyed to,travelled to,went back to,took,got,grabbed,picked up,dropped,discarded,"
    verbs += "put down,left,gave,handed,passed"
    assert all(f" {verb} the " in facts for verb in verbs.split(","))
    assert " there." in facts


def test_the_same_seed_tells_the_same_story() -> None:
    def told(seed: int) -> list[Story]:
        return [make_story(task, random.Random(seed), StoryOptions()) for task in TASKS]

    assert told(3) == told(3)
    assert told(3) != told(4)


def test_a_move_to_the_current_place_is_not_possible() -> None:
    world = World({"John": "kitchen"}, {"apple": "kitchen", "milk": "office"})
    assert Event("move", "John", "kitchen") not in world.possible(["move"])
    assert world.possible(["get", "drop", "give"]) == [Event("get", "John", "apple")]
    world.perform(Event("get", "John", "apple"))
    world.perform(Event("move", "John", "office"))
    assert world.possible(["drop"]) == [Event("drop", "John", "apple")]
    world.perform(Event("drop", "John", "apple"))
    assert world.object_places == {"apple": "office", "milk": "office"}
