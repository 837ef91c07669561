"""bAbI stories of qa1 to qa5: facts, and questions after some of them.

Facts and questions in the words of bAbI v1.2. Questions keep bAbI's trailing space.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from verl_ext.commands.babilong import stories as wording
from verl_ext.commands.babilong.world import PLACES, Event, Knowledge, draw_event, giving_world, tracking_world

VERBS = {
    "move": ("moved to", "went to", "journeyed to", "travelled to", "went back to"),
    "get": ("took", "got", "grabbed", "picked up"),
    "drop": ("dropped", "discarded", "put down", "left"),
    "give": ("gave", "handed", "passed"),
}
OPPOSITES = {"north": "south", "south": "north", "east": "west", "west": "east"}


def tell(event: Event, rng: random.Random) -> str:
    """An event as a fact; everything but a move may end in "there"."""
    receiver = f" to {event.recipient}" if event.recipient else ""
    there = rng.choice(("", " there")) if event.kind != "move" else ""
    return f"{event.actor} {rng.choice(VERBS[event.kind])} the {event.thing}{receiver}{there}."


def ask_actor(actor: str) -> str:
    """qa1."""
    return f"Where is {actor}? "


def ask_object(thing: str) -> str:
    """qa2."""
    return f"Where is the {thing}? "


def ask_before(thing: str, place: str) -> str:
    """qa3."""
    return f"Where was the {thing} before the {place}? "


def tell_relation(place: str, direction: str, other: str, rng: random.Random) -> str:
    """qa4: that `place` is in that direction of `other`, told from either of them."""
    if rng.random() < 0.5:
        place, direction, other = other, OPPOSITES[direction], place
    return f"The {place} is {direction} of the {other}."


def ask_relation(place: str, direction: str, other: str, rng: random.Random) -> tuple[str, str]:
    """qa4: question and answer about `place` being in that direction of `other`; either of them is asked for."""
    if rng.random() < 0.5:
        place, direction, other = other, OPPOSITES[direction], place
    forms = (f"What is {direction} of the {other}? ", f"What is the {other} {OPPOSITES[direction]} of? ")
    return rng.choice(forms), place


def ask_gift(event: Event, rng: random.Random) -> tuple[str, str]:
    """qa5: one of five questions about a give event, and its answer."""
    giver, thing, receiver = event.actor, event.thing, event.recipient
    return rng.choice(
        (
            (f"What did {giver} give to {receiver}? ", thing),
            (f"Who gave the {thing} to {receiver}? ", giver),
            (f"Who did {giver} give the {thing} to? ", receiver),
            (f"Who gave the {thing}? ", giver),
            (f"Who received the {thing}? ", receiver),
        )
    )


QUESTIONS = 5  # of a bAbI story; those of qa4 have one
_FACTS = {"qa1": 2, "qa2": 3, "qa3": 3}  # before every question, of qa2 and qa3 the fewest
MOST_UNRELATED = 5  # facts of qa5 between a give event and the question about it


@dataclass(frozen=True)
class Question:
    """A question asked after the story's first `num_facts` facts, which are all that it needs."""

    num_facts: int
    text: str
    answer: str


@dataclass
class Story:
    """Facts in their order, and the questions of the story."""

    facts: list[str] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)

    def ask(self, text: str, answer: str) -> None:
        """Ask after the facts told so far."""
        self.questions.append(Question(len(self.facts), text, answer))


def questions_of(task: str, questions: int) -> int:
    """How many questions a story of the task has."""
    return 1 if task == "qa4" else questions


def fewest_facts(task: str, question: int, facts_per_question: int | None = None) -> int:
    """Facts that come before question 0, 1, … of any story of the task at least; of qa1 and qa4, exactly so many."""
    if task == "qa4":
        return 2
    if task == "qa5":
        return question + 2  # a get, and a give event for every question
    return (question + 1) * (facts_per_question or _FACTS[task])


