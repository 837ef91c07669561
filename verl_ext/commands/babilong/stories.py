"""bAbI stories of qa1 to qa5: facts, and questions after some of them, in the words of bAbI v1.2.

Questions are asked about what the reader of the facts knows, never about what only the world knows. They keep bAbI's
trailing space.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import ClassVar

from verl_ext.values import Options, option

PLACES = ("bedroom", "kitchen", "garden", "hallway", "bathroom", "office")
OBJECTS = ("apple", "football", "milk")
# Where the actors of qa1, qa2 and qa3 stand before the first fact; no fact says so.
STARTS = {"John": "kitchen", "Mary": "bedroom", "Sandra": "garden", "Daniel": "hallway"}
GIVERS = ("Bill", "Fred", "Jeff", "Mary")  # the actors of qa5
VERBS = {
    "move": ("moved to", "went to", "journeyed to", "travelled to", "went back to"),
    "get": ("took", "got", "grabbed", "picked up"),
    "drop": ("dropped", "discarded", "put down", "left"),
    "give": ("gave", "handed", "passed"),
}
OPPOSITES = {"north": "south", "south": "north", "east": "west", "west": "east"}
FACTS_PER_QUESTION = {"qa1": 2, "qa2": 3, "qa3": 3}  # of bAbI: before every question, of qa2 and qa3 the fewest
MOST_UNRELATED = 5  # facts of qa5 between a give event and the question about it


@dataclass(frozen=True)
class StoryOptions(Options):
    """How long stories are."""

    prefix: ClassVar[str] = "story"

    questions: int = option(5, "questions of a story, each a sample with the facts before it (qa4: 1)", least=1)
    facts_per_question: int | None = option(
        None, "facts before each question: exactly of qa1 (null: 2), at least of qa2 and qa3 (null: 3)", least=1
    )
    max_facts: int | None = option(
        None, "most facts of a sample; null: the benchmark's, one for every 8 tokens (0k: any number)", least=1
    )

    def questions_of(self, task: str) -> int:
        """How many questions a story of the task has."""
        return 1 if task == "qa4" else self.questions

    def facts_between(self, task: str) -> int:
        """Facts of qa1, qa2 or qa3 before every question, of qa2 and qa3 the fewest."""
        return self.facts_per_question or FACTS_PER_QUESTION[task]

    def fewest_facts(self, task: str, question: int) -> int:
        """Facts before question 0, 1, … of any story of the task at least; of qa1 and qa4, exactly so many."""
        if task == "qa4":
            return 2
        if task == "qa5":
            return question + 2  # a get, and a give event for every question
        return (question + 1) * self.facts_between(task)


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
        """Ask after the facts so far."""
        self.questions.append(Question(len(self.facts), text, answer))


@dataclass(frozen=True)
class Event:
    """move: actor to the place `thing`; get, drop: the object `thing`; give: the object `thing` to `recipient`."""

    kind: str
    actor: str
    thing: str
    recipient: str = ""


class World:
    """Where every actor is, where every object lies that nobody holds, and who holds the others; and what a reader of
    the facts knows of it, by bAbI's rules.

    known_places: of actors, from the first move on. known_paths: for each object every place that it was in, in order:
    that of its holder, or where its holder dropped it; None while the holder's place is unknown.
    """

    def __init__(self, actor_places: Mapping[str, str], object_places: Mapping[str, str]) -> None:
        self.actor_places = dict(actor_places)
        self.object_places = dict(object_places)
        self.holders: dict[str, str] = {}
        self.known_places: dict[str, str] = {}
        self.known_paths: dict[str, list[str | None]] = {}

    def possible(self, kinds: Sequence[str]) -> list[Event]:
        """Every event of these kinds that is valid now, in a fixed order."""
        here, events = self.actor_places, []
        for kind in kinds:
            if kind == "move":
                events += [Event(kind, *pair) for pair in product(here, PLACES) if pair not in here.items()]
            elif kind == "get":
                lying = product(here, self.object_places.items())
                events += [Event(kind, actor, thing) for actor, (thing, place) in lying if place == here[actor]]
            elif kind == "drop":
                events += [Event(kind, actor, thing) for thing, actor in self.holders.items()]
            else:
                for (thing, actor), other in product(self.holders.items(), here):
                    if other != actor and here[other] == here[actor]:
                        events.append(Event(kind, actor, thing, other))
        return events

    def perform(self, event: Event) -> None:
        """Change the state by a valid event."""
        actor, thing = event.actor, event.thing
        moved = [thing]
        if event.kind == "move":
            self.actor_places[actor] = self.known_places[actor] = thing
            moved = [held for held, holder in self.holders.items() if holder == actor]
        elif event.kind == "get":
            del self.object_places[thing]
            self.holders[thing] = actor
        elif event.kind == "drop":
            del self.holders[thing]
            self.object_places[thing] = self.actor_places[actor]
        else:
            self.holders[thing] = event.recipient
        place = self.known_places.get(actor)
        for each in moved:
            path = self.known_paths.setdefault(each, [])
            if not path or path[-1] != place:
                path.append(place)

    def perform_random(self, groups: Sequence[Sequence[str]], rng: random.Random) -> Event:
        """Perform an event and return it: of a random group of kinds, drawn again while none of the group is possible.

        Some group must have a possible event; a move always is.
        """
        events: list[Event] = []
        while not events:
            events = self.possible(rng.choice(groups))
        event = rng.choice(events)
        self.perform(event)
        return event


def tracking_world(rng: random.Random) -> World:
    """The world of qa1, qa2 and qa3: actors at their fixed hidden places, objects anywhere."""
    return World(STARTS, {thing: rng.choice(PLACES) for thing in OBJECTS})


def giving_world(rng: random.Random) -> World:
    """The world of qa5: actors and objects anywhere."""
    return World({actor: rng.choice(PLACES) for actor in GIVERS}, {thing: rng.choice(PLACES) for thing in OBJECTS})


def make_story(task: str, rng: random.Random, options: StoryOptions) -> Story:
    """A story of the task, qa1 to qa5."""
    return _STORIES[task](rng, options)


def _tell(story: Story, world: World, groups: Sequence[Sequence[str]], rng: random.Random) -> Event:
    """One more event, and its fact in words; everything but a move may end in "there"."""
    event = world.perform_random(groups, rng)
    receiver = f" to {event.recipient}" if event.recipient else ""
    there = rng.choice(("", " there")) if event.kind != "move" else ""
    story.facts.append(f"{event.actor} {rng.choice(VERBS[event.kind])} the {event.thing}{receiver}{there}.")
    return event


def _where_is_actor(rng: random.Random, options: StoryOptions) -> Story:
    story, world = Story(), tracking_world(rng)
    for _ in range(options.questions):
        for _ in range(options.facts_between("qa1")):
            _tell(story, world, [("move",)], rng)
        actor = rng.choice(sorted(world.known_places))
        story.ask(f"Where is {actor}? ", world.known_places[actor])
    return story


def _where_is_object(rng: random.Random, options: StoryOptions) -> Story:
    def question(paths: dict[str, list[str | None]]) -> tuple[str, str] | None:
        places = {thing: path[-1] for thing, path in paths.items() if path[-1] is not None}
        if not places:
            return None
        thing = rng.choice(sorted(places))
        return f"Where is the {thing}? ", places[thing]

    return _object_story(rng, options.questions, options.facts_between("qa2"), question)


def _where_was_object(rng: random.Random, options: StoryOptions) -> Story:
    def question(paths: dict[str, list[str | None]]) -> tuple[str, str] | None:
        pairs = {}  # (place before, place), of places that the object was in once: "before the office" is one moment
        for thing, path in paths.items():
            if found := [(a, b) for a, b in pairwise(path) if a and b and path.count(b) == 1]:
                pairs[thing] = found
        if not pairs:
            return None
        thing = rng.choice(sorted(pairs))
        before, place = rng.choice(pairs[thing])
        return f"Where was the {thing} before the {place}? ", before

    return _object_story(rng, options.questions, options.facts_between("qa3"), question)


def _object_story(
    rng: random.Random,
    questions: int,
    facts: int,
    question: Callable[[dict[str, list[str | None]]], tuple[str, str] | None],
) -> Story:
    """Random gets, drops and moves; from the fact number `facts` after a question on, the next one in two is asked."""
    story, world = Story(), tracking_world(rng)
    since_question = 0
    while len(story.questions) < questions:
        # get, drop and move are equally likely; what a get or drop becomes depends on what is possible.
        _tell(story, world, [("get", "drop"), ("get", "drop"), ("move",)], rng)
        since_question += 1
        if since_question >= facts and rng.random() < 0.5 and (asked := question(world.known_paths)):
            story.ask(*asked)
            since_question = 0
    return story


def _what_is_in_direction(rng: random.Random, options: StoryOptions) -> Story:
    """Three rooms in a line, two relations in either order, one of them asked for, each from the side of either room.

    As in bAbI a question means the relation that a fact states: rooms two steps away do not count.
    """

    def from_either_side(place: str, direction: str, other: str) -> tuple[str, str, str]:
        return (other, OPPOSITES[direction], place) if rng.random() < 0.5 else (place, direction, other)

    first, middle, last = rng.sample(PLACES, 3)
    direction = rng.choice(("north", "east"))
    relations = [(first, direction, middle), (middle, direction, last)]
    rng.shuffle(relations)
    told = [from_either_side(*relation) for relation in relations]
    story = Story([f"The {place} is {direction} of the {other}." for place, direction, other in told])
    place, direction, other = from_either_side(*rng.choice(relations))
    forms = (f"What is {direction} of the {other}? ", f"What is the {other} {OPPOSITES[direction]} of? ")
    story.ask(rng.choice(forms), place)
    return story


def _who_gave_what(rng: random.Random, options: StoryOptions) -> Story:
    """Gets and moves until somebody gives something; up to five unrelated facts; a question about that give event.

    It is the last one of the story so far, so that no later event answers the question otherwise.
    """
    story, world = Story(), giving_world(rng)
    for _ in range(options.questions):
        gift = None
        while gift is None or gift.kind != "give":
            gift = _tell(story, world, [("get",), ("give",), ("move",)], rng)
        for _ in range(rng.randint(0, MOST_UNRELATED)):
            _tell(story, world, [("get",), ("move",)], rng)
        giver, thing, receiver = gift.actor, gift.thing, gift.recipient
        forms = (
            (f"What did {giver} give to {receiver}? ", thing),
            (f"Who gave the {thing} to {receiver}? ", giver),
            (f"Who did {giver} give the {thing} to? ", receiver),
            (f"Who gave the {thing}? ", giver),
            (f"Who received the {thing}? ", receiver),
        )
        story.ask(*rng.choice(forms))
    return story


_STORIES: dict[str, Callable[[random.Random, StoryOptions], Story]] = {
    "qa1": _where_is_actor,
    "qa2": _where_is_object,
    "qa3": _where_was_object,
    "qa4": _what_is_in_direction,
    "qa5": _who_gave_what,
}
TASKS = tuple(_STORIES)