def tell_story(
    task: str, rng: random.Random, questions: int = QUESTIONS, facts_per_question: int | None = None
) -> Story:
    """A story of `task` with `questions` questions.

    `facts_per_question`: moves before every question of qa1 (bAbI: 2), fewest facts before every question of qa2 and
    qa3 (bAbI: 3); qa4 and qa5 do not use it.
    """
    return _STORIES[task](rng, questions, facts_per_question)


def _where_is_actor(rng: random.Random, questions: int, moves: int | None) -> Story:
    story, world, known = Story(), tracking_world(rng), Knowledge()
    for _ in range(questions):
        for _ in range(moves or _FACTS["qa1"]):
            event = draw_event(world, [("move",)], rng)
            world.perform(event)
            known.learn(event)
            story.facts.append(wording.tell(event, rng))
        actor = rng.choice(sorted(known.actor_places))
        story.ask(wording.ask_actor(actor), known.actor_places[actor])
    return story


def _where_is_object(rng: random.Random, questions: int, facts: int | None) -> Story:
    def question(known: Knowledge) -> tuple[str, str] | None:
        places = known.object_places()
        if not places:
            return None
        thing = rng.choice(sorted(places))
        return wording.ask_object(thing), places[thing]

    return _tracking_story(rng, questions, facts or _FACTS["qa2"], question)


def _where_was_object(rng: random.Random, questions: int, facts: int | None) -> Story:
    def question(known: Knowledge) -> tuple[str, str] | None:
        pairs = known.earlier_places()
        if not pairs:
            return None
        thing = rng.choice(sorted(pairs))
        before, place = rng.choice(pairs[thing])
        return wording.ask_before(thing, place), before

    return _tracking_story(rng, questions, facts or _FACTS["qa3"], question)


def _tracking_story(
    rng: random.Random, questions: int, facts: int, question: Callable[[Knowledge], tuple[str, str] | None]
) -> Story:
    """Random gets, drops and moves; from the third fact after a question on, one time in two the next is asked."""
    story, world, known = Story(), tracking_world(rng), Knowledge()
    since_question = 0
    while len(story.questions) < questions:
        # get, drop and move are alike likely; what a get or drop becomes depends on what can be done.
        event = draw_event(world, [("get", "drop"), ("get", "drop"), ("move",)], rng)
        world.perform(event)
        known.learn(event)
        story.facts.append(wording.tell(event, rng))
        since_question += 1
        if since_question >= facts and rng.random() < 0.5 and (asked := question(known)):
            story.ask(*asked)
            since_question = 0
    return story


def _what_is_in_direction(rng: random.Random, questions: int, facts: int | None) -> Story:
    """Three rooms in a line, two relations in either order, one of them asked for.

    As in bAbI a question means the relation that a fact states: rooms two steps away do not count.
    """
    first, middle, last = rng.sample(PLACES, 3)
    direction = rng.choice(("north", "east"))
    relations = [(first, direction, middle), (middle, direction, last)]
    rng.shuffle(relations)
    story = Story([wording.tell_relation(*relation, rng) for relation in relations])
    story.ask(*wording.ask_relation(*rng.choice(relations), rng))
    return story


def _who_gave_what(rng: random.Random, questions: int, facts: int | None) -> Story:
    """Gets and moves until somebody gives something; up to five unrelated facts; a question about that give event.

    It is the last one of the story so far, so that no later event answers the question otherwise.
    """
    story, world = Story(), giving_world(rng)

    def happen(*kinds: str) -> Event:
        event = draw_event(world, [(kind,) for kind in kinds], rng)
        world.perform(event)
        story.facts.append(wording.tell(event, rng))
        return event

    for _ in range(questions):
        event = happen("get", "give", "move")
        while event.kind != "give":
            event = happen("get", "give", "move")
        for _ in range(rng.randint(0, MOST_UNRELATED)):
            happen("get", "move")
        story.ask(*wording.ask_gift(event, rng))
    return story


_STORIES: dict[str, Callable[[random.Random, int, int | None], Story]] = {
    "qa1": _where_is_actor,
    "qa2": _where_is_object,
    "qa3": _where_was_object,
    "qa4": _what_is_in_direction,
    "qa5": _who_gave_what,
}
TASKS = tuple(_STORIES)
